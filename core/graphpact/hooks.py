"""`Hooks`: the hooks of one lane or engine, with implementations and observers, resolved once.

    hooks = Hooks([runner, backend], observers)
    populate = hooks.resolve("populate")      # before the first step
    populate(registry=..., batch=..., shape=...)

If no observer wraps a hook, it resolves to the bound method of its implementation and costs one call, or two
if the implementation does not name every argument, such as one of an earlier contract version. Otherwise it
resolves to pluggy's caller, which runs the wrappers around the implementation.

Does not: know which hooks a step calls, or in which order (`graphpact.lane` does), or warn of deprecated ones
(`graphpact.plugin_checks` does).
"""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pluggy

from graphpact import hookspecs


class Hooks:
    """The hooks of one lane or engine.

    Args:
        implementers: Plugin objects that implement hooks.
        observers: Plugin objects that wrap hooks; the first one is the outermost.

    Attributes:
        manager: The pluggy manager in which all of them are registered.

    Raises:
        pluggy.PluginValidationError: A plugin implements an unknown hook, or a hook with an unknown argument.
    """

    def __init__(self, implementers: Iterable[object], observers: Sequence[object]) -> None:
        self.manager = _Manager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        for plugin in (*implementers, *reversed(observers)):  # pluggy calls the last registered first
            self.manager.register(plugin)
        self.manager.check_pending()

    def resolve(self, name: str) -> Callable[..., Any] | None:
        """Return the callable of the hook ``name``; None if nothing implements the hook.

        It takes the hook's arguments by keyword.
        """
        caller = self._caller(name)
        implementations = caller.get_hookimpls()
        plain = [each for each in implementations if not _is_wrapper(each)]
        if not plain:
            return None
        if len(implementations) > 1 or caller.spec is None:
            return caller
        taken = (*plain[0].argnames, *plain[0].kwargnames)
        passed = tuple(name for name in caller.spec.argnames if name in taken)
        return plain[0].function if passed == caller.spec.argnames else _picking(plain[0].function, passed)

    def is_observed(self, name: str) -> bool:
        """Return whether an observer wraps the hook ``name``."""
        return any(map(_is_wrapper, self._caller(name).get_hookimpls()))

    def outermost(self, name: str) -> object:
        """Return the outermost wrapper of the hook ``name``, which determines the result; may be None."""
        return self._caller(name).get_hookimpls()[-1].plugin

    def _caller(self, name: str) -> pluggy.HookCaller:
        caller: pluggy.HookCaller = getattr(self.manager.hook, name)
        return caller


class _Manager(pluggy.PluginManager):
    """A manager that only looks for hooks among the marked methods of a class.

    It does not warn of deprecated hooks and arguments. The check of a plugin's class does, once; there is a
    manager for each lane.
    """

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        cls = plugin if isinstance(plugin, type) else type(plugin)
        if name not in getattr(plugin, "__dict__", ()) and name not in _marked_names(cls):
            return None  # nearly every name ends here, and pluggy's own search takes long
        return super().parse_hookimpl_opts(plugin, name)

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> pluggy.HookspecOpts | None:
        options = super().parse_hookspec_opts(module_or_class, name)
        if options is not None:
            options = {**options, "warn_on_impl": None, "warn_on_impl_args": None}
        return options


@functools.lru_cache(maxsize=64)
def _marked_names(cls: type[Any]) -> Collection[str]:
    """Return the names of the methods of a class that are marked as implementations of hooks."""
    mark = f"{hookspecs.PROJECT}_impl"
    return {name for base in cls.__mro__ for name, value in vars(base).items() if hasattr(value, mark)}


def _picking(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return ``function`` as a callable that takes every argument of its hook, and passes on those it names.

    pluggy's caller does the same in ten times the time, and a step calls four hooks.
    """

    def call(**given: Any) -> Any:
        return function(**{name: given[name] for name in names})

    return call


def _is_wrapper(implementation: pluggy.HookImpl) -> bool:
    return implementation.wrapper or implementation.hookwrapper
