"""Operations that the compiler calls without changing them.

``_grouped_mm`` multiplies the tokens of every expert with the expert's weight. Torch's fake implementation
refuses dtypes that the operation itself supports on a CPU, so a compiler cannot find the shape of the result.
The recording contains the shape.

Inductor drops copies of memory, and may then read that memory after it was written, as in ``x[1:] =
x[:-1].clone()``. It does not drop the copy that `copied` makes.

Does not: make an operation faster.
"""

from collections.abc import Callable
from typing import Any

import torch

from graphpact_tape.writes import repeats

_aten = torch.ops.aten
_library = torch.library.Library("graphpact_cpu_graph", "DEF")


def _empty_as(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty_strided(x.shape, x.stride()) if not repeats(x) else torch.empty_like(x)


_library.define("copied(Tensor x) -> Tensor")
_library.impl("copied", lambda x: _empty_as(x).copy_(x), "CPU")
torch.library.register_fake("graphpact_cpu_graph::copied", _empty_as)
copied: Callable[..., torch.Tensor] = torch.ops.graphpact_cpu_graph.copied.default
"""A clone that the compiler does not drop. It keeps the strides, because they determine the order of sums."""


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor,
) -> None:
    out.copy_(_aten._grouped_mm.default(a, b, offs, bias, out_dtype))  # noqa: SLF001  no public name


def _define(schema: str, function: Callable[..., None]) -> Callable[..., None]:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"graphpact_cpu_graph::{name}", lambda *_, **__: None)
    overload: Callable[..., None] = getattr(torch.ops.graphpact_cpu_graph, name).default
    return overload


OPAQUE: dict[Any, Callable[..., None]] = {
    _aten._grouped_mm.default: _define(  # noqa: SLF001  no public name
        "grouped_mm(Tensor a, Tensor b, Tensor? offs=None, Tensor? bias=None,"
        " ScalarType? out_dtype=None, *, Tensor(a!) out) -> ()",
        _grouped_mm,
    )
}
"""For each operation: an operator with the same arguments that writes its result to ``out``."""
