"""`Originals`: the functions that a verdict depends on, to find those that a plugin has replaced.

They are the functions and classes of graphpact, of the strict tape and of the suite, with the code that they
run, and functions of torch and Python that compare results and report them. A plugin that replaces one
decides its own verdict.

Does not: hold data, such as tables of the suite, or see a change that is undone before the next comparison.
"""

import builtins
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
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


class _Kept(NamedTuple):
    """A function or a class: how it is found, and what it consisted of."""

    path: str
    find: Callable[[str], Any]
    name: str
    value: Any
    function: Any
    code: CodeType | None
    defaults: tuple[Any, ...] | None


class Originals:
    """The functions of a process as they are now, before a plugin is imported."""

    def __init__(self) -> None:
        self._kept = list(_functions())

    def replaced(self) -> list[str]:
        """Return the names of functions that are no longer the same, sorted; each is named once."""
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
    )


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


def _members(path: str, space: Mapping[str, Any]) -> Iterator[_Kept]:
    for name, value in [*space.items()]:
        if isinstance(_plain(value), FunctionType | BuiltinFunctionType | type | ModuleType):
            yield _keep(f"{path}.{name}", space.get, name)


def _keep(path: str, find: Callable[[str], Any], name: str) -> _Kept:
    value = find(name)
    function = _plain(value)
    code, defaults = getattr(function, "__code__", None), getattr(function, "__defaults__", None)
    return _Kept(path, find, name, value, function, code, defaults)


def _plain(value: Any) -> Any:
    """Return the function of a method, a static method or a property."""
    value = getattr(value, "__func__", value)
    return value.fget if isinstance(value, property) else value
