"""What a call of torch does on the host: it reads contents, takes an address, makes or pins a host tensor.

Does not: know which tensors are on the host; see `graphpact_tape.host_tensors`.
"""

from functools import cache
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from graphpact_tape.trees import tensors_of

__tracebackhide__ = True

_aten = torch.ops.aten

# These functions read a tensor's memory on the host. On a CPU they do not reach the dispatcher.
READS = {
    torch.Tensor.tolist: "Tensor.tolist()",
    torch.Tensor.numpy: "Tensor.numpy()",
    torch.Tensor.__array__: "Tensor.__array__()",
    torch.Tensor.__dlpack__: "Tensor.__dlpack__()",
    torch.Tensor.cpu: "Tensor.cpu()",
    torch.Tensor.__repr__: "Tensor.__repr__(), printing,",
    torch.Tensor.__format__: "Tensor.__format__(), printing,",
    torch.Tensor.__reduce_ex__: "Tensor.__reduce_ex__(), pickling,",
}
"""Functions that read a tensor on the host and dispatch nothing, with their names for messages."""

# These functions return the address of a tensor's memory, or an object that contains it.
ADDRESSES = frozenset(
    {
        torch.Tensor.data_ptr,
        torch.Tensor.untyped_storage,
        torch.Tensor.storage,
        vars(torch.Tensor)["__cuda_array_interface__"].__get__,
    }
)

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001  no public name

# These reach the dispatcher, but torch has no tag for them: bool(tensor), a split by a tensor.
_UNTAGGED_READS = frozenset({_aten.is_nonzero.default, _aten.tensor_split.tensor_indices_or_sections})

# Torch declares that these only call other operations. On a CPU they also use memory themselves, to check an
# argument or to compute.
_WHOLE = frozenset({_aten.one_hot.default, _aten._sobol_engine_draw.default})  # noqa: SLF001  no public name

INDEX_PUTS = frozenset({_aten.index_put_.default, _aten.index_put.default})
MASKED_FILLS = frozenset({_aten.masked_fill_.Tensor, _aten.masked_fill.Tensor})

# These functions make a tensor on the host unless ``device=`` is given.
_FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "arange",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "tril_indices",
        "triu_indices",
        "zeros",
    )
)
FROM_PYTHON = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_FROM_MEMORY = frozenset({torch.from_numpy, torch.frombuffer, torch.from_file})


def has_default_device() -> bool:
    """Return whether ``with device:`` is active; that mode runs after this module's own."""
    return any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def reads_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``func`` reads a tensor's contents on the host, to get a number or a shape."""
    if func is _aten.index.Tensor:  # the length of the result depends on contents only for a mask
        return has_mask(args[1])
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func is _aten.one_hot.default:
        return args[1:] in ((), (-1,)) and kwargs.get("num_classes", -1) == -1
    return _always_reads(func)


@cache
def _always_reads(func: Any) -> bool:
    """Return whether ``func`` reads contents on the host whatever its arguments are."""
    return (
        torch.Tag.data_dependent_output in func.tags
        or torch.Tag.dynamic_output_shape in func.tags
        or func in _UNTAGGED_READS
    )


def has_mask(indices: Any) -> bool:
    """Return whether an index contains a mask, whose number of true elements the host has to know."""
    return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_of(indices))


def is_placed(kwargs: dict[str, Any]) -> bool:
    """Return whether the call gives a device for the tensor that it makes."""
    return kwargs.get("device") is not None or has_default_device()


def is_made_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call makes a tensor on the host without a device tensor as argument."""
    return func in _FROM_MEMORY or (
        (func in _FACTORIES or func in FROM_PYTHON)
        and not is_placed(kwargs)
        and kwargs.get("out") is None
        and not tensors_of(args[:1])
    )


def pins(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call makes pinned memory."""
    return bool(kwargs.get("pin_memory")) or func is torch.Tensor.pin_memory


def call_of_pinned(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a call that `pins` in a form that works here: without an accelerator it does not pin."""
    if torch.accelerator.is_available():
        return func, args, kwargs
    if func is torch.Tensor.pin_memory:
        return torch.clone, args[:1], {}
    return func, args, {**kwargs, "pin_memory": False}


@cache
def is_composite(func: Any) -> bool:
    """Return whether ``func`` only calls other operations, although torch does not decompose it here."""
    if func in _WHOLE:
        return False
    return not func._schema.is_mutable and torch._C._dispatch_has_kernel_for_dispatch_key(  # noqa: SLF001
        func.name(), COMPOSITE
    )
