"""Operations that the compiler calls as they are.

Torch's fake implementation of ``_grouped_mm``, the product of every expert with its own tokens, refuses
dtypes that the operation itself computes on a CPU, so a compiler cannot find the shape of the result. The
recording has it.

The compiler calls oneDNN's product, `linear`, only with weights that it may pack, which must never change.

Does not: make an operation faster.
"""

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten
_library = torch.library.Library("graphpact_cpu_graph", "DEF")


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


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default._op(  # noqa: SLF001  no public name
        x, weight, bias, "none", [], ""
    )
    return product


def _define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"graphpact_cpu_graph::{name}", fake)
    overload: Callable[..., Any] = getattr(torch.ops.graphpact_cpu_graph, name).default
    return overload


OPAQUE: dict[Any, Callable[..., Any]] = {
    _aten._grouped_mm.default: _define(  # noqa: SLF001  no public name
        "grouped_mm(Tensor a, Tensor b, Tensor? offs=None, Tensor? bias=None,"
        " ScalarType? out_dtype=None, *, Tensor(a!) out) -> ()",
        _grouped_mm,
        lambda *_, **__: None,
    )
}
"""By operation: an operator with the same arguments that writes its result to ``out``."""

linear = _define(
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    _linear,
    lambda x, weight, _=None: x.new_empty(x.shape[0], weight.shape[0]),
)
"""oneDNN's product of rows and a transposed weight, plus a bias; in float32."""
