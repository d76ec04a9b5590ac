"""`names_plugins`: turns what a plugin raises in an engine into an error that names the plugin.

The plugin is found by the frames of the traceback, innermost first: a method of an object of its package,
inherited or not, or other code of its package. A frame of the engine ends the search.

Does not: change an error of graphpact, an interrupt, or what the engine or a model raises.
"""

import functools
import re
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import ParamSpec, TypeVar

from graphpact.errors import EngineError, GraphpactError, KernelRefusal, describe_error, short_path
from graphpact.plugins import PluginCatalog, PluginInfo

P = ParamSpec("P")
T = TypeVar("T")

_ENGINE = "graphpact_engine"
_OURS = {"graphpact", _ENGINE, "graphpact_conformance"}


def names_plugins(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that calls plugins.

    Raises:
        EngineError: A plugin raised anything but a `GraphpactError` or a `KernelRefusal`. The message has
            its name, the function of it that was called, the exception, and the line that raised it.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (GraphpactError, KernelRefusal, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit; the panics of Rust extensions
            fault = _fault(error, args[0] if args else None)
            if fault is None:
                raise
            raise fault from error

    return call


def _fault(error: BaseException, engine: object) -> EngineError | None:
    """Return the error that names the plugin in which ``error`` was raised, or None if it was in none.

    Of several plugins of one package it is one whose class a frame works on, or else one that a lane has.
    """
    offers: dict[str, list[PluginInfo]] = {}
    for info in PluginCatalog.scan(env={}).infos():
        offers.setdefault(_package(info.target), []).append(info)
    offers = {package: infos for package, infos in offers.items() if package not in _OURS}
    frames = [*traceback.walk_tb(error.__traceback__)][::-1]
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
    if not own:
        return None
    (inner, line), (outer, _) = own[0], own[-1]
    workers = [frame.f_locals.get("self") for frame, _ in own]
    plugins = _of_class(offers[owner], workers)
    if len(plugins) > 1:
        lanes = getattr(engine, "lanes", ())
        plugins = _of_class(plugins, [x for lane in lanes for x in (lane.runner, lane.backend, lane.driver)])
    names = " or ".join(f"{info.kind} {info.name}" for info in plugins)
    return EngineError(
        f"{names} ({plugins[0].distribution} {plugins[0].version}): {outer.f_code.co_qualname} raised"
        f" {describe_error(error)} (at {short_path(inner.f_code.co_filename)}:{line})",
        hint="a defect of the plugin; GRAPHPACT_TRACEBACK=1 prints the traceback",
    )


def _package(module: str) -> str:
    return re.split("[.:]", module)[0]


def _of_class(offers: Sequence[PluginInfo], workers: Sequence[object]) -> Sequence[PluginInfo]:
    """Return those of a package's plugins whose class the first of these objects has; all if none does."""
    for worker in workers:
        classes = {each.__name__ for each in type(worker).__mro__}
        if found := [info for info in offers if info.target.rpartition(":")[2] in classes]:
            return found
    return offers
