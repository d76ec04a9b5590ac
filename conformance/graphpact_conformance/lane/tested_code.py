"""Find the line of the checked code that raised an error, and the caches of that code.

`ForeignCode` is code of another engine, which the backend of a lane calls.

Does not: call the code.
"""

import abc
import contextlib
import gc
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from graphpact.plugin_calls import short_path
from graphpact_conformance.lane.reference_backend import PaddedReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner, SegmentsRunner
from graphpact_conformance.oracle import OracleBackend
from graphpact_conformance.records.kv_memory import KvMemory
from graphpact_conformance.records.raised import causes
from graphpact_tape.trees import tensors_of

KITS = {SegmentsRunner, *PaddedReferenceBackend.__mro__, *ReferenceRunner.__mro__}
"""The classes of the suite's own backends and runners, with their bases."""
_SUITE = Path(__file__).parents[1]
_OWN_PACKAGES = {"graphpact", "graphpact_conformance"}

Whose = Callable[[FrameType], bool | None]
"""``(frame) -> is_authors``: True for the author's code, False for ours, None for any other between them."""


@dataclass(frozen=True)
class ForeignCode:
    """Code of another engine that the backend of a lane calls.

    Args:
        classes: ``(backend) -> classes``: its classes so far, with their bases, of a lane's backend class.
        whose: Whether a frame is in its author's code; None to decide by ``classes``.
        hooks: The names that findings give to hooks of the backend.
        without_graphs: Why the lane has no graphs, in the terms of the engine; None to say it by levels of
            graph support.
        most_tokens: The most new tokens of a request in the lane's batches; None for no further bound.
        kv_memory: The class of the lane's KV cache.
        oracle: The class whose attention is right.
    """

    classes: Callable[[type[Any]], Iterable[type[Any]]] = lambda _: ()
    whose: Whose | None = None
    hooks: Mapping[str, str] = field(default_factory=dict)
    without_graphs: str | None = None
    most_tokens: int | None = None
    kv_memory: type[KvMemory] = KvMemory
    oracle: type[OracleBackend] = OracleBackend


PLUGIN = ForeignCode()
"""The default for plugins: the tested code is the classes of the lane."""


def raised_at(error: BaseException, classes: Iterable[type[Any]], whose: Whose | None = None) -> str | None:
    """Return the file, line and function of the tested code that raised an error or a cause of it.

    Returns None if no frame of this code comes after the suite's last frame. Then other code raised it.

    Args:
        error: The error.
        classes: The classes of the tested code, with their bases.
        whose: Whether a frame is in the author's code; by default it is in a file or package of the classes.
    """
    is_authors = whose or _by_classes(classes)
    for each in causes(error):
        last = None
        for frame, line in traceback.walk_tb(each.__traceback__):
            found = is_authors(frame)
            if found:
                last = f"{short_path(frame.f_code.co_filename)}:{line} in {frame.f_code.co_qualname}"
            elif found is False:
                last = None
        if last is not None:
            return last
    return None


def _by_classes(classes: Iterable[type[Any]]) -> Whose:
    """Return a function that decides by files and packages of classes whose code a frame is in."""
    others = {*classes} - {*KITS, abc.ABC, object}
    files = {file for cls in others for file in _files_of(cls)}
    packages = {cls.__module__.partition(".")[0] for cls in others} - _OWN_PACKAGES

    def whose(frame: FrameType) -> bool | None:
        file, name = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if file in files or name.partition(".")[0] in packages:
            return True
        return False if _SUITE in Path(file).parents else None

    return whose


def _files_of(cls: type[Any]) -> Iterator[str]:
    """Yield the files of a class and of its methods, which need not be in a module that was imported."""
    with contextlib.suppress(TypeError, OSError):
        yield inspect.getsourcefile(cls) or inspect.getfile(cls)
    for value in vars(cls).values():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if inspect.isfunction(function):
            yield function.__code__.co_filename


def caches_of(classes: Iterable[type[Any]]) -> Iterator[Callable[[], object]]:
    """Yield a clearing function for each cache of tensors in classes and their packages."""
    classes = [*classes]
    packages = {c.__module__.partition(".")[0] for c in classes} - {
        "graphpact",
        "torch",
        "builtins",
        "abc",
    }
    spaces: list[Mapping[str, Any]] = [
        vars(module)
        for name, module in [*sys.modules.items()]
        if module is not None and name.partition(".")[0] in packages
    ]
    spaces += [vars(c) for c in classes]
    for function in [f for c in classes for f in vars(c).values() if inspect.isfunction(f)]:
        spaces.append(inspect.getclosurevars(function).nonlocals)
    values = [value for space in spaces for value in [*space.values()]]
    kinds = {kind for kind in {*map(type, values)} if hasattr(kind, "cache_clear")}
    cached = {id(value): value for value in values if type(value) in kinds}
    for function in cached.values():
        if _holds_tensors(function):
            yield function.cache_clear


def _holds_tensors(cached: Any) -> bool:
    """Return whether a `functools.lru_cache` holds tensors; other values use no device memory."""
    return any(tensors_of(each) for each in gc.get_referents(cached))
