"""`exhibit` declares a real bug, planted by an edit of a correct plugin; `variant` declares a correct plugin.

Both decorate a function. Its name is the name of the exhibit or variant, and its docstring says what is
planted, or what the style is. The function takes the correct class and returns the edited one. A second
decorator can make such a function from an edit; see `graphpact_museum.edits`.

Does not: run the suite; see `graphpact_museum.gallery`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

Make: TypeAlias = Callable[[type[Any]], type[Any]]
"""Makes an edited class from a correct one."""
Around: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Makes the context in which an edit is in place."""
_RUNNERS = frozenset(
    {
        *("reference_runner", "cuda_graph", "breakable_cuda_graph", "piecewise_cuda_graph", "cpu_graph"),
        *("eagle_draft", "eagle_draft_extend", "frozen_kv_mtp"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One real bug.

    Args:
        name: Unique name with hyphens. It names the edited part and the bug.
        rule: Id of the rule under which the suite must catch it.
        thread: The public thread: ``owner/repository#number``.
        planted: The edit, in one sentence.
        base: Name of the edited plugin, an attention backend, a runner or a graph driver; ``reference`` for
            the suite's own backend, ``reference_runner`` for its runner.
        lanes: Names of the kinds of step that expose it, as `graphpact_conformance.draws.cases.Case` prints
            them. For a driver, the names of its lanes.
        make: Returns the broken class for the correct one.
        around: Makes a context in which the lanes are built and run. It is for edits outside plugins, such as
            the registry, the capture sizes, or the batches of the scheduler.
        values: The unusual values of scale that the lanes need to expose it, spelled as in names of lanes;
            see `graphpact_conformance.draws.choice.valued`.
        ranks: Number of processes that step together in its lanes; None for lanes of one process.
        site: The edited part: ``backend``, ``runner``, ``driver``, ``registry``, ``capture sizes`` or
            ``batch``.
        module: The module that declares it.
    """

    name: str
    rule: str
    thread: str
    planted: str
    base: str
    lanes: tuple[str, ...]
    make: Make
    around: Around
    values: tuple[str, ...]
    ranks: int | None
    site: str
    module: str

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
        ranks: See `Exhibit`.
        module: See `Exhibit`.
    """

    name: str
    style: str
    base: str
    lanes: tuple[str, ...]
    make: Make
    ranks: int | None
    module: str


declared: list[Exhibit | Variant] = []
"""The exhibits and variants of all modules that were imported, in the order of their declaration."""
_Edit = TypeVar("_Edit", bound=Callable[..., Any])


def exhibit(
    rule: str,
    thread: str,
    *,
    on: str,
    lanes: str | tuple[str, ...],
    values: tuple[str, ...] = (),
    ranks: int | None = None,
    site: str | None = None,
    prefix: str | None = None,
) -> Callable[[_Edit], _Edit]:
    """Return a decorator that declares an `Exhibit`, and returns the function as it is.

    A function may be decorated several times, to plant the same bug in several plugins.

    Args:
        rule: See `Exhibit`.
        thread: See `Exhibit`.
        on: The name of the edited plugin: ``base`` of the `Exhibit`.
        lanes: The name of one lane, or of several.
        values: See `Exhibit`.
        ranks: See `Exhibit`.
        site: The edited part, if it is not a plugin. The function is then the ``around`` of the `Exhibit`.
        prefix: The part of the exhibit's name before the name of the function; None for no prefix.
    """

    def declare(edit: _Edit) -> _Edit:
        made = Exhibit(
            name=_name_of(edit, prefix),
            rule=rule,
            thread=thread,
            planted=_sentence_of(edit),
            base=on,
            lanes=(lanes,) if isinstance(lanes, str) else lanes,
            make=edit if site is None else _as_it_is,
            around=nullcontext if site is None else edit,
            values=values,
            ranks=ranks,
            site=site or ("driver" if on == "tape" else "runner" if on in _RUNNERS else "backend"),
            module=edit.__module__,
        )
        declared.append(made)
        return edit

    return declare


def variant(
    *, on: str, lanes: str | tuple[str, ...], ranks: int | None = None, prefix: str | None = None
) -> Callable[[Make], Make]:
    """Return a decorator that declares a `Variant`, and returns the function as it is.

    Args:
        on: See `exhibit`.
        lanes: See `exhibit`.
        ranks: See `exhibit`.
        prefix: See `exhibit`.
    """

    def declare(make: Make) -> Make:
        made = Variant(
            name=_name_of(make, prefix),
            style=_sentence_of(make),
            base=on,
            lanes=(lanes,) if isinstance(lanes, str) else lanes,
            make=make,
            ranks=ranks,
            module=make.__module__,
        )
        declared.append(made)
        return make

    return declare


def _as_it_is(cls: type[Any]) -> type[Any]:
    return cls


def _name_of(edit: Callable[..., Any], prefix: str | None) -> str:
    name = edit.__name__.replace("_", "-")
    return name if prefix is None else f"{prefix}-{name}"


def _sentence_of(edit: Callable[..., Any]) -> str:
    return " ".join((edit.__doc__ or "").split())
