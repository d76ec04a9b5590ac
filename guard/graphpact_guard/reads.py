"""`ReadWatch`: which attributes of an engine's objects a region reads while it is captured.

What a captured region reads is frozen into its graph: the address of a tensor, the value of a number. What it
does not read may change from replay to replay. Engines do not declare the difference, so the guard watches.

Does not: see reads through other references, such as a tensor that a closure holds.
"""

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from graphpact.pact.walk import attributes_of, declared_fields


class ReadWatch:
    """Notes the paths of attributes that are read, such as ``Backend.forward_metadata.kv_indptr``.

    During the watch, each object has a subclass of its class that notes reads. If the class of a followed
    object cannot be changed, a proxy replaces it. All of a named tuple counts as read. Dataclasses that are
    read are watched too.

    Args:
        roots: The objects by name.
        follow: Names of attributes whose objects are watched too, whatever their class.

    Attributes:
        paths: The paths that were read.
        is_paused: Whether nothing is noted now, as in an eager call of the region.
    """

    def __init__(self, roots: Mapping[str, object], follow: Collection[str] = ()) -> None:
        self.paths: set[str] = set()
        self._roots = roots
        self._follow = follow
        self._watched: dict[int, tuple[Any, str, type]] = {}
        self._replaced: list[tuple[Any, str, _Proxy]] = []
        self.is_paused = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during the context.

        What the roots hold at its beginning is watched at once, because a region may read it through another
        reference, such as a table of metadata by layer.
        """
        for path, root in self._roots.items():
            held = {name: getattr(root, name, None) for name in self._follow}
            self._watch(path, root)
            for name, value in held.items():
                if value is not None and id(value) not in self._watched:
                    self._watch(f"{path}.{name}", value, (root, name))
        try:
            yield
        finally:
            for holder, name, proxy in self._replaced:
                if getattr(holder, name) is proxy:
                    setattr(holder, name, proxy._graphpact)  # noqa: SLF001
            self._replaced.clear()
            for watched, _, kind in self._watched.values():
                watched.__class__ = kind
                _NOTED.pop(id(watched), None)
            self._watched.clear()

    def _watch(self, path: str, value: Any, holder: tuple[Any, str] | None = None) -> Any:
        """Watch an object, which is the attribute of ``holder`` if that is given; return what readers get."""
        kind: Any = type(value)
        try:
            value.__class__ = _noting(kind)
        except TypeError:
            if holder is not None and not isinstance(value, tuple):
                return self._replace(path, value, *holder)
            self.paths |= {f"{path}.{name}" for name in attributes_of(value, root=True) or ()}
            return value
        self._watched[id(value)] = value, path, kind
        _NOTED[id(value)] = self
        return value

    def _replace(self, path: str, value: Any, holder: Any, name: str) -> "_Proxy":
        """Put a proxy in the place of an object whose class cannot be changed, such as a namespace."""
        proxy = _Proxy(value, path, self)
        setattr(holder, name, proxy)
        self._replaced.append((holder, name, proxy))
        return proxy

    def note(self, owner: object, name: str, value: Any) -> Any:
        """Note that ``owner.name`` was read and gave ``value``; return what the reader gets."""
        if self.is_paused:
            return value
        path = f"{self._watched[id(owner)][1]}.{name}"
        self.paths.add(path)
        if id(value) in self._watched or value is None or isinstance(value, _Proxy):
            return value
        if name in self._follow:
            return self._watch(path, value, (owner, name))
        kind: Any = type(value)
        return value if declared_fields(kind) is None else self._watch(path, value)


class _Proxy:
    """Stands in for an object of a class that cannot be changed, and notes reads of its attributes."""

    def __init__(self, value: Any, path: str, watch: ReadWatch) -> None:
        object.__setattr__(self, "_graphpact", (value, path, watch))

    def __getattribute__(self, name: str) -> Any:
        value, path, watch = object.__getattribute__(self, "_graphpact")
        if name == "_graphpact":
            return value
        if not name.startswith("__") and not watch.is_paused:
            watch.paths.add(f"{path}.{name}")
        return getattr(value, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_graphpact")[0], name, value)


_NOTED: dict[int, ReadWatch] = {}
"""The watch of each watched object, by its id."""


@functools.lru_cache(maxsize=256)
def _noting(kind: Any) -> Any:
    """Return a subclass of ``kind``, equal in all but that it notes reads of attributes."""

    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        value = kind.__getattribute__(self, name)
        if not name.startswith("__"):
            watch = _NOTED.get(id(self))
            if watch is not None:
                return watch.note(self, name, value)
        return value

    body = {
        "__slots__": (),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__getattribute__": __getattribute__,
    }
    return type(kind)(kind.__name__, (kind,), body)
