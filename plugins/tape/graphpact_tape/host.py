"""Whose memory a tensor is, the host's or the device's, and the refusal of host reads.

On a CPU both lie in the same memory, so torch cannot tell them apart. Here they are told apart by how
they came to be: host tensors are declared, or computed from host tensors alone. Everything else is the
device's, and reading it on the host is refused, as it would stall a GPU or end a capture.

With ``strict`` the tensors that a GPU program would find on the host count as the host's too (made
without ``device=``, from Python objects, by numpy), and so what mixes the two is seen: a copy from host
memory, an index on the host.

A read reaches the dispatcher (``_local_scalar_dense``), or, as ``tolist`` and ``numpy`` do on a CPU, never
does; a `TorchFunctionMode` sees those. Both are needed.

Does not: record anything, or see a read that goes around torch (a raw pointer, a storage).
"""

import abc
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from graphpact.errors import ContractError
from graphpact.graphs.lines import Line
from graphpact.tensors import extent_of, storage_id

__tracebackhide__ = True

_aten = torch.ops.aten

# These read a tensor's memory on the host, on a CPU without passing the dispatcher.
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

# These pass the dispatcher, but torch does not tag them: bool(tensor), and a split by a tensor.
_UNTAGGED_READS = frozenset(
    {_aten.is_nonzero.default, _aten.tensor_split.tensor_indices_or_sections}
)

_INDEX_PUTS = frozenset({_aten.index_put_.default, _aten.index_put.default})
_MASKED_FILLS = frozenset({_aten.masked_fill_.Tensor, _aten.masked_fill.Tensor})

# These make a tensor on the host unless ``device=`` says where.
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
_FROM_PYTHON = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_FROM_MEMORY = frozenset({torch.from_numpy, torch.frombuffer, torch.from_file})


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree of containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class WeakTensor:
    """What makes a tensor again, without keeping its memory."""

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
    """Knows which tensors are the host's.

    Args:
        declared: Host tensors, by storage.
        strict: Whether tensors made without ``device=`` are the host's.
    """

    def __init__(self, declared: Iterable[torch.Tensor] = (), *, strict: bool = False) -> None:
        self.strict = strict
        self.depth = 0  # inside a call that makes host tensors
        self.given: frozenset[int] = frozenset()  # storages that the current call was handed
        # Bytes of storages: on a CPU, a host tensor may lie beside those of the device. The weak
        # references keep a storage's identity from being taken again.
        self._host: dict[int, tuple[StorageWeakRef, list[tuple[int, int]]]] = {}
        self.add(declared)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the memory of ``tensors`` as the host's."""
        for tensor in tensors:
            reference = StorageWeakRef(tensor.untyped_storage())
            _, extents = self._host.setdefault(storage_id(tensor), (reference, []))
            extent = extent_of(tensor)
            if extent not in extents:
                extents.append(extent)

    def prune(self) -> None:
        """Forget memory that is gone."""
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
        # What torch made of a Python number on the way was handed in by nobody.
        return tensor in self or storage_id(tensor) not in self.given


def _has_default_device() -> bool:
    """Return whether the caller stands in ``with device:``, which is asked after our own mode."""
    return any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def reads_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``func`` needs a tensor's contents on the host: for a number or for a shape."""
    if func is _aten.index.Tensor:  # of unknown length only where a mask picks the rows
        return _has_mask(args[1])
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func is _aten.one_hot.default:
        return args[1:] in ((), (-1,)) and kwargs.get("num_classes", -1) == -1
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
    for at, argument in enumerate(func._schema.arguments):  # noqa: SLF001  no public way
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            written += tensors_of(value)
    return written


def _is_placed(kwargs: dict[str, Any]) -> bool:
    """Return whether a call is told where the tensor that it makes is to lie."""
    return kwargs.get("device") is not None or _has_default_device()


