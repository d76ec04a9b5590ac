"""Checks of a plugin's class before it is instantiated: base class, hooks, and arguments.

A class that implements a deprecated hook, or takes a deprecated argument of a hook, passes with a warning.

Does not: find or import plugins; `graphpact.plugins` does.
"""

import inspect
import types
from contextlib import suppress
from typing import Any

import pluggy

from graphpact import hookspecs
from graphpact.attention import AttentionBackend, KernelProvider
from graphpact.engines import EngineOffer
from graphpact.errors import did_you_mean
from graphpact.graphs import GraphDriver
from graphpact.runners import GraphRunner
from graphpact.speculation import SpeculationAlgorithm

_BASES: dict[str, type[Any]] = {
    "attention_backend": AttentionBackend,
    "runner": GraphRunner,
    "graph_driver": GraphDriver,
    "speculation": SpeculationAlgorithm,
    "engine": EngineOffer,
}
"""The base class of each kind of plugin that has one."""
_CORE = __name__.partition(".")[0]


def class_fault(cls: Any, kind: str, name: str) -> str | None:
    """Return why ``cls`` is not a valid plugin class of its kind, or None if it is.

    Args:
        cls: The object to which the entry point refers.
        kind: The kind of the plugin: ``"runner"``, ``"observer"``.
        name: The name of the entry point.
    """
    reason = _base_fault(cls, _BASES.get(kind, object))
    reason = reason or (observer_fault(cls) if kind == "observer" else _hook_fault(cls))
    reason = reason or _argument_fault(cls, kind)
    if reason is None and kind == "graph_driver" and cls.name != name:
        return f"{cls.__name__}.name is {cls.name!r}; reports would show the name of another driver"
    return reason


def _base_fault(cls: Any, base: type[Any]) -> str | None:
    """Return why ``cls`` is not a complete subclass of ``base``, or None."""
    if not isinstance(cls, type) or not issubclass(cls, base):
        what = f"class {cls.__name__}" if isinstance(cls, type) else type(cls).__name__
        return f"refers to a {what}, not to a class derived from {base.__module__}.{base.__name__}"
    lacks: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
    if lacks:
        return f"{cls.__name__} is abstract: it lacks {', '.join(sorted(lacks))}"
    required = [n for n, a in inspect.get_annotations(base).items() if "ClassVar" in str(a)]
    unset = [name for name in required if not hasattr(cls, name)]
    for each in (issubclass(cls, AttentionBackend) and cls.providers) or ():
        is_provider = isinstance(each, type) and issubclass(each, KernelProvider)
        if not is_provider or getattr(each, "name", None) not in ("native", "compiled", "portable"):
            return f"{cls.__name__}.providers has {each!r}, none called native, compiled or portable"
    return f"{cls.__name__} does not set {', '.join(unset)}" if unset else None


def _hook_fault(cls: type[Any]) -> str | None:
    """Return what is wrong with the hooks that ``cls`` implements, or None."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    hooks = [name for name in vars(manager.hook) if name[0] != "_"]
    of_cls = _Unbuilt(cls)
    try:
        manager.register(of_cls, name=f"{cls.__module__}.{cls.__qualname__}")
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        for caller in manager.get_hookcallers(of_cls) or ():
            if not caller.has_spec():
                near = did_you_mean(caller.name, hooks)
                hint = f"did you mean {near!r}" if near else f"hooks: {', '.join(hooks)}"
                return f"{cls.__name__} implements an unknown hook {caller.name!r}; {hint}"
        return " ".join(str(error).split())
    return None


def observer_fault(cls: type[Any]) -> str | None:
    """Return why objects of ``cls`` cannot observe a lane, or None.

    A class cannot if it implements a hook that is not in the contract, no hook, or a hook without
    ``wrapper=True``.
    """
    if reason := _hook_fault(cls):
        return reason
    options = {
        name: opts
        for name in dir(cls)
        if (opts := getattr(inspect.getattr_static(cls, name), f"{hookspecs.PROJECT}_impl", None))
    }
    if not options:
        return f"{cls.__name__} implements no hook"
    answers = sorted(name for name, opts in options.items() if not opts.get("wrapper"))
    if answers:
        return f"{cls.__name__}: an observer may only wrap hooks; {', '.join(answers)} lacks wrapper=True"
    return None


def _argument_fault(cls: type[Any], kind: str) -> str | None:
    """Return why ``cls`` cannot be built with the arguments of its kind, or None."""
    given = {"observer": (), "engine": (), "graph_driver": ("device",)}.get(kind, ("context",))
    try:
        with suppress(ValueError):  # a class in C may have no signature
            inspect.signature(cls).bind(*given)
    except TypeError as error:
        return f"{cls.__name__} cannot be built with {given[0] if given else 'no argument'}: {error}"
    return None


class _Unbuilt:
    """The methods of a class, bound to the class, so that pluggy does not see ``self``.

    The class itself does not work: pluggy strips ``self`` only from functions defined in a class body. What
    the class inherits from the core is left out: the core follows the specification, and a deprecated hook
    of a base class is no concern of the plugin's author.
    """

    def __init__(self, cls: type[Any]) -> None:
        for name in dir(cls):
            method = inspect.getattr_static(cls, name)
            if str(getattr(method, "__module__", None)).partition(".")[0] == _CORE:
                continue
            if isinstance(method, staticmethod | classmethod):
                vars(self)[name] = getattr(cls, name)
            elif inspect.isfunction(method):
                vars(self)[name] = types.MethodType(method, cls)
