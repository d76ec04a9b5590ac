"""`walk`: the leaves of static inputs and metadata, each with its path.

Containers are dataclasses, named tuples, mappings, lists, tuples, and roots that are plain objects.
Everything else is a leaf.

Does not: know what is promised about a leaf.
"""

import dataclasses
import enum
import functools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

_LEAVES = frozenset({torch.Tensor, int, float, bool, str, type(None)})  # most are of these

Form = Literal["fields", "keys", "items"]


class Parts(NamedTuple):
    """The parts of a container.

    Args:
        form: Whether the parts are attributes, values of a mapping, or items of a list or tuple.
        items: The parts by attribute name, by key, or by index.
    """

    form: Form
    items: dict[Hashable, Any]

    def path(self, path: str, key: Hashable) -> str:
        """Return the path of a part; ``path`` is the path of the container."""
        return f"{path}.{key}" if self.form == "fields" else f"{path}[{key!r}]"


def walk(parts: Mapping[str, Any], *, without: Sequence[object] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every leaf under ``parts`` with its path, such as ``metadata.kv_indptr``.

    ``parts`` are the roots by name. Containers are dataclasses, named tuples, mappings, lists, tuples, and
    roots that are plain objects; everything else is a leaf. Empty containers and the objects in ``without``
    yield nothing.
    """
    out = {id(each) for each in without}
    for name, root in parts.items():
        yield from _walk(name, root, out, root=True)


def _walk(path: str, value: Any, out: Collection[int], *, root: bool = False) -> Iterator[tuple[str, Any]]:
    if id(value) in out:
        return
    parts = parts_of(value, root=root)
    if parts is None:
        yield path, value
        return
    for key, item in parts.items.items():
        if type(item) in _LEAVES and not out:
            yield parts.path(path, key), item
        else:
            yield from _walk(parts.path(path, key), item, out)


def parts_of(value: Any, *, root: bool = False) -> Parts | None:
    """Return the parts of a container, or None for a leaf."""
    if type(value) in _LEAVES:
        return None
    names = attributes_of(value, root=root)
    if names is not None:
        return Parts("fields", {name: getattr(value, name) for name in names})
    if isinstance(value, Mapping):
        return Parts("keys", dict(value))
    if isinstance(value, (list, tuple)):
        return Parts("items", dict(enumerate(value)))
    return None


def attributes_of(value: Any, *, root: bool) -> list[str] | None:
    """Return the names of the fields of ``value`` that are set, or None if it has no fields.

    If a root of the walk is an object of a plain class, its fields are its attributes.
    """
    kind: Any = type(value)
    if isinstance(value, (type, torch.Tensor, enum.Enum)):
        return None
    declared = declared_fields(kind)
    if declared is not None:
        return [name for name in declared if hasattr(value, name)]
    if not root or kind.__module__ == "builtins" or isinstance(value, (Mapping, list, tuple)):
        return None
    slots = [name for name in _slot_names(kind) if hasattr(value, name)]
    return [*slots, *vars(value)] if hasattr(value, "__dict__") else slots or None


@functools.lru_cache
def declared_fields(kind: Any) -> Sequence[str] | None:
    """Return the fields of a dataclass or a named tuple, or None for another type."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return getattr(kind, "_fields", None) if issubclass(kind, tuple) else None


def _slot_names(kind: type) -> Iterator[str]:
    """Yield the attribute names in ``__slots__`` of a class and its bases, with private names mangled."""
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name.startswith("__") and not name.endswith("__"):
                yield f"_{base.__name__.lstrip('_')}{name}"
            elif name not in ("__dict__", "__weakref__"):
                yield name
