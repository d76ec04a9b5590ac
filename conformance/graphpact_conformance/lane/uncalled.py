"""`watched_calls`: which optional methods of a plugin a run calls. `uncalled_methods`: the others.

A plugin overrides a method for some kind of step. If no lane of a run has such a step, nothing is known of
the method, although every rule passes.

Does not: watch a method after its first call, or methods that only the plugin calls.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from graphpact.attention import AttentionBackend
from graphpact.hookspecs import HookMethods
from graphpact.runners import GraphRunner

OF_BACKENDS: Mapping[str, str] = {
    "refresh_metadata": "a lane calls it before a replay whose graph does not fill the metadata",
    "plan_metadata": "a lane calls it before each replay and in eager steps",
    "record_metadata": "a lane calls it at the capture of a graph with attention inside",
    "init_metadata_capture": "a lane calls it at the capture of a graph with attention inside",
    "init_metadata_replay": "a lane calls it before the replay of a graph with attention inside",
    "init_metadata_eager": "a lane calls it in steps and attention calls without a graph",
}
"""Methods of backends that only some lanes call, and when."""
OF_RUNNERS: Mapping[str, str] = {
    "populate": "a lane calls it at captures and before replays",
    "prepare_replay": "a lane calls it at captures and before replays",
    "slots": "a lane that captures calls it when it is built",
    "dummy": "a lane calls it at captures",
    "fit": "a lane that captures calls it for each step",
    "eager_reason": "an engine calls it when it plans a lane",
}
"""Methods of runners that only some lanes call, and when."""


@dataclass(frozen=True)
class Uncalled:
    """A method of the checked code that its engine calls and no lane calls.

    Args:
        name: The method.
        when: Who calls it and when, such as ``the engine calls it in steps with a common prefix``.
    """

    name: str
    when: str

    def __str__(self) -> str:
        return f"never called here; {self.when}"


@contextmanager
def watched_calls(classes: Collection[type[Any]]) -> Iterator[set[str]]:
    """Yield the names of the optional methods that were called so far, of backends and runners.

    Args:
        classes: The classes of the checked plugins.
    """
    called: set[str] = set()
    watched: list[tuple[type[Any], str, object]] = []
    for owner, name in {(owner, name): None for cls in classes for owner, name in _overridden(cls)}:
        method = vars(owner)[name]
        watched.append((owner, name, method))
        setattr(owner, name, _noting(owner, name, method, called))
    try:
        yield called
    finally:
        for owner, name, method in watched:
            setattr(owner, name, method)


def uncalled_methods(classes: Collection[type[Any]], called: Collection[str]) -> Iterator[Uncalled]:
    """Yield the optional methods that the classes override and no lane called, each once."""
    for name in dict.fromkeys(name for cls in classes for _, name in _overridden(cls)):
        if name not in called:
            yield Uncalled(name, {**OF_BACKENDS, **OF_RUNNERS}[name])


def _overridden(cls: type[Any]) -> Iterator[tuple[type[Any], str]]:
    """Yield the optional methods that a plugin overrides, with the class that defines each."""
    base, methods = (AttentionBackend, OF_BACKENDS) if issubclass(cls, AttentionBackend) else _RUNNER
    own = [each for each in cls.__mro__ if each not in (base, HookMethods) and issubclass(each, base)]
    for name in methods:
        owner = next((each for each in own if name in vars(each)), None)
        if owner is not None and callable(getattr(owner, name)) and not _is_of_core(owner):
            yield owner, name


_RUNNER = GraphRunner, OF_RUNNERS


def _is_of_core(cls: type[Any]) -> bool:
    """Return whether a class is the core's own, whose methods the plugin did not write."""
    return cls.__module__.partition(".")[0] in ("graphpact", "graphpact_conformance")


def _noting(owner: type[Any], name: str, method: Any, called: set[str]) -> Any:
    """Return a method that notes its first call, and then puts the method itself back into its class."""
    function: Callable[..., Any] = getattr(method, "__func__", method)

    @functools.wraps(function)
    def first(*args: Any, **kwargs: Any) -> Any:
        called.add(name)
        setattr(owner, name, method)
        return function(*args, **kwargs)

    return type(method)(first) if isinstance(method, classmethod | staticmethod) else first
