"""`Exhibit`: a real bug, planted by a small edit in a correct plugin. `Variant`: a correct plugin.

Does not: run the suite; see `graphpact_museum.gallery`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

Make: TypeAlias = Callable[[type[Any]], type[Any]]
"""Makes an edited class from a correct one."""
Around: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Makes the context in which an edit is in place."""


def _as_it_is(cls: type[Any]) -> type[Any]:
    return cls


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One real bug.

    Args:
        name: Unique name with hyphens: the place and the bug.
        rule: Id of the rule under which the suite must catch it.
        thread: The public thread: ``owner/repository#number``.
        planted: The edit, in one sentence.
        base: Name of the edited plugin, an attention backend, a runner or a graph driver; ``reference`` for
            the suite's own backend, ``reference_runner`` for its runner.
        lanes: Names of the kinds of step that expose it, as printed by `Case`, of
            `graphpact_conformance.world.lanes`; of a driver, names of its lanes.
        make: Returns the broken class for the correct one.
        around: Makes a context in which the lanes are built and run: for edits outside plugins, such as the
            registry, the capture sizes, or the batches of the scheduler.
        values: Unusual values of scale without which the lanes do not expose it, as in names of lanes; see
            `graphpact_conformance.world.lanes.valued`.
        site: The edited part: ``backend``, ``runner``, ``driver``, ``registry``, ``capture sizes`` or
            ``batch``.
    """

    name: str
    rule: str
    thread: str
    planted: str
    base: str
    lanes: tuple[str, ...]
    make: Make = _as_it_is
    around: Around = nullcontext
    values: tuple[str, ...] = ()
    site: str = "backend"

    @property
    def url(self) -> str:
        """Address of the thread."""
        repository, _, number = self.thread.partition("#")
        return f"https://github.com/{repository}/issues/{number}"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A correct plugin in another style, which must pass.

    Args:
        name: Unique name with hyphens.
        style: The style, in one sentence.
        base: See `Exhibit`.
        lanes: See `Exhibit`.
        make: See `Exhibit`.
    """

    name: str
    style: str
    base: str
    lanes: tuple[str, ...]
    make: Make
