"""`Outer` and `Inner`: the suite's own observers around the checked one, which see what passes through it.

    observers=[Outer(log), checked, Inner(log), Planned(log)]

`Planned` wraps nothing: it is called before each hook, like an implementation, and may raise. An exception
that is raised in a generator would not do, because Python replaces `StopIteration` there.

Does not: judge; see `graphpact_conformance.observers.observing`.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from graphpact.hookspecs import hookimpl

HOOKS = (
    "populate",
    "prepare_replay",
    "init_metadata_capture",
    "init_metadata_replay",
    "run_step",
    "launch",
    "capture",
    "engine_phase",
)
"""The hooks that an observer may wrap."""

Around = Generator[None, Any, Any]


@dataclass
class HookLog:
    """What the two probes saw of hook calls.

    Args:
        inside: For each ended call its hook, and what the hook returned, or the exception that it raised.
        outside: The same, as it came out of the checked observer.
        plan: Called inside the checked observer before each hook, with the hook's name; it may raise.
        after: Called there after each hook that returned, with its name; it may raise.
        enters: Called where code of the checked observer begins to run.
        leaves: Called where it ends.
    """

    inside: list[tuple[str, Any]] = field(default_factory=list)
    outside: list[tuple[str, Any]] = field(default_factory=list)
    plan: Callable[[str], None] = lambda _: None
    after: Callable[[str], None] = lambda _: None
    enters: Callable[[], None] = lambda: None
    leaves: Callable[[], None] = lambda: None

    def clear(self) -> None:
        """Forget all calls."""
        self.inside.clear()
        self.outside.clear()


class Outer:
    """The probe outside of the checked observer."""

    def __init__(self, log: HookLog) -> None:
        self.log = log


class Inner:
    """The probe inside of the checked observer."""

    def __init__(self, log: HookLog) -> None:
        self.log = log


# The generators do not delegate to others: `yield from` replaces an exception of the type GeneratorExit.


def _outside(hook: str) -> Callable[..., Any]:
    def wrapper(self: Outer) -> Around:
        self.log.enters()
        try:
            result = yield
        except BaseException as error:
            self.log.leaves()
            self.log.outside.append((hook, error))
            raise
        self.log.leaves()
        self.log.outside.append((hook, result))
        return result

    return _named(wrapper, hook, f"Note what comes out of the checked observer of ``{hook}``.")


def _inside(hook: str) -> Callable[..., Any]:
    def wrapper(self: Inner) -> Around:
        self.log.leaves()
        try:
            result = yield
            self.log.after(hook)
        except BaseException as error:
            self.log.inside.append((hook, error))
            self.log.enters()
            raise
        self.log.inside.append((hook, result))
        self.log.enters()
        return result

    return _named(wrapper, hook, f"Note what ``{hook}`` returned or raised.")


class Planned:
    """Follows the plan of a log before each hook."""

    def __init__(self, log: HookLog) -> None:
        self.log = log


def _planned(hook: str) -> Callable[..., Any]:
    def method(self: Planned) -> None:
        self.log.plan(hook)

    return _named(method, hook, f"Follow the plan before ``{hook}``.")


def _named(method: Callable[..., Any], hook: str, about: str) -> Callable[..., Any]:
    method.__name__, method.__doc__ = hook, about
    return method


for _hook in HOOKS:
    setattr(Outer, _hook, hookimpl(wrapper=True, tryfirst=True)(_outside(_hook)))
    setattr(Inner, _hook, hookimpl(wrapper=True, trylast=True)(_inside(_hook)))
    setattr(Planned, _hook, hookimpl(tryfirst=True)(_planned(_hook)))
