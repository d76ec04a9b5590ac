"""`replaced`: replaces functions of other modules while a region is recorded.

Torch has no hook for some actions of a region: calling compiled code, starting a thread, exporting memory.
The functions that perform these actions are replaced for that time. Other threads call the replacements too.

Does not: replace a function to which the caller already has a reference.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from graphpact_tape.host_guard import HostReadGuard

__tracebackhide__ = True

Entrance: TypeAlias = tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]
"""The owner of a function, the function's name there, and a callable that makes the replacement from it."""


@contextlib.contextmanager
def replaced(entrances: Iterable[Entrance]) -> Iterator[None]:
    """Replace functions for the duration of the context."""
    with contextlib.ExitStack() as stack:
        for owner, name, replace in entrances:
            original = getattr(owner, name)
            if name in vars(owner):
                stack.callback(setattr, owner, name, original)
            else:  # inherited
                stack.callback(delattr, owner, name)
            setattr(owner, name, replace(original))
        yield


def recording(guard: HostReadGuard) -> Callable[[], bool]:
    """Return a function that returns whether this thread calls it while ``guard`` is not paused."""
    thread = threading.get_ident()
    return lambda: not guard.paused and threading.get_ident() == thread
