"""`replaced`: replaces functions of other modules while a region is recorded.

Torch has no hook for some of what a region may do: call compiled code, start a thread, export memory. The
functions through which it passes are replaced for that time. Other threads call them too.

Does not: reach a function that the caller holds by a name of its own.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from graphpact_tape.host import HostReadGuard

__tracebackhide__ = True

Entrance: TypeAlias = tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]
"""The owner of a function, its name there, and what makes its replacement of it."""


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
    """Return a function that tells whether this thread calls it and ``guard`` is not paused."""
    thread = threading.get_ident()
    return lambda: not guard.paused and threading.get_ident() == thread
