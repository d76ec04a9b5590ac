"""`Originals`: what a verdict depends on, to find what a plugin has replaced.

That is the functions and classes of graphpact, of the strict tape and of the suite, with the code that they
run; the constants and tables of their modules, such as rules, experiments and tolerances; and functions of
torch and Python that compare results and report them. A plugin that replaces one decides its own verdict.

Does not: see a change that is undone before the next comparison, or one deep in an object of a table.
"""

import builtins
import json
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

_PACKAGES = ("graphpact", "graphpact_conformance", "graphpact_tape")
_OTHERS: dict[Any, tuple[str, ...]] = {
    torch: (
        *("allclose", "cat", "clone", "equal", "eq", "full", "isclose", "isnan", "is_tensor", "ne", "tensor"),
        *("testing", "where", "zeros"),
    ),
    torch.testing: ("assert_close",),
    torch.Tensor: (
        *("__eq__", "__ne__", "__gt__", "__lt__", "__bool__", "__float__", "__int__", "__getitem__"),
        *(
            "all",
            "any",
            "abs",
            "argmax",
            "clone",
            "copy_",
            "cpu",
            "data_ptr",
            "double",
            "eq",
            "equal",
            "fill_",
        ),
        *("isnan", "item", "max", "nan_to_num", "ne", "nonzero", "sub", "to", "tolist", "view"),
    ),
    json: ("dumps", "loads", "JSONEncoder"),
    os: ("_exit", "write"),
    builtins: ("all", "any", "bool", "float", "isinstance", "len", "max", "min", "sorted", "zip"),
}


_DATA = (str, int, float, tuple, frozenset, dict, list, set)


class _Kept(NamedTuple):
    """A function, a class, a constant or a table: how it is found, and what it consisted of."""

    path: str
    find: Callable[[str], Any]
    name: str
    value: Any
    function: Any
    code: CodeType | None
    defaults: tuple[Any, ...] | None
    parts: tuple[Any, ...] | None


class Originals:
    """The functions, constants and tables of a process as they are now, before a plugin is imported."""

    def __init__(self) -> None:
        self._kept = [*_functions(), *_data()]

    def replaced(self) -> list[str]:
        """Return the names of those that are no longer the same, sorted; each is named once."""
        found = {at for at, kept in enumerate(self._kept) if _is_replaced(kept)}
        names = sorted({self._kept[at].path for at in found})
        if found:
            self._kept = [kept for at, kept in enumerate(self._kept) if at not in found]
        return names


def _is_replaced(kept: _Kept) -> bool:
    return (
        kept.find(kept.name) is not kept.value
        or getattr(kept.function, "__code__", None) is not kept.code
        or getattr(kept.function, "__defaults__", None) is not kept.defaults
        or (kept.parts is not None and not _are(kept.parts, _parts(kept.value)))
    )


def _are(kept: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Return whether both have the same objects: a plugin's own could be equal to anything."""
    return len(kept) == len(now) and all(map(operator.is_, kept, now))


def _functions() -> Iterator[_Kept]:
    for title, module in [*sys.modules.items()]:
        if title.partition(".")[0] in _PACKAGES and module is not None:
            yield from _members(title, vars(module))
            for owned in [*vars(module).values()]:
                if isinstance(owned, type) and owned.__module__ == title:
                    yield from _members(f"{title}.{owned.__qualname__}", vars(owned))
    for owner, names in _OTHERS.items():
        for name in names:
            title = owner.__name__ if isinstance(owner, ModuleType) else f"torch.{owner.__name__}"
            yield _keep(f"{title}.{name}", partial(getattr, owner), name)


def _data() -> Iterator[_Kept]:
    """Yield the constants and tables of our modules; what is in one that several share is kept once."""
    shared: set[int] = set()
    for title, module in [*sys.modules.items()]:
        if title.partition(".")[0] not in _PACKAGES or module is None:
            continue
        for name, value in [*vars(module).items()]:
            if isinstance(value, _DATA) and not name.startswith("__"):
                kept = _keep(f"{title}.{name}", vars(module).get, name)
                yield kept._replace(parts=None) if id(value) in shared else kept
                shared.add(id(value))


def _parts(value: Any) -> tuple[Any, ...]:
    """Return the objects in a table, with the fields of those that are dataclasses; none of other values."""
    if isinstance(value, dict):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, list | set | tuple | frozenset):
        inside = [*value]
    else:
        return ()
    own = [each for each in inside if is_dataclass(each) and not isinstance(each, type)]
    return (*inside, *(getattr(each, field.name) for each in own for field in fields(each)))


def _members(path: str, space: Mapping[str, Any]) -> Iterator[_Kept]:
    for name, value in [*space.items()]:
        if isinstance(_plain(value), FunctionType | BuiltinFunctionType | type | ModuleType):
            yield _keep(f"{path}.{name}", space.get, name)


def _keep(path: str, find: Callable[[str], Any], name: str) -> _Kept:
    value = find(name)
    function = _plain(value)
    code, defaults = getattr(function, "__code__", None), getattr(function, "__defaults__", None)
    return _Kept(path, find, name, value, function, code, defaults, _parts(value))


def _plain(value: Any) -> Any:
    """Return the function of a method, a static method or a property."""
    value = getattr(value, "__func__", value)
    return value.fget if isinstance(value, property) else value
