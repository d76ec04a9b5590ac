"""Find what a call of an operator does: which memory it writes, whether it does any work, where its code is.

For torch's operators the schemas say it, with a few exceptions that are listed here. Schemas of other
libraries may not mark a write, because torch does not check this. Therefore a call counts as work unless it
is known to do none, and a strict recorder compares memory before and after a call of another library's
operator.

Does not: run or record a call.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch

from graphpact.graphs.kernels import is_kernel
from graphpact.tensors import storage_id
from graphpact_tape.collectives import WAITS, WRITTEN, is_collective
from graphpact_tape.tasks import RecordedTask, operator_of
from graphpact_tape.trees import tensors_of

__tracebackhide__ = True

_aten = torch.ops.aten

UNINITIALISED = frozenset(
    getattr(_aten, name)
    for name in (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
)
"""Operations that return uninitialised memory; a replay need not run them."""

_COMPLETE = frozenset({"_dtensor", "aten", "graphpact", "graphpact_compiled", "prim", "prims", "profiler"})
"""Namespaces whose schemas mark all writes except `_HIDDEN_WRITES`: torch's, and those of graphpact's
kernels, which ``test_kernel_schemas.py`` compares with the actual writes.
"""

_HIDDEN_WRITES = {
    _aten.native_batch_norm: ("running_mean", "running_var"),
    _aten.cudnn_batch_norm: ("running_mean", "running_var"),
    _aten.miopen_batch_norm: ("running_mean", "running_var"),
}
"""Operations of torch that write arguments without a mark in the schema, and the names of these arguments."""

_ANY_DEVICE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
"""Dispatch keys of implementations that are used for every device without a specific implementation."""

_VIEWS_WITHOUT_A_MARK = frozenset(
    {
        _aten._unsafe_view.default,  # noqa: SLF001  no public name
        _aten.unsafe_chunk.default,
        _aten.unsafe_split.Tensor,
        _aten.unsafe_split_with_sizes.default,
    }
)
"""Views of torch whose schemas do not mark that the result shares memory with an argument."""


_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
"""For each floating-point dtype, the integer dtype of the same size."""

_LOW_BITS = 4
"""The bits of a number that may be flipped without making it infinite or changing it much."""


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensor arguments that ``func`` is known to write."""
    written: list[torch.Tensor] = []
    for at, name in _written_arguments(operator_of(func)):
        written += tensors_of(args[at] if at < len(args) else kwargs.get(name))
    return written


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the index and name of each argument that ``func`` writes."""
    hidden = WRITTEN.get(func.name(), ()) + _HIDDEN_WRITES.get(func.overloadpacket, ())
    return tuple(
        (at, a.name)
        for at, a in enumerate(func._schema.arguments)  # noqa: SLF001  no public way
        if a.name in hidden or (a.alias_info is not None and a.alias_info.is_write)
    )


def is_work(func: Any, *, allocates: bool) -> bool:
    """Return whether a replay has to repeat a call of ``func``, that is, unless it is known to do nothing.

    Args:
        func: An overload, or a `RecordedTask`.
        allocates: Whether the call returned new memory.
    """
    if isinstance(func, RecordedTask):
        return True
    return func.overloadpacket not in UNINITIALISED and (allocates or not _does_nothing(func))


@cache
def _does_nothing(func: Any) -> bool:
    """Return whether ``func`` only returns a view of its arguments, or facts about their layout."""
    if func._schema.is_mutable:  # noqa: SLF001  no public way
        return False
    if func.namespace == "profiler" or func.name() in WAITS or func in _VIEWS_WITHOUT_A_MARK:
        return True
    returns = func._schema.returns  # noqa: SLF001
    return (
        func.namespace in {"aten", "prim", "prims"}
        and bool(returns)
        and all(each.alias_info is not None or "Tensor" not in str(each.type) for each in returns)
    )


def may_hide_writes(func: Any) -> bool:
    """Return whether ``func`` may write arguments that `written_by` does not find, as for other libraries."""
    return operator_of(func).namespace not in _COMPLETE and not is_collective(func)


def python_implementation(func: Any, tensors: Iterable[torch.Tensor]) -> Callable[..., Any] | None:
    """Return the Python implementation that a call of ``func`` runs; None if it is compiled.

    Also return None if the operator is declared to represent one kernel: see
    `graphpact.graphs.declare_kernel`.

    Args:
        func: An overload.
        tensors: The tensors among the arguments of the call.
    """
    device = next((t.device.type for t in tensors), "cpu")
    key = _key_in_python(func, device, len(torch.library._impls))  # noqa: SLF001  no public way, nor for those below
    if key is None or is_kernel(func):
        return None
    kernel = torch.library.get_kernel(func, key)
    return partial(kernel.call_boxed, torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[key]))  # noqa: SLF001


@cache
def _key_in_python(func: Any, device: str, registered: int) -> str | None:
    """Return the dispatch key of a device type if the implementation that ``func`` runs there is Python.

    Args:
        func: An overload.
        device: The device type.
        registered: The number of implementations in Python, which changes the answer.
    """
    del registered
    name: str = func.name()
    key: str = torch._C._dispatch_key_for_device(device)  # noqa: SLF001
    keys = (key, *_ANY_DEVICE)
    path, in_python = name.replace("::", "/"), torch.library._impls  # noqa: SLF001
    if not any(f"{path}/{each}" in in_python for each in keys):
        return None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
    home = next((each for each in keys if has_kernel(name, each)), None)
    return key if f"{path}/{home}" in in_python else None


class Contents:
    """The contents of some memory, stored to find what a call writes there.

    Args:
        tensors: The tensors whose whole storages are compared.
        disturb: Whether to flip one low bit of finite floating-point numbers until `written` is called, a
            different bit in each storage. This also finds calls that write values which are there already, or
            copy one storage to another, as after a warm-up on the same inputs.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, disturb: bool) -> None:
        self._disturb = disturb
        self._memory: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for tensor in tensors:
            if storage_id(tensor) in self._memory or not tensor.numel():
                continue
            bits = _BITS.get(tensor.dtype) if disturb else None
            memory = whole(tensor.untyped_storage(), bits or torch.uint8, tensor.device)
            before = memory.clone()
            if bits is not None:
                finite = whole(tensor.untyped_storage(), tensor.dtype, tensor.device).isfinite()
                memory ^= finite.to(bits) << len(self._memory) % _LOW_BITS
            self._memory[storage_id(tensor)] = memory, before, memory.clone()

    def written(self) -> dict[int, torch.Tensor]:
        """Return the previous contents, as bytes, of each storage that was written, by `storage_id`.

        Restore the previous contents of memory that was not written.
        """
        found: dict[int, torch.Tensor] = {}
        for storage, (memory, before, disturbed) in self._memory.items():
            if not torch.equal(memory, disturbed):
                found[storage] = before.view(torch.uint8)
            if self._disturb:
                torch.where(memory == disturbed, before, memory, out=memory)
        return found


def whole(storage: torch.UntypedStorage, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return all of ``storage`` as one flat tensor."""
    flat = torch.empty(0, dtype=dtype, device=device)
    return flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
