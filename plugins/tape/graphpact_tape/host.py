"""Distinguish host tensors from device tensors on a CPU, and refuse host reads of device tensors.

On a CPU both have the same ``device``, so torch cannot distinguish them. This module does it by origin: host
tensors are declared, or computed from host tensors alone. All others are device tensors. Reading them on the
host is refused, because on a GPU it would stall the host or break a capture.

With ``strict``, tensors that a GPU program would have on the host are host tensors too: made without
``device=``, from Python objects, or by numpy. Operations that mix host and device tensors are then refused:
a copy from host memory, an index on the host.

Most host reads reach the dispatcher (``_local_scalar_dense``), where a `TorchDispatchMode` sees them. On a
CPU some do not, such as ``tolist`` and ``numpy``, so a `TorchFunctionMode` is needed as well.

Does not: record anything, or see a read that bypasses torch (a raw pointer, a storage).
"""

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from graphpact.errors import ContractError
from graphpact.graphs.lines import Line
from graphpact.tensors import extent_of, storage_id
from graphpact_tape.tasks import RecordedTask

__tracebackhide__ = True

_aten = torch.ops.aten

# These read a tensor's memory on the host. On a CPU they do not reach the dispatcher.
_READS = {
    torch.Tensor.tolist: "Tensor.tolist()",
    torch.Tensor.numpy: "Tensor.numpy()",
    torch.Tensor.__array__: "Tensor.__array__()",
    torch.Tensor.cpu: "Tensor.cpu()",
    torch.Tensor.__repr__: "Tensor.__repr__(), printing,",
    torch.Tensor.__format__: "Tensor.__format__(), printing,",
    torch.Tensor.__reduce_ex__: "Tensor.__reduce_ex__(), pickling,",
}

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001  no public name

# These reach the dispatcher, but torch has no tag for them: bool(tensor), a split by a tensor.
_UNTAGGED_READS = frozenset({_aten.is_nonzero.default, _aten.tensor_split.tensor_indices_or_sections})

_INDEX_PUTS = frozenset({_aten.index_put_.default, _aten.index_put.default})
_MASKED_FILLS = frozenset({_aten.masked_fill_.Tensor, _aten.masked_fill.Tensor})

# These make a tensor on the host unless ``device=`` is given.
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

