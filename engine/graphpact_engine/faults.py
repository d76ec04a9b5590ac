"""`names_plugins`: turns an exception of a plugin in an engine into an error that names the plugin.

`call_plugin` does the same without a search, for calls in which the engine knows the name of the plugin.

The plugin is found by the frames of the traceback, innermost first: a method of an object of its package,
inherited or not, or other code of its package. A frame of the engine ends the search. Two faults raise
outside of the plugin's code: a hook wrapper that does not yield exactly once is found among the
implementations of the hook, and a missing attribute by the object that lacks it.

Does not: change errors of graphpact, interrupts, or exceptions of the engine or a model.
"""

import functools
import inspect
import re
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from graphpact.errors import EngineError, GraphpactError, KernelRefusal, PluginError
from graphpact.graphs import Graph
from graphpact.plugin_calls import call, describe_error, short_path
from graphpact.plugins import PluginCatalog, PluginInfo

P = ParamSpec("P")
T = TypeVar("T")

_ENGINE = "graphpact_engine"
_OURS = {"graphpact", _ENGINE, "graphpact_cli", "graphpact_conformance"}
_TRACEBACK = "GRAPHPACT_TRACEBACK=1 prints the traceback"


def names_plugins(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that calls plugins.

    Raises:
        EngineError: A plugin raised anything but a `GraphpactError` or a `KernelRefusal`, its hook wrapper
            did not yield once, or an object of it lacks an attribute. The message contains its name, the
            function that was called, the exception, and the line that raised it.
    """

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (GraphpactError, KernelRefusal, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit; the panics of Rust extensions
            fault = _fault(error, args)
            if fault is None:
                raise
            raise fault from error

    return guarded


def call_plugin(kind: str, name: str, make: Callable[..., T], *args: Any) -> T:
    """Call into a plugin; raise `PluginError` with its name for any exception that is no `GraphpactError`."""
    hint = "select another one, or set GRAPHPACT_TRACEBACK=1 to see the traceback"
    return call(f"{kind} {name!r} cannot be used: it", make, *args, error=PluginError, hint=hint)


def _fault(error: BaseException, given: Sequence[object]) -> EngineError | None:
    """Return the error that names the plugin in which ``error`` was raised, or None if it was in none.

    ``given`` are the arguments of the decorated function: the engine is one of them.

    If a package has several plugins, it is one whose instance is in a frame, or else one that a lane uses.
    """
    offers: dict[str, list[PluginInfo]] = {}
    for info in PluginCatalog.scan(env={}).infos():
        offers.setdefault(_package(info.target), []).append(info)
    offers = {package: infos for package, infos in offers.items() if package not in _OURS}
    frames = [*traceback.walk_tb(error.__traceback__)][::-1]
    if refused := _refused_wrapper([frame for frame, _ in frames]):
        observer, did = refused
        package = _package(type(observer).__module__)
        names = f"observer {type(observer).__name__}"
        if package in offers:
            names = _names(offers[package], [observer], given)
        return EngineError(
            f"{names}: {did}",
            hint="a hook wrapper yields once and returns the received value: outputs = yield; return outputs",
        )
    own: list[tuple[FrameType, int]] = []
    owner = ""
    for frame, line in frames:
        code = _package(frame.f_globals.get("__name__", ""))
        if code == _ENGINE:
            break
        worker = _package(type(frame.f_locals.get("self")).__module__)
        package = worker if worker in offers else code
        if package in offers and owner in ("", package):
            owner = package
            own.append((frame, line))
    if own:
        (inner, line), (outer, _) = own[0], own[-1]
        workers = [frame.f_locals.get("self") for frame, _ in own]
        text = (
            f"{outer.f_code.co_qualname} raised {describe_error(error)}"
            f" (at {short_path(inner.f_code.co_filename)}:{line})"
        )
    elif isinstance(error, AttributeError) and _package(type(error.obj).__module__) in offers:
        workers, owner = [error.obj], _package(type(error.obj).__module__)
        text = f"{type(error.obj).__name__} lacks the attribute {error.name!r}"
    else:
        return None
    names = _names(offers[owner], workers, given)
    return EngineError(f"{names}: {text}", hint=f"a defect of the plugin; {_TRACEBACK}")


def _refused_wrapper(frames: Sequence[FrameType]) -> tuple[object, str] | None:
    """Return the plugin whose hook wrapper pluggy refused, and what the wrapper did; None for other errors.

    A wrapper must yield exactly once. pluggy raises in a frame that holds the ended generator; the frame
    around it holds the implementations of the hook. ``frames`` begin with the innermost.
    """
    if len(frames) < 2 or frames[0].f_code.co_name != "_raise_wrapfail":
        return None
    given: dict[str, Any] = frames[0].f_locals
    code: Any = getattr(given.get("wrap_controller"), "gi_code", None)
    plugins = {
        id(getattr(inspect.unwrap(one.function), "__code__", None)): one.plugin
        for one in frames[1].f_locals.get("hook_impls", ())
    }
    if code is None or id(code) not in plugins:
        return None
    where = f"{short_path(code.co_filename)}:{code.co_firstlineno}"
    return plugins[id(code)], f"{code.co_qualname} {given.get('msg')} (at {where})"


def _package(module: str) -> str:
    return re.split("[.:]", module)[0]


def _names(offers: Sequence[PluginInfo], workers: Sequence[object], given: Sequence[object]) -> str:
    """Return kind, name and distribution of the plugin whose objects are in the frames."""
    plugins = _of_class(offers, workers)
    if len(plugins) > 1:
        lanes = [lane for each in given for lane in getattr(each, "lanes", ())]
        plugins = _of_class(plugins, [x for lane in lanes for x in (lane.runner, lane.backend, lane.driver)])
    names = " or ".join(f"{info.kind} {info.name}" for info in plugins)
    return f"{names} ({plugins[0].distribution} {plugins[0].version})"


def _of_class(offers: Sequence[PluginInfo], workers: Sequence[object]) -> Sequence[PluginInfo]:
    """Return the plugins of the first object that is an instance of one; all plugins if there is none.

    A graph is not a plugin; it counts as an object of the package's drivers.
    """
    for worker in workers:
        classes = {each.__name__ for each in type(worker).__mro__}
        found = [info for info in offers if info.target.rpartition(":")[2] in classes]
        if not found and isinstance(worker, Graph):
            found = [info for info in offers if info.kind == "graph_driver"]
        if found:
            return found
    return offers