def _is_made_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call makes a tensor on the host, of nothing that lies on a device."""
    return func in _FROM_MEMORY or (
        (func in _FACTORIES or func in _FROM_PYTHON)
        and not _is_placed(kwargs)
        and kwargs.get("out") is None
        and not tensors_of(args[:1])
    )


class HostReadGuard(TorchFunctionMode):
    """Refuses the host reads, and the traffic between host and device, that only Python sees.

    Args:
        host: What is free to be read.
        when: For messages, such as ``"while a graph is recorded"``.
        error: What is raised.

    Attributes:
        refused: The first error that was raised here, should the caller have swallowed it.
        paused: Whether everything is let through: inside an eager call.
        copying: Whether a copy from host memory is let through: one of the driver's own.
    """

    def __init__(self, host: HostMemory, when: str, error: type[ContractError]) -> None:
        super().__init__()
        self.host = host
        self.when = when
        self.error = error
        self.refused: ContractError | None = None
        self.paused = False
        self.copying = False

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
        if func is torch.Tensor.__deepcopy__:  # swaps storages below the dispatcher
            func, args = torch.clone, args[:1]
        if func is torch.Tensor.__setitem__:
            self._check_masked_write(args[1], args[2])
        if self.host.depth == 0:
            self.host.given = frozenset(storage_id(t) for t in tensors_of((args, kwargs)))
        if self.host.strict:
            return self._strictly(func, args, kwargs)
        return func(*args, **kwargs)

    def _strictly(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func`` with what it makes on the host counted as the host's."""
        host = self.host
        device = kwargs.get("device")
        placed = _is_placed(kwargs)
        if kwargs.get("pin_memory") or func is torch.Tensor.pin_memory:
            raise self.refusal("allocates pinned memory", "allocate it before")
        made_on_host = _is_made_on_host(func, args, kwargs)
        if func is torch.Tensor.new_tensor or (
            func in _FROM_PYTHON and placed and not tensors_of(args[:1])
        ):
            raise self.refusal(
                "copies Python numbers to the device, which waits for it",
                "make the tensor before, or use torch.full or torch.arange, which run on the device",
            )
        if func is torch.Tensor.to:
            self._check_to(args, device)
        is_type = func is torch.Tensor.type and args[1:] and not isinstance(args[1], torch.dtype)
        if is_type and args[0] not in host:
            raise self.host_read("Tensor.type() with a class of host tensors")
        host.depth += made_on_host
        try:
            result = func(*args, **kwargs)
        finally:
            host.depth -= made_on_host
        if made_on_host:
            host.add(tensors_of(result))
        return result

    def _check_to(self, args: tuple[Any, ...], device: Any) -> None:
        if device is None:
            device = next((a for a in args[1:] if isinstance(a, (str, torch.device))), None)
        if args[0] not in self.host:
            if device == "cpu":  # a torch.device may be the lane's own, where that is a CPU
                raise self.host_read('Tensor.to("cpu")')
        elif isinstance(device, torch.device) or device not in (None, "cpu"):
            raise self.refusal(
                "copies host memory to the device, which waits for it",
                "use driver.copy_async() from a buffer that stays",
            )

    def _check_masked_write(self, key: Any, value: Any) -> None:
        mask = _has_mask(key if isinstance(key, tuple) else (key,))
        if mask and isinstance(value, torch.Tensor) and value not in self.host:
            raise self.host_read("an assignment by a mask")

    def refusal(self, what: str, hint: str, rule: str = "GP20") -> ContractError:
        """Return the error for ``what`` the caller's line does."""
        error = self.error(f"{what} {self.when}, at {Line()}", hint=hint, rule=rule)
        self.refused = self.refused or error
        return error

    def host_read(self, what: str) -> ContractError:
        """Return the error for a host read."""
        return self.refusal(
            f"{what} needs a tensor's contents on the host",
            "a graph replays device work only: keep the value in a tensor, or pass a host number that"
            " is fixed for the shape; host tensors that were declared may be read",
        )


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that leaves torch's compiler unimported."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler, seconds of work, to keep it out of here."""
        return False


