"""`two_memories`: makes host and device two memories on a machine that has one, without refusing anything.

On such a machine torch returns the same tensor from ``cpu()`` and ``to(device)``, so that tensors that a
program keeps from one step change in the next one, and torch makes no pinned memory. Inside the context,
calls behave as on a machine with a GPU:

    a copy to the other memory      is new memory
    pinned memory                   is made, and is host memory
    made without ``device=``, or computed only from host tensors, or copied to the host      is host memory

The device may be called ``cpu:0``. Then ``cpu`` is the host, tensors on the device have ``cpu:0`` as their
``device``, and a tensor made with ``cpu:0`` is on the device.

Does not: refuse a host read (see `graphpact_tape.host_guard`), or an operation that mixes both memories; or
track tensors that `torch.frombuffer` and `torch.from_dlpack` make.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphpact.tensors import storage_id
from graphpact_tape.host_calls import FROM_PYTHON, call_of_pinned, has_default_device, pins
from graphpact_tape.host_guard import DispatchMode
from graphpact_tape.host_tensors import HostMemory
from graphpact_tape.trees import tensors_of

__tracebackhide__ = True  # its frames are between the author's and torch's

HOST = torch.device("cpu")


@contextlib.contextmanager
def two_memories(host: HostMemory, device: torch.device) -> Iterator[None]:
    """Copy between two memories in the context, and add tensors that are made on the host to ``host``.

    Args:
        host: The host memory.
        device: The device. All memory that is not in ``host`` is device memory.
    """
    work = _HostWork(host)
    with _Copies(host, device, work), work:
        yield


class _Copies(TorchFunctionMode):
    """Makes the copies that torch skips because both memories are one."""

    def __init__(self, host: HostMemory, device: torch.device, work: "_HostWork") -> None:
        super().__init__()
        self._host, self._device, self._work = host, device, work

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        host = self._host
        if getattr(func, "__self__", None) is torch.Tensor.device:
            found = func(*args, **kwargs)
            return self._device if found == HOST and args[0] not in host else found
        if func is torch.Tensor.is_pinned and host.is_pinned(args[0]):
            return True
        if pins(func, kwargs):
            return self._pinned(func, args, kwargs)
        asked = _device_of(func, args, kwargs)
        if asked is None:
            return func(*args, **kwargs)
        to_host = self._is_host(asked, moves=func is torch.Tensor.to or func is torch.Tensor.cpu)
        with self._work.ignored():
            return self._copied(func, *_on_this_machine(args, kwargs), to_host=to_host)

    def _copied(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, to_host: bool) -> Any:
        """Call ``func``, which moves a tensor; return new memory if the tensor was in the other memory."""
        host = self._host
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        is_foreign = func in FROM_PYTHON if source is None else (source in host) is not to_host
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            return result
        if is_foreign and (source is None or storage_id(result) == storage_id(source)):
            result = result.clone()
        if to_host:
            host.add([result])
        return result

    def _pinned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.Tensor.pin_memory:
            if args[0] not in self._host:
                raise RuntimeError("cannot pin a device tensor: only host tensors can be pinned")
            if self._host.is_pinned(args[0]):
                return args[0]
        func, args, kwargs = call_of_pinned(func, args, kwargs)
        result = func(*args, **kwargs)
        self._host.pin(tensors_of(result))
        return result

    def _is_host(self, asked: Any, *, moves: bool) -> bool:
        """Return whether ``asked``, a requested device, is the host.

        If the device is called ``cpu`` too, only a copy to ``cpu`` is a copy to the host.
        """
        if isinstance(asked, torch.Tensor):
            return asked in self._host
        if isinstance(asked, str) and asked == "cpu":
            return moves or self._device != HOST
        device = torch.device(asked)
        return device.type == "cpu" and device != self._device


def _device_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the device that a call requests: a name, a device, or a tensor on it; None without one."""
    if func is torch.Tensor.cpu:
        return "cpu"
    if func is torch.Tensor.to:
        kinds = (str, torch.device, torch.Tensor)
        found = next((each for each in args[1:] if isinstance(each, kinds)), kwargs.get("other"))
        return kwargs.get("device") if found is None else found
    return kwargs.get("device")


def _on_this_machine(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments in which each name of a CPU is replaced by the name that torch uses here."""

    def known(value: Any) -> Any:
        is_named = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cpu"))
        return HOST if is_named and torch.device(value).type == "cpu" else value

    return tuple(map(known, args)), {name: known(value) for name, value in kwargs.items()}


class _HostWork(DispatchMode):
    """Adds tensors to the host memory that are made from host tensors only, Python objects, or nothing."""

    def __init__(self, host: HostMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self._host = host
        self._is_ignored = False

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Add nothing in the context, in which copies go to a known memory."""
        self._is_ignored = True
        try:
            yield
        finally:
            self._is_ignored = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_ignored and self._is_of_host(func, tensors_of((args, kwargs))):
            self._host.add(tensors_of(result))
        return result

    def _is_of_host(self, func: Any, given: list[torch.Tensor]) -> bool:
        if func is torch.ops.aten.lift_fresh.default:  # torch makes tensors from Python objects with it
            return True
        return all(tensor in self._host for tensor in given) if given else not has_default_device()
