"""The pact: what a capture promised, and the check that a replay keeps it.

A pact is a walk over the view and the metadata of one captured shape. For a tensor it holds address,
shape, stride, dtype and device; for a host number its value; for every object its exact type and
fields. `Pact.check` holds a replay to it: by comparisons that were compiled at capture, since it runs
in every step, and where one fails by the same walk again, which finds the field to name.

Equal addresses are necessary and not sufficient: what the tensors hold is not looked at here.
Does not: read any tensor's contents, so it never waits for a device.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.errors import PactBreach
from graphpact.shapes import GraphShape


class _Same:
    """An object that is compared by identity: the graph holds its state and no other's."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"the {type(self.value).__name__} at {id(self.value):#x}"


def _field_names(value: Any, *, root: bool) -> list[str] | None:
    """Return the attributes that are the fields of ``value``, or None where it has none.

    Metadata of a plain class, at a root of the walk, has its attributes for fields.
    """
    if isinstance(value, (type, torch.Tensor, enum.Enum)):
        return None
    if dataclasses.is_dataclass(value):
        return [f.name for f in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value._fields)
    if root and hasattr(value, "__dict__") and not isinstance(value, Mapping):
        return list(vars(value))
    return None


def _children(value: Any, *, root: bool = False) -> list[tuple[str, Any]] | None:
    """Return the named parts of a container, or None for a leaf."""
    names = _field_names(value, root=root)
    if names is not None:
        return [(f".{name}", getattr(value, name)) for name in names]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    return None


def _promise(value: Any) -> Any:
    """Return what a leaf promises, comparable by ``==``."""
    if isinstance(value, torch.Tensor):
        return (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, float) and value != value:  # noqa: PLR0124  NaN promises NaN
        return "nan"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, enum.Enum)):
        return value
    if isinstance(value, (torch.dtype, torch.device, torch.Size, type)):
        return value
    return _Same(value)


def _compile(value: Any, *, root: bool = False) -> Callable[[Any], bool]:
    """Return a function that tells whether another value promises all that ``value`` does."""
    kind = type(value)
    children = _children(value, root=root)
    if children is None:
        promise = _promise(value)
        if not isinstance(value, torch.Tensor):
            return lambda now: type(now) is kind and _promise(now) == promise
        address, shape, stride, dtype, device = promise
        return lambda now: (
            type(now) is kind
            and now.data_ptr() == address
            and now.shape == shape
            and now.stride() == stride
            and now.dtype is dtype
            and now.device == device
        )
    checks = [_compile(child) for _, child in children]
    names = _field_names(value, root=root)
    if names is not None:
        named = list(zip(names, checks, strict=True))
        by_type = _field_names(value, root=False) is not None  # else one may have come or gone
        return lambda now: (
            type(now) is kind
            and (by_type or list(vars(now)) == names)
            and all(check(getattr(now, name)) for name, check in named)
        )
    keys = list(value) if isinstance(value, Mapping) else None

    def same_items(now: Any) -> bool:
        if type(now) is not kind or len(now) != len(checks):
            return False
        if keys is not None and list(now) != keys:
            return False
        items = now if keys is None else now.values()
        return all(check(item) for check, item in zip(checks, items, strict=True))

    return same_items


_TENSOR_RULES = ("address", "shape", "stride", "dtype", "device")


@dataclasses.dataclass(frozen=True, slots=True)
class Promise:
    """One leaf of a pact: where it is, what was captured, and whose memory it is."""

    path: str
    type: type
    value: Any
    owner: str | None


class Pact:
    """What one captured shape promised.

    Args:
        shape: The captured shape.
        promises: Every leaf of view and metadata, in the order of the walk.
        checks: A comparison for each root of the walk.
    """

    def __init__(
        self,
        shape: GraphShape,
        promises: list[Promise],
        checks: Mapping[str, Callable[[Any], bool]],
    ) -> None:
        self.shape = shape
        self.promises = promises
        self._checks = checks

    @classmethod
    def of(
        cls, shape: GraphShape, registry: CudaGraphBufferRegistry | None = None, **parts: Any
    ) -> "Pact":
        """Walk the named ``parts`` (``view=..., metadata=...``) and keep what they promise.

        Args:
            shape: The captured shape.
            registry: Where given, breaches name the slot and the owner of a tensor.
            parts: The roots of the walk.
        """
        promises = []
        for path, value in _walk(parts):
            slot = None
            if registry is not None and isinstance(value, torch.Tensor):
                slot = registry.slot_of(value)
            promises.append(
                Promise(path, type(value), _promise(value), slot.label if slot else None)
            )
        return cls(shape, promises, {n: _compile(part, root=True) for n, part in parts.items()})

    def check(self, **parts: Any) -> None:
        """Hold the same named ``parts`` of a replay to the pact.

        Raises:
            PactBreach: At the first difference: which field, what was captured, what is there now,
                whose it is, and what to do.
        """
        checks = self._checks
        if parts.keys() == checks.keys() and all(checks[name](parts[name]) for name in checks):
            return
        self._name_the_breach(parts)

    def _name_the_breach(self, parts: dict[str, Any]) -> None:
        promises = self.promises
        for at, (path, value) in enumerate(_walk(parts)):
            if at == len(promises) or promises[at].path != path:
                self._breach_of_structure(parts)
            promise = promises[at]
            if type(value) is not promise.type or _promise(value) != promise.value:
                self._breach(promise, value)
        self._breach_of_structure(parts)

    def _breach_of_structure(self, parts: dict[str, Any]) -> None:
        captured = {p.path for p in self.promises}
        now = {path for path, _ in _walk(parts)}
        lost, new = sorted(captured - now), sorted(now - captured)
        what = f"missing {lost or 'none'}, new {new or 'none'}" if lost or new else "another order"
        raise PactBreach(
            f"{self.shape}: replay has other fields than capture: {what}",
            hint="return the captured metadata object, refreshed in place, with the same fields",
        )

    def _breach(self, promise: Promise, value: Any) -> None:
        whose = f" ({promise.owner})" if promise.owner else ""
        what = f"{self.shape}: {promise.path}{whose}"
        if type(value) is not promise.type:
            raise PactBreach(
                f"{what}: captured {promise.type.__name__}, got {type(value).__name__}",
                hint="the graph was recorded with the captured type; refresh it in place",
            )
        now = _promise(value)
        if isinstance(value, torch.Tensor):
            for rule, a, b in zip(_TENSOR_RULES, promise.value, now, strict=True):
                if a != b:
                    raise PactBreach(
                        f"{what}: {rule} captured {_show(rule, a)}, got {_show(rule, b)}",
                        hint="copy into the captured tensor instead of making a new one",
                    )
        raise PactBreach(
            f"{what}: captured {promise.value!r}, got {now!r}",
            hint="a host number is frozen into the graph: keep it constant for the shape, or put it"
            " in a tensor",
        )


def _show(rule: str, value: Any) -> str:
    return hex(value) if rule == "address" else str(value)


def _walk(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every leaf under ``parts`` with its path, and every container as a leaf of its type."""
    for name, root in parts.items():
        yield from _walk_value(name, root, root=True)


def _walk_value(path: str, value: Any, *, root: bool = False) -> Iterator[tuple[str, Any]]:
    children = _children(value, root=root)
    if children is None:
        yield path, value
        return
    yield f"{path}: type", type(value)
    for name, child in children:
        yield from _walk_value(path + name, child)
