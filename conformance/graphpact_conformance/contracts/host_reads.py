"""`host_reads_refused`: code of a plugin runs as on a GPU, where a host read of a device tensor waits.

Does not: time anything.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphpact.errors import ReplayError
from graphpact_tape.host_guard import HostReadGuard, Watcher
from graphpact_tape.host_tensors import HostMemory


class _Watcher(Watcher):
    """A dispatch mode that refuses host reads and otherwise runs everything."""

    def perform(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        """Run one operation."""
        del given
        return func(*args, **kwargs)


@contextmanager
def host_reads_refused(host: Iterable[torch.Tensor], when: str) -> Iterator[HostReadGuard]:
    """Yield a guard that refuses host reads in the context, except while its `paused` is true.

    Tensors that are made in the context without ``device=`` are host tensors, as on a GPU.

    Args:
        host: Tensors on the host, which may be read.
        when: When it refuses, for messages, such as ``"in a decode step"``.

    Raises:
        ReplayError: The code in the context reads a device tensor. It is also in `HostReadGuard.refused`.
    """
    guard = HostReadGuard(HostMemory(host, strict=True), when, ReplayError)
    with guard, _Watcher(guard):
        yield guard