# Arguments of operators are mostly tensors, numbers, and tuples and lists of them. Captures take a third less
# time if these are walked here; torch's pytree walks every other type.
_NO_CONTAINERS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree of containers, in order: tensors, and values of other types."""
    kind = type(tree)
    if kind is dict:
        parts = tree.values()
    elif kind is tuple or kind is list:
        parts = tree
    else:
        is_leaf = isinstance(tree, torch.Tensor) or kind in _NO_CONTAINERS
        return [tree] if is_leaf else list(pytree.tree_leaves(tree))
    found: list[Any] = []
    for part in parts:
        if isinstance(part, torch.Tensor) or type(part) in _NO_CONTAINERS:  # most are; a call costs more
            found.append(part)
        else:
            found += leaves_of(part)
    return found


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree of containers, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)]


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return a copy of a tree of containers, with ``fn(tensor)`` for each tensor."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    kind = type(tree)
    if kind in _NO_CONTAINERS:
        return tree
    if kind is tuple or kind is list:
        return kind([p if type(p) in _NO_CONTAINERS else map_tensors(fn, p) for p in tree])
    if kind is dict:
        return {name: map_tensors(fn, part) for name, part in tree.items()}
    return pytree.tree_map_only(torch.Tensor, fn, tree)


class WeakTensor:
    """A weak reference to a tensor's memory, with the layout that makes the tensor again."""

    __slots__ = ("_device", "_dtype", "_flips", "_layout", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._device = tensor.dtype, tensor.device
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._flips = tensor.is_conj(), tensor.is_neg()

    def revive(self) -> torch.Tensor | None:
        """Return the tensor, or None where its memory was freed."""
        make = torch.UntypedStorage._new_with_weak_ptr  # noqa: SLF001  no public name
        storage: torch.UntypedStorage | None = make(self.storage.cdata)
        if storage is None:
            return None
        tensor = torch.empty(0, dtype=self._dtype, device=self._device)
        tensor.set_(storage, *self._layout)
        is_conj, is_neg = self._flips
        tensor = tensor.conj() if is_conj else tensor
        return tensor._neg_view() if is_neg else tensor  # noqa: SLF001  no public name


class HostMemory:
    """The set of host memory: a tensor is ``in`` it if it is a host tensor.

    Args:
        declared: Tensors that are declared to be on the host.
        strict: Whether tensors made without ``device=`` are host tensors.
    """

    def __init__(self, declared: Iterable[torch.Tensor] = (), *, strict: bool = False) -> None:
        self.strict = strict
        self.depth = 0  # nesting of calls that make host tensors
        self.call: Any = ()  # the arguments of the current call
        # Byte ranges of storages: on a CPU, one storage may hold host and device tensors. The weak references
        # keep a storage's id from being reused.
        self._host: dict[int, tuple[StorageWeakRef, list[tuple[int, int]]]] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self.add(declared)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declare the memory of ``tensors`` as host memory."""
        for tensor in tensors:
            reference = StorageWeakRef(tensor.untyped_storage())
            _, extents = self._host.setdefault(storage_id(tensor), (reference, []))
            extent = extent_of(tensor)
            if extent not in extents:
                extents.append(extent)

    def pin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declare the memory of ``tensors`` as pinned host memory."""
        tensors = list(tensors)
        self.add(tensors)
        self._pinned |= {storage_id(t): StorageWeakRef(t.untyped_storage()) for t in tensors}

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in memory that was declared as pinned."""
        return storage_id(tensor) in self._pinned

    def prune(self) -> None:
        """Drop storages that were freed."""
        self._pinned = {key: known for key, known in self._pinned.items() if not known.expired()}
        self._host = {key: known for key, known in self._host.items() if not known[0].expired()}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        known = self._host.get(storage_id(tensor))
        if known is None:
            return False
        begin, end = extent_of(tensor)
        return any(first <= begin and end <= last for first, last in known[1])

    def is_number(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a host number, which a kernel takes by value."""
        if tensor.dim():
            return False
        # torch made it from a Python number if it is not among the caller's arguments.
        return tensor in self or storage_id(tensor) not in {storage_id(t) for t in tensors_of(self.call)}


def has_default_device() -> bool:
    """Return whether ``with device:`` is active; that mode runs after this module's own."""
    return any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def reads_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``func`` reads a tensor's contents on the host, for a number or for a shape."""
    if func is _aten.index.Tensor:  # its length depends on contents only for a mask
        return _has_mask(args[1])
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func is _aten.one_hot.default:
        return args[1:] in ((), (-1,)) and kwargs.get("num_classes", -1) == -1
    return _always_reads(func)


@cache
def _always_reads(func: Any) -> bool:
    """Return whether ``func`` reads contents on the host for any arguments."""
    return (
        torch.Tag.data_dependent_output in func.tags
        or torch.Tag.dynamic_output_shape in func.tags
        or func in _UNTAGGED_READS
    )


def _has_mask(indices: Any) -> bool:
    return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_of(indices))


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments that ``func`` writes, by its schema."""
    written: list[torch.Tensor] = []
    for at, name in _written_arguments(func.operator if isinstance(func, RecordedTask) else func):
        written += tensors_of(args[at] if at < len(args) else kwargs.get(name))
    return written


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return index and name of each argument that ``func`` writes."""
    arguments = enumerate(func._schema.arguments)  # noqa: SLF001  no public way
    return tuple((at, a.name) for at, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _is_placed(kwargs: dict[str, Any]) -> bool:
    """Return whether a call has a device for the tensor that it makes."""
    return kwargs.get("device") is not None or has_default_device()


def _is_made_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call makes a tensor on the host, from no device tensor."""
    return func in _FROM_MEMORY or (
        (func in _FACTORIES or func in FROM_PYTHON)
        and not _is_placed(kwargs)
        and kwargs.get("out") is None
        and not tensors_of(args[:1])
    )


def pins(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call makes pinned memory."""
    return bool(kwargs.get("pin_memory")) or func is torch.Tensor.pin_memory


def call_of_pinned(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a call that `pins` as this machine can make it: without an accelerator nothing is pinned."""
    if torch.accelerator.is_available():
        return func, args, kwargs
    if func is torch.Tensor.pin_memory:
        return torch.clone, args[:1], {}
    return func, args, {**kwargs, "pin_memory": False}


class HostReadGuard(TorchFunctionMode):
    """A function mode that refuses host reads and host-device copies which do not reach the dispatcher.

    Args:
        host: The host memory, which may be read.
        when: For messages, such as ``"while a graph is recorded"``.
        error: The class of the error to raise.

    Attributes:
        refused: The first error that was raised, in case the caller caught it.
        paused: Whether all calls are allowed, as inside an eager call.
        copying: Whether a copy from host memory is allowed: the driver makes one itself.
        may_pin: Whether pinned memory may be made, as outside a capture.
    """

    def __init__(self, host: HostMemory, when: str, error: type[ContractError]) -> None:
        super().__init__()
        self.host = host
        self.when = when
        self.error = error
        self.refused: ContractError | None = None
        self.paused = False
        self.copying = False
        self.may_pin = False

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func in _READS and args[0] not in self.host:
            raise self.host_read(_READS[func])
        if func is torch.Tensor.__deepcopy__:  # replaces storages below the dispatcher
            func, args = torch.clone, args[:1]
        if func is torch.Tensor.__setitem__:
            self._check_masked_write(args[1], args[2])
        outer = self.host.call
        if self.host.depth == 0:
            self.host.call = args, kwargs
        try:
            if self.host.strict:
                return self._strictly(func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            self.host.call = outer

    def _strictly(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func``, and add the tensors that it makes on the host to the host memory."""
        host = self.host
        device = kwargs.get("device")
        if func is torch.Tensor.is_pinned and host.is_pinned(args[0]):
            return True
        is_pinned = pins(func, kwargs)
        placed = _is_placed(kwargs) and not is_pinned
        if is_pinned:
            self._check_pinning(func, args)
            func, args, kwargs = call_of_pinned(func, args, kwargs)
        made_on_host = is_pinned or _is_made_on_host(func, args, kwargs)
        if func is torch.Tensor.new_tensor or (func in FROM_PYTHON and placed and not tensors_of(args[:1])):
            raise self.refusal(
                "copies Python numbers to the device, which makes the host wait,",
                "make the tensor earlier, or use torch.full or torch.arange, which run on the device",
            )
        if func is torch.Tensor.to:
            self._check_to(args, device)
        is_type = func is torch.Tensor.type and args[1:] and not isinstance(args[1], torch.dtype)
        if is_type and args[0] not in host:
            raise self.host_read("Tensor.type() with a host tensor type")
        host.depth += made_on_host
        try:
            result = func(*args, **kwargs)
        finally:
            host.depth -= made_on_host
        if is_pinned:
            host.pin(tensors_of(result))
        elif made_on_host:
            host.add(tensors_of(result))
        return result

    def _check_pinning(self, func: Any, args: tuple[Any, ...]) -> None:
        if not self.may_pin:
            raise self.refusal("allocates pinned memory", "allocate it earlier")
        if func is torch.Tensor.pin_memory and args[0] not in self.host:
            raise self.refusal("pins a device tensor", "pin host memory, and copy into it")

    def _check_to(self, args: tuple[Any, ...], device: Any) -> None:
        if device is None:
            device = next((a for a in args[1:] if isinstance(a, (str, torch.device))), None)
        if args[0] not in self.host:
            if device == "cpu":  # a torch.device may be the lane's own device, which may be a CPU
                raise self.host_read('Tensor.to("cpu")')
        elif isinstance(device, torch.device) or device not in (None, "cpu"):
            raise self.refusal(
                "copies host memory to the device, which makes the host wait,",
                "use driver.copy_async() from a buffer that lives as long as the lane",
            )

    def _check_masked_write(self, key: Any, value: Any) -> None:
        mask = _has_mask(key if isinstance(key, tuple) else (key,))
        if mask and isinstance(value, torch.Tensor) and value not in self.host:
            raise self.host_read("an assignment by a mask")

    def refusal(self, what: str, hint: str, rule: str = "GP20") -> ContractError:
        """Return the error for an action ``what`` of the caller's line."""
        error = self.error(f"{what} {self.when}, at {Line()}", hint=hint, rule=rule)
        self.refused = self.refused or error
        return error

    def host_read(self, what: str) -> ContractError:
        """Return the error for a host read by ``what``."""
        return self.refusal(
            f"{what} needs a tensor's contents on the host",
            "a graph replays device work only: keep the value in a tensor, or pass a host number that"
            " is fixed for the shape; declared host tensors may be read",
        )


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not make torch import its compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: with True, torch imports its compiler to disable it here, which takes seconds."""
        return False


class Watcher(DispatchMode, abc.ABC):
    """A dispatch mode that refuses host reads and host-device copies, and `perform`s all other device work.

    Args:
        guard: The function mode that is active together with it.
    """

    def __init__(self, guard: HostReadGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self.guard = guard
        self.host = guard.host

    @abc.abstractmethod
    def perform(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        """Run one operation of device work, with the tensors among its arguments; it is not composite."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # torch.tensor() ends with a detach_.
        if self.guard.paused or func is _aten.detach_.default:
            return func(*args, **kwargs)
        given = tensors_of((args, kwargs))
        on_host = [t for t in given if t in self.host]
        if self._is_host_work(func, given, on_host):
            result = func(*args, **kwargs)
            self.host.add(tensors_of(result))
            return result
        if reads_on_host(func, args, kwargs):
            raise self.guard.host_read(str(func))
        if _is_composite(func):
            # Decompose it; the parts are dispatched here again.
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)  # noqa: SLF001  no public name
        if func in _INDEX_PUTS:
            self._check_index_put(func, args)
        elif func in _MASKED_FILLS and not self.host.is_number(args[2]):
            raise self.guard.host_read(f"{func} of a tensor's value")
        if on_host:
            self._check_traffic(func, args, kwargs, len(given), on_host)
        return self.perform(func, args, kwargs, given)

    def _is_host_work(self, func: Any, given: list[torch.Tensor], on_host: list[torch.Tensor]) -> bool:
        if not given:
            return self.host.depth > 0
        if func is _aten.lift_fresh.default:  # torch makes a tensor from Python objects with it
            return self.host.strict
        return len(on_host) == len(given)

    def _check_index_put(self, func: Any, args: tuple[Any, ...]) -> None:
        is_number = self.host.is_number(args[2])
        if _has_mask(args[1]):
            # With a number torch runs masked_fill. With a tensor it needs the count of true elements.
            if not is_number:
                raise self.guard.host_read(f"{func} by a mask")
        elif is_number and self.host.strict:
            raise self.guard.refusal(
                f"{func} of a number copies it to the device, which makes the host wait,",
                "use index_fill_(), or a tensor that was made earlier",
            )

    def _check_traffic(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        count: int,
        on_host: list[torch.Tensor],
    ) -> None:
        """Refuse device work that copies to the host, or from the host without `GraphDriver.copy_async`.

        Args:
            func: The operation.
            args: Its arguments.
            kwargs: Its arguments by name.
            count: How many tensors are among them.
            on_host: Those that are host tensors; at least one.
        """
        if func is _aten._foreach_copy_.default:
            for pair in zip(*args[:2], strict=True):
                # A single number that is expanded to many rows is passed by value.
                if pair[1].untyped_storage().nbytes() != pair[1].element_size():
                    mine = [t for t in pair if t in self.host]
                    if mine:
                        self._check_traffic(_aten.copy_.default, pair, {}, 2, mine)
            return
        if len(on_host) == count:
            return
        if any(t in self.host for t in written_by(func, args, kwargs)):
            raise self.guard.host_read(f"{func}, a copy to the host,")
        is_copy = func is _aten.copy_.default
        if not self.host.strict or self.guard.copying:
            return
        if is_copy or any(t.dim() for t in on_host):
            raise self.guard.refusal(
                f"{func} takes a host tensor",
                "make the tensor with device=, or copy it with driver.copy_async(); for a single number, use"
                " fill_()",
            )


@cache
def _is_composite(func: Any) -> bool:
    """Return whether ``func`` only calls other operations; without autograd torch does not decompose it."""
    if func is _aten.one_hot.default:  # its CPU version reads the argument in order to check it
        return False
    return not func._schema.is_mutable and torch._C._dispatch_has_kernel_for_dispatch_key(  # noqa: SLF001
        func.name(), _COMPOSITE
    )


@contextlib.contextmanager
def modes_left(function_mode: TorchFunctionMode, dispatch_mode: TorchDispatchMode) -> Iterator[None]:
    """Leave both modes, and the modes that were entered inside them, for the duration of the context."""
    with (
        _left(TorchFunctionMode, function_mode, _get_current_function_mode_stack()),
        _left(TorchDispatchMode, dispatch_mode, _get_current_dispatch_mode_stack()),
    ):
        yield


@contextlib.contextmanager
def _left(kind: Any, mode: Any, stack: list[Any]) -> Iterator[None]:
    """Leave ``mode`` and what is above it in its stack, by the methods of ``kind``: no subclass acts."""
    inside = stack[stack.index(mode) :] if mode in stack else []  # not in the stack while it runs itself
    for each in reversed(inside):
        kind.__exit__(each, None, None, None)
    try:
        yield
    finally:
        for each in inside:
            kind.__enter__(each)
