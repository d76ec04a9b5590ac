"""Define a portable kernel as one torch operator, which is one node of a graph.

It uses ``Library.define`` and ``impl``, because the Python layer of the ``custom_op`` decorator costs tens of
microseconds a call.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from graphpact.graphs.kernels import declare_kernel


@functools.cache
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "FRAGMENT")


def define_kernel(
    schema: str,
    function: Callable[..., Any],
    *,
    namespace: str = "graphpact",
    on_cuda: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define operator ``<namespace>::<schema>`` with one implementation for every device, and return it.

    The implementation runs below the dispatch modes, so the operations inside it are not recorded, as with a
    compiled kernel. A kernel returns nothing and writes its outputs. So its fake implementation, which
    compilers need, does nothing.

    Args:
        schema: A torch schema, such as ``"double(Tensor x, Tensor(a!) out) -> ()"``.
        function: The implementation.
        namespace: The plugin's own namespace, such as the name of its package.
        on_cuda: Another implementation, for CUDA tensors; None for ``function``.

    Raises:
        ValueError: The schema marks no argument as written.
    """
    overload = _declare(schema, namespace, function)
    if on_cuda is not None:
        _library(namespace).impl(schema.split("(", 1)[0], on_cuda, "CUDA")
    return overload


def declare_compiled(schema: str) -> Callable[..., Any]:
    """Declare the compiled form of a portable kernel, operator ``graphpact_compiled::<schema>``; return it.

    Its implementation is in the library that `graphpact_kernels.compiled.load` loads.
    """
    return _declare(schema, "graphpact_compiled")


def define_forms(
    schema: str, function: Callable[..., Any], *, on_cuda: Callable[..., Any] | None = None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Define a kernel with a compiled form, and return the portable and the compiled operator.

    Args:
        schema: See `define_kernel`.
        function: The portable implementation.
        on_cuda: See `define_kernel`.
    """
    return define_kernel(schema, function, on_cuda=on_cuda), declare_compiled(schema)


def define_query(schema: str, function: Callable[..., Any]) -> None:
    """Define operator ``graphpact_compiled::<schema>``, which takes no tensor and says what kernels do."""
    library = _library("graphpact_compiled")
    library.define(schema)
    library.impl(schema.split("(", 1)[0], function, "CompositeImplicitAutograd")


def _declare(schema: str, namespace: str, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
    name = schema.split("(", 1)[0]
    library = _library(namespace)
    library.define(schema)
    overload: Callable[..., Any] = getattr(getattr(torch.ops, namespace), name).default
    if not overload._schema.is_mutable:  # type: ignore[attr-defined]  # noqa: SLF001  no public way
        raise ValueError(f"{namespace}::{schema} marks no argument that it writes, as Tensor(a!) out")
    if function is not None:
        library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{name}", lambda *_: None, lib=library)
    return declare_kernel(overload)


def may_read(tensor: torch.Tensor) -> bool:
    """Return whether a kernel may read ``tensor`` on the host: only if the tensor is on the CPU.

    On a CPU a kernel uses the lengths in its index tensors, and checks them. On other devices it uses the
    given bounds, so that it never waits for the device.
    """
    return tensor.device.type == "cpu"
