"""Stand-ins for the two packages that SGLang imports and a CPU build of torch cannot load.

``sgl_kernel`` has kernels of CUDA, and the registry's ``torchvision`` wants a CUDA build of torch. SGLang
imports names of both when it is imported, and on a CPU calls none of them for text models. `install` adds a
finder behind all others, so that an installed package always wins. It does nothing if both are installed.

Does not: do the work of a kernel: a call of a stand-in raises an error.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import MutableSequence, Sequence
from typing import Any

from graphpact.errors import EngineError

PACKAGES = ("sgl_kernel", "torchvision")


def missing() -> list[str]:
    """Return the packages of `PACKAGES` that are not installed, and for which `install` stands in."""
    return [name for name in PACKAGES if _find_installed(name) is None]


def install() -> list[str]:
    """Stand in for the missing packages, and return their names.

    Every process that imports SGLang calls it before. Transformers is asked first which packages there are,
    because it keeps the answers: it must not take a stand-in for an installation.
    """
    names = missing()
    if names and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        import transformers.utils.import_utils as probes  # noqa: PLC0415  only where it is needed

        for name in ("torchvision", "torchvision_v2", "torchcodec", "torchaudio", "kernels", "accelerate"):
            getattr(probes, f"is_{name}_available", lambda: None)()
        sys.meta_path.append(_Finder(names))
    return names


def is_stand_in(module: types.ModuleType) -> bool:
    """Return whether ``module`` is a stand-in."""
    return isinstance(module, _Module)


def _find_installed(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of an installed package, which no stand-in provides."""
    for finder in sys.meta_path:
        if not isinstance(finder, _Finder):
            spec = finder.find_spec(name, None)
            if spec is not None:
                return spec
    return None


class _StandIn(type):
    """The type of stand-ins for classes and functions; their attributes are stand-ins, calls are refused."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        del args, kwargs
        raise EngineError(
            f"{cls.__qualname__} was called, and its package is not installed",
            hint="install it, or choose an attention backend that does not need it",
        )


def _make(name: str) -> _StandIn:
    return _StandIn(name.rpartition(".")[2], (), {"__qualname__": name})


class _Module(types.ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012  nothing is found there

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the missing packages."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""
