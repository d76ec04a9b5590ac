"""`holder_of`: the name under which a plugin holds a tensor, in attributes, globals, closures, caches.

Does not: know slots and the engine's memory; see `graphpact.memory_map`.
"""

import dataclasses
import functools
import gc
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch

from graphpact.tensors import storage_id

_MOST = 20_000
"""Largest number of values that one search examines."""
_SEQUENCES = (list, tuple, set, frozenset, deque)


def holder_of(tensor: torch.Tensor, *owners: object) -> tuple[str, torch.Tensor] | None:
    """Return the name and the whole of the first tensor that objects hold in the storage of ``tensor``.

    The search is breadth-first: attributes of ``owners``, with the items of their containers and the
    attributes of their own objects; then the classes and modules of their packages, with closures and the
    caches of functions there.

    Args:
        tensor: The tensor.
        owners: A backend, a runner.

    Returns:
        The name, such as ``MyBackend.tables['decode'][2]``, and the tensor; None if they hold none.
    """
    storage = storage_id(tensor)
    packages = _packages_of(owners)
    for name, held in _held(owners, packages):
        if isinstance(held, torch.Tensor) and storage_id(held) == storage:
            return name, held
    return None


def storages_of(*owners: object) -> set[int]:
    """Return the identities of the storages that objects hold in attributes, at any depth."""
    found = _walk(_attributes_of(owners), _packages_of(owners))
    return {storage_id(held) for _, held in found if isinstance(held, torch.Tensor)}


def _packages_of(owners: Iterable[object]) -> set[str]:
    modules = {cls.__module__.partition(".")[0] for each in owners for cls in type(each).__mro__}
    return modules - {"graphpact", "torch", "builtins", "abc", "typing"}


def _attributes_of(owners: Iterable[object]) -> list[tuple[str, Any]]:
    return [(f"{type(each).__name__}.{key}", value) for each in owners for key, value in vars(each).items()]


def _held(owners: Sequence[object], packages: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield every value that objects hold, those of their classes and modules last, with its name."""
    yield from _walk(_attributes_of(owners), packages)
    classes = [cls for each in owners for cls in type(each).__mro__ if cls.__module__ != "builtins"]
    yield from _walk(
        ((f"{c.__name__}.{name}", value) for c in classes for name, value in vars(c).items()), packages
    )
    modules = [
        (f"{name}.{key}", value)
        for name, module in [*sys.modules.items()]
        if module is not None and name.partition(".")[0] in packages
        for key, value in [*vars(module).items()]
        if not inspect.ismodule(value) and not key.startswith("__")
    ]
    yield from _walk(modules, packages)


def _walk(roots: Iterable[tuple[str, Any]], packages: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield roots and their parts breadth-first, each once, with their names."""
    todo, seen = deque(roots), set[int]()
    while todo and len(seen) < _MOST:
        name, value = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield name, value
        todo += _parts(name, value, packages)


def _parts(name: str, value: Any, packages: set[str]) -> list[tuple[str, Any]]:
    """Return the parts of a value, with their names; empty for tensors, numbers, and objects of others."""
    if isinstance(value, (torch.Tensor, type, str, bytes)):
        return []
    if isinstance(value, functools._lru_cache_wrapper):  # noqa: SLF001  the type has no other name
        return [(f"the cache of {name}", item) for item in gc.get_referents(value)]  # results, or their dict
    if isinstance(value, (FunctionType, MethodType)):
        return _closure(name, inspect.unwrap(value))
    if isinstance(value, functools.partial):
        value = {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", item) for key, item in [*value.items()]]
    if isinstance(value, _SEQUENCES) and not hasattr(value, "_fields"):
        return [(f"{name}[{at}]", item) for at, item in enumerate([*value])]
    return [(f"{name}.{key}", item) for key, item in own_attributes(value, packages).items()]


def _closure(name: str, function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return the variables that a function takes from the functions around it; none of a compiled one."""
    if not inspect.isfunction(function):
        return []
    variables = inspect.getclosurevars(function).nonlocals
    return [(f"{variable!r} in the closure of {name}", value) for variable, value in variables.items()]


def own_attributes(value: Any, packages: set[str]) -> dict[str, Any]:
    """Return the attributes of plain data, and of objects of the plugin's own packages."""
    if isinstance(value, tuple):  # a named tuple
        return value._asdict() if hasattr(value, "_asdict") else {}
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    own = isinstance(value, SimpleNamespace) or type(value).__module__.partition(".")[0] in packages
    if not own:
        return {}
    slots = [name for cls in type(value).__mro__ for name in _names(vars(cls).get("__slots__", ()))]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(
        value, "__dict__", {}
    )


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    """Return the names of ``__slots__``, which may be a single one; not those that only Python uses."""
    return [name for name in ([slots] if isinstance(slots, str) else slots) if not name.startswith("__")]