class Watcher(DispatchMode, abc.ABC):
    """Sees every dispatched operation, refuses what the host may not do, and `perform`s the others.

    Args:
        guard: The function mode that stands beside it.
    """

    def __init__(self, guard: HostReadGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self.guard = guard
        self.host = guard.host

    @abc.abstractmethod
    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run device work: an operation that is not made of others."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # detach_ is how torch.tensor() ends.
        if self.guard.paused or func is _aten.detach_.default:
            return func(*args, **kwargs)
        given = tensors_of((args, kwargs))
        if self._is_host_work(func, given):
            result = func(*args, **kwargs)
            self.host.add(tensors_of(result))
            return result
        if reads_on_host(func, args, kwargs):
            raise self.guard.host_read(str(func))
        if _is_composite(func):
            # What it is made of is seen instead.
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)  # noqa: SLF001  no public name
        if func in _INDEX_PUTS:
            self._check_index_put(func, args)
        elif func in _MASKED_FILLS and not self.host.is_number(args[2]):
            raise self.guard.host_read(f"{func} of a tensor's value")
        self._check_traffic(func, args, kwargs, given)
        return self.perform(func, args, kwargs)

    def _is_host_work(self, func: Any, given: list[torch.Tensor]) -> bool:
        if not given:
            return self.host.depth > 0
        if func is _aten.lift_fresh.default:  # how torch makes a tensor of Python objects
            return self.host.strict
        return all(t in self.host for t in given)

    def _check_index_put(self, func: Any, args: tuple[Any, ...]) -> None:
        is_number = self.host.is_number(args[2])
        if _has_mask(args[1]):
            # torch makes a masked_fill of a number; a tensor is spread over as many rows as the mask has.
            if not is_number:
                raise self.guard.host_read(f"{func} by a mask")
        elif is_number and self.host.strict:
            raise self.guard.refusal(
                f"{func} of a number copies it to the device, which waits for it",
                "use index_fill_(), or a tensor that was made before",
            )

    def _check_traffic(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[torch.Tensor],
    ) -> None:
        """Refuse device work that moves memory to the host, or from it without the driver."""
        if func is _aten._foreach_copy_.default:
            for target, source in zip(*args[:2], strict=True):
                # One number spread over many rows is no copy.
                if source.untyped_storage().nbytes() != source.element_size():
                    self._check_traffic(_aten.copy_.default, (target, source), {}, [target, source])
            return
        on_host = [t for t in given if t in self.host]
        if not on_host or len(on_host) == len(given):
            return
        if any(t in self.host for t in written_by(func, args, kwargs)):
            raise self.guard.host_read(f"{func}, a copy to the host,")
        is_copy = func is _aten.copy_.default
        if not self.host.strict or self.guard.copying:
            return
        if is_copy or any(t.dim() for t in on_host):
            raise self.guard.refusal(
                f"{func} takes a tensor of the host",
                "give it device=, or copy it with driver.copy_async(); a single number may be filled in"
                " with fill_()",
            )


def _is_composite(func: Any) -> bool:
    """Return whether ``func`` only calls other operations; outside autograd it arrives undivided."""
    if func is _aten.one_hot.default:  # on a CPU alone it reads its argument, to check it
        return False
    return not func._schema.is_mutable and torch._C._dispatch_has_kernel_for_dispatch_key(  # noqa: SLF001
        func.name(), _COMPOSITE
    )


# -- without refusals --------------------------------------------------------------------------------


@contextlib.contextmanager
def followed(host: HostMemory) -> Iterator[None]:
    """Count as the host's what is made on the host, or computed from host tensors alone; refuse nothing."""
    with _Factories(host), _HostWork(host):
        yield


class _Factories(TorchFunctionMode):
    def __init__(self, host: HostMemory) -> None:
        super().__init__()
        self._host = host

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_made_on_host(func, args, kwargs):
            self._host.add(tensors_of(result))
        return result


class _HostWork(DispatchMode):
    def __init__(self, host: HostMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self._host = host

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = tensors_of((args, kwargs))
        if given and all(tensor in self._host for tensor in given):
            self._host.add(tensors_of(result))
        return result
