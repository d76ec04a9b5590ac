"""Stand-ins for modules that are not installed, so that an author's code can be imported without them.

    from graphpact_adapters import stand_ins

    stand_ins.install(absent=["flashinfer", "zmq"], heavy=["acme.distributed"])
    from acme.attention import AcmeMetadataBuilder                              # which imports them

A builder's file imports many modules that its builder never uses. :func:`install` puts two finders on
``sys.meta_path``. The one at the end is reached only for modules that are not installed, and serves those in
an explicit list. The one at the front serves a few heavy modules of the engine itself. Both serve
:class:`StandIn`. A module that is not installed and in neither list raises ``ModuleNotFoundError`` as usual.

A stand-in computes nothing, so a builder whose result depends on one is not the released builder.
:func:`called` collects the calls of stand-ins from the first builder on, and reports name them.

Does not: edit a module that was imported, or replace an installed module that is not in the second list.
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
    """The metaclass of stand-ins, which can be called, subclassed, subscripted and used as decorators."""

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
    """An object of an absent module. Every attribute of it is a stand-in too, and a call returns itself."""

    _is_stand_in = True

    def __init_subclass__(cls, **_: Any) -> None:
        """Accept whatever keywords the real base class takes."""


def _stand_in(module: str, name: str) -> _Permissive:
    return _Permissive(name, (StandIn,), {"_is_stand_in": True, "__module__": module, "__qualname__": name})


class _Module(ModuleType):
    """A module in which every attribute is a stand-in, made when it is first read."""

    __path__: list[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"the stand-in of module {self.__name__} has no {name}")
        made = _stand_in(self.__name__, name)
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """A finder that serves stand-ins for some modules and for everything below them."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a stand-in, or None if the name is not in the list."""
        del path, target
        parts = fullname.split(".")
        if not any(".".join(parts[: n + 1]) in self.names for n in range(len(parts))):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the stand-in for a module."""
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it was created."""


def install(absent: Collection[str], heavy: Collection[str] = ()) -> None:
    """Put both finders in place, for the rest of the process.

    Args:
        absent: third-party modules; a stand-in is served only if the real one is not found.
        heavy: modules of the engine; a stand-in is served although they are installed.

    """
    sys.meta_path.insert(0, _Finder(heavy))
    sys.meta_path.append(_Finder(absent))


def package(name: str, folder: Path) -> None:
    """Replace a package whose ``__init__`` imports too much by one without an ``__init__``.

    Args:
        name: the package.
        folder: the folder of its modules, which are the real ones. The package's own attributes are
            stand-ins.

    """
    made = _Module(name)
    made.__path__ = [str(folder)]
    sys.modules[name] = made


@functools.cache
def called() -> list[str]:
    """Return the list of stand-ins called in this process; collecting starts with the first call of this."""
    _watchers.append([])
    return _watchers[-1]


NOTE = "a stand-in, which computes nothing, was called: "
"""The beginning of a report's note on a stand-in."""


def notes() -> list[str]:
    """Return a note for each stand-in that was called, for a report."""
    return [NOTE + name for name in sorted(set(called()))]
