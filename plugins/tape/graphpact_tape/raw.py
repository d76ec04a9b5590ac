"""Refuse host access to memory of device tensors that bypasses torch's modes.

A DLPack capsule and some methods of a storage export, read or write memory without dispatching an operation.
`numpy.from_dlpack` and `torch.from_dlpack` call `Tensor.__dlpack__`, which `HostReadGuard` sees. Functions
that make a capsule without that call are replaced while a region is recorded. Other reads and writes of a
storage are dispatched as ``set_``.

Does not: see how an address is used; `HostReadGuard` notes the memory whose address was taken.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphpact_tape.entrances import recording, replaced
from graphpact_tape.host_guard import HostReadGuard

__tracebackhide__ = True

_CAPSULES = ((torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"))
_STORAGES = (
    (torch.UntypedStorage, "_write_file"),
    (torch.UntypedStorage, "_set_from_file"),
    (torch.UntypedStorage, "_share_fd_cpu_"),
    (torch.UntypedStorage, "_share_filename_cpu_"),
    (torch.UntypedStorage, "byteswap"),
    (torch._C.PyTorchFileWriter, "write_record"),  # noqa: SLF001  torch.save calls it
)


@contextlib.contextmanager
def raw_memory_refused(guard: HostReadGuard) -> Iterator[None]:
    """Refuse such access to device tensors in this thread, except while ``guard`` is paused."""
    is_recorded = recording(guard)

    def exporting(export: Callable[..., Any]) -> Callable[..., Any]:
        def exported(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_recorded() and tensor not in guard.host:
                raise guard.host_read("a DLPack capsule")
            return export(tensor, *args, **kwargs)

        return exported

    def using(method: Callable[..., Any]) -> Callable[..., Any]:
        def used(*args: Any, **kwargs: Any) -> Any:
            storages = [each for each in args[:3] if isinstance(each, torch.UntypedStorage)]
            if is_recorded() and not all(map(guard.host.holds, storages)):
                raise guard.host_read(f"{method.__name__}() of a storage")
            return method(*args, **kwargs)

        return used

    capsules = [(owner, name, exporting) for owner, name in _CAPSULES]
    with replaced([*capsules, *((owner, name, using) for owner, name in _STORAGES)]):
        yield
