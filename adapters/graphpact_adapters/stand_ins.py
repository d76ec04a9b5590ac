"""Modules in the place of those that a machine without the engine's dependencies lacks: for authors.

    from graphpact_adapters import stand_ins

    stand_ins.install(absent=["flashinfer", "zmq"], heavy=["acme.distributed"])
    from acme.attention import AcmeMetadataBuilder                              # which imports them

A builder's file imports much that its builder never calls. :func:`install` puts two finders on
``sys.meta_path``: one at the end, which is asked only for modules that are really absent and answers for an
explicit list of names; and one at the front, which answers for a few heavy modules of the engine itself. Both
serve :class:`StandIn`. A module that is absent and in neither list raises ``ModuleNotFoundError`` as usual.

A stand-in computes nothing, so a builder whose result depends on one is not the builder that was released.
:func:`called` collects the calls of stand-ins from the first builder on, and reports name them.

Does not: edit a module that was imported, or stand in for one that is there.
"""

import functools
import importlib.machinery
import sys
from abc import ABCMeta
from collections.abc import Collection, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

_watchers: list[list[str]] = []


class _Permissive(ABCMeta):
    """The type of stand-ins: they can be called, subclassed, subscripted and used as decorators."""

    def __getattr__(cls, name: str) -> "_Permissive":
        if name.startswith("__") or not cls.__dict__.get("_is_stand_in"):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        return _stand_in(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls.__dict__.get("_is_stand_in"):  # a class of the engine, with a stand-in among its bases
            return super().__call__(*args, **kwargs)
        if (
            len(args) == 1
            and not kwargs
            and isinstance(args[0], (FunctionType, MethodType, type, staticmethod))
        ):
            return args[0]  # as a decorator
        for calls in _watchers:
            calls.append(f"{cls.__module__}.{cls.__qualname__}")
        return cls

    def __getitem__(cls, _: Any) -> "_Permissive":
        return cls

    def __or__(cls, _: Any) -> "_Permissive":
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class StandIn(metaclass=_Permissive):
    """Something of an absent module: any attribute of it is a stand-in too, and a call returns itself."""

    _is_stand_in = True

    def __init_subclass__(cls, **_: Any) -> None:
        """Accept whatever keywords the real base class takes."""


def _stand_in(module: str, name: str) -> _Permissive:
    return _Permissive(name, (StandIn,), {"_is_stand_in": True, "__module__": module, "__qualname__": name})


class _Module(ModuleType):
    """A module whose every attribute is a stand-in, made when it is first read."""

    __path__: list[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"the stand-in of module {self.__name__} has no {name}")
        made = _stand_in(self.__name__, name)
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """Serves stand-ins for some modules and for everything below them."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a stand-in, or None where the name is not in the list."""
        del path, target
        parts = fullname.split(".")
        if not any(".".join(parts[: n + 1]) in self.names for n in range(len(parts))):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the stand-in of a module."""
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it was created."""


def install(absent: Collection[str], heavy: Collection[str] = ()) -> None:
    """Put both finders in place, for the rest of the process.

    Args:
        absent: third-party modules; a stand-in is served only where the real one is not found.
        heavy: modules of the engine, for which a stand-in is served although they are there.

    """
    sys.meta_path.insert(0, _Finder(heavy))
    sys.meta_path.append(_Finder(absent))


def package(name: str, folder: Path) -> None:
    """Put a bare package in the place of one whose ``__init__`` imports too much.

    Args:
        name: the package.
        folder: where its modules are; these are the real ones. Its own attributes are stand-ins.

    """
    made = _Module(name)
    made.__path__ = [str(folder)]
    sys.modules[name] = made


@functools.cache
def called() -> list[str]:
    """Return a list that collects the stand-ins called in this process, from the first call of this on."""
    _watchers.append([])
    return _watchers[-1]


NOTE = "a stand-in, which computes nothing, was called: "
"""How the note of a report on a stand-in begins."""


def notes() -> list[str]:
    """Return a note for each stand-in that was called, for the report of a run."""
    return [NOTE + name for name in sorted(set(called()))]
