"""Host values that a plugin keeps from step to step: `host_state` copies them, `restore` writes them back.

They are the attributes of objects and of their classes: numbers, texts, containers of them, and which tensor
an attribute is. What belongs to the lane (context, driver, registry, slots) is left out.

Does not: know what an attribute is for; an experiment shows whether a result depends on it.
"""

import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from graphpact.plugin_calls import short_path
from graphpact.tensors import storage_id
from graphpact_conformance.lane.holders import own_attributes

_OF_LANE = frozenset({"context", "driver", "_registry", "_workspaces", "records_metadata", "passed_over"})
"""Attributes that the lane and the base class set."""
_MISSING = object()
_KINDS: tuple[Any, ...] = (dict, (list, deque), set)  # of containers: one may be refilled from another
_CONTAINERS = (dict, list, set, deque)
_DEPTH = 4
"""How deep objects of the plugin are searched for attributes."""


class Kept(NamedTuple):
    """One attribute.

    Args:
        owner: The object that has it, itself or by its class.
        name: Its name there.
        value: A copy of its value, with the same tensors and objects.
        key: What is compared: equal for equal host values, and for the same tensors and objects.
    """

    owner: Any
    name: str
    value: Any
    key: object


def host_state(*owners: object) -> dict[str, Kept]:
    """Return the attributes of objects, of their own objects, and of the classes of the first, by name."""
    packages = _packages_of(*owners)
    found: dict[str, Kept] = {}
    todo: deque[tuple[str, Any, int]] = deque((type(each).__name__, each, 0) for each in owners)
    seen: set[int] = set()
    while todo:
        prefix, owner, depth = todo.popleft()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        values = own_attributes(owner, packages) if depth else _of_classes(owner, packages) | vars(owner)
        for name, value in [*values.items()]:
            if name in _OF_LANE:
                continue
            found[f"{prefix}.{name}"] = Kept(owner, name, _copy(value), _key(value))
            if depth < _DEPTH and own_attributes(value, packages):
                todo.append((f"{prefix}.{name}", value, depth + 1))
    return found


def _packages_of(*owners: object) -> set[str]:
    """Return the packages of the plugin in which the classes of objects are defined."""
    packages = {cls.__module__.partition(".")[0] for each in owners for cls in type(each).__mro__}
    return packages - {"graphpact", "torch", "builtins", "abc", "typing"}


def _of_classes(owner: object, packages: set[str]) -> dict[str, Any]:
    """Return the attributes of the classes of an object that are no code."""
    classes = [cls for cls in type(owner).__mro__[::-1] if cls.__module__.partition(".")[0] in packages]
    return {n: value for cls in classes for n, value in vars(cls).items() if not _is_code(n, value)}


def class_containers(*owners: object) -> dict[str, Any]:
    """Return the mutable containers with contents that objects share with others of their class, by name."""
    packages = _packages_of(*owners)
    return {
        f"{type(each).__name__}.{name}": value
        for each in owners
        for name, value in _of_classes(each, packages).items()
        if isinstance(value, _CONTAINERS) and value and name not in vars(each)
    }


def changed(before: Mapping[str, Kept], after: Mapping[str, Kept]) -> list[str]:
    """Return the names of attributes that were set, changed or deleted between two looks."""
    names = dict.fromkeys((*before, *after))
    return [n for n in names if n not in before or n not in after or before[n].key != after[n].key]


def restore(name: str, state: Mapping[str, Kept], now: Mapping[str, Kept]) -> None:
    """Write an attribute of an object back, in place if it is a container; delete it if it was not there.

    Args:
        name: Its name.
        state: The state with the value to restore.
        now: The present state.
    """
    kept = state.get(name)
    if kept is None:
        delattr(now[name].owner, now[name].name)
        return
    present = getattr(kept.owner, kept.name, _MISSING)
    if any(isinstance(present, kind) and isinstance(kept.value, kind) for kind in _KINDS):
        _refill(present, kept.value)
    else:
        setattr(kept.owner, kept.name, kept.value)


@contextmanager
def emptied(container: Any) -> Iterator[None]:
    """Empty a dict, list, set or deque inside the context."""
    kept = _copy(container)
    container.clear()
    try:
        yield
    finally:
        _refill(container, kept)


def _refill(container: Any, contents: Any) -> None:
    """Replace the contents of a container, in place."""
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(contents)


@contextmanager
def lines_of_writes(*owners: object) -> Iterator[dict[str, str]]:
    """Yield the lines that set attributes of objects in this context, by name, such as ``MyBackend.turn``."""
    lines: dict[str, str] = {}

    def traced(cls: type[Any]) -> Any:
        right: Any = cls.__setattr__

        def setattr_(self: Any, name: str, value: Any) -> None:
            frame = sys._getframe(1)  # noqa: SLF001  the way of the standard library too
            code = frame.f_code
            lines[f"{cls.__name__}.{name}"] = (
                f"{short_path(code.co_filename)}:{frame.f_lineno} in {code.co_qualname}"
            )
            right(self, name, value)

        return setattr_

    with ExitStack() as stack:
        for cls in {type(each) for each in owners}:
            stack.enter_context(patch.object(cls, "__setattr__", traced(cls)))
        yield lines


def shown(kept: Kept | None) -> str:
    """Return the value of an attribute for a text, without contents of tensors."""
    if kept is None:
        return "not set"
    value = kept.value
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)}"
    if isinstance(value, (list, tuple, dict, set, deque)) and len(value) > _MOST_SHOWN:
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value) if isinstance(value, _PLAIN) else f"an object of {type(value).__name__}"


_MOST_SHOWN = 4
_PLAIN = (bool, int, float, str, bytes, type(None), list, tuple, dict, set, deque)


def _is_code(name: str, value: Any) -> bool:
    is_code = inspect.isroutine(value) or inspect.isdatadescriptor(value) or isinstance(value, type)
    return name.startswith(("__", "_abc_")) or is_code


def _copy(value: Any) -> Any:
    """Return a copy of containers of a value, with the same tensors and objects inside."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in [*value.items()]}
    if type(value) is tuple:
        return tuple(map(_copy, value))
    for kind in (list, set, deque):  # of subclasses only the contents: their constructors may take anything
        if isinstance(value, kind):
            return kind(map(_copy, [*value]))
    return value


def _key(value: Any) -> object:
    """Return what is compared of a value."""
    if isinstance(value, torch.Tensor):
        return "tensor", storage_id(value), value.storage_offset(), tuple(value.shape)
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return type(value), value
    if isinstance(value, dict):
        return dict, tuple((_key(key), _key(item)) for key, item in [*value.items()])
    if isinstance(value, (list, tuple, deque)):
        return type(value), tuple(map(_key, [*value]))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_key, value))
    return "object", id(value)
