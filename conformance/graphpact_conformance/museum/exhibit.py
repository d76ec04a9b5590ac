"""`Exhibit`: a real bug, planted by a small edit in a plugin that is right. `Variant`: a right one.

Does not: run any; see `graphpact_conformance.museum.gallery`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

Make: TypeAlias = Callable[[type[Any]], type[Any]]
"""From a right class to one with an edit."""
Around: TypeAlias = Callable[[], AbstractContextManager[object]]
"""What an edit lasts for."""


def _as_it_is(cls: type[Any]) -> type[Any]:
    return cls


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One real bug.

    Args:
        name: Unique, in words with hyphens: where it is planted, and what.
        rule: Id of the rule under which the suite has to see it.
        thread: Where it was public: ``owner/repository#number``.
        planted: The edit, in one sentence.
        base: Name of the plugin that it is planted in: an attention backend or a runner; ``reference`` for
            the kit's own backend, ``reference_runner`` for its runner.
        lanes: Names of the kinds of step that expose it, as `graphpact_conformance.problems.Case` prints
            them.
        make: Returns the broken class, made of the right one.
        around: Makes a context in which the lanes are built and run: for edits of what is no plugin, such as
            the registry, the capture sizes, or the batches of the scheduler.
        site: What is edited: ``backend``, ``runner``, ``registry``, ``capture sizes`` or ``batch``.
    """

    name: str
    rule: str
    thread: str
    planted: str
    base: str
    lanes: tuple[str, ...]
    make: Make = _as_it_is
    around: Around = nullcontext
    site: str = "backend"

    @property
    def url(self) -> str:
        """Address of the thread."""
        repository, _, number = self.thread.partition("#")
        return f"https://github.com/{repository}/issues/{number}"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A right plugin in another style than ours, which has to pass.

    Args:
        name: Unique, in words with hyphens.
        style: What is done otherwise, in one sentence.
        base: See `Exhibit`.
        lanes: See `Exhibit`.
        make: See `Exhibit`.
    """

    name: str
    style: str
    base: str
    lanes: tuple[str, ...]
    make: Make
