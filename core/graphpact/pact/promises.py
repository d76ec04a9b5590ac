"""`Promise`: what a capture promises about one container or leaf; `promise_of` makes a tree of promises.

    bounded()    a field whose number may be smaller at replay
    updated()    a field whose value each replay passes to tasks by an update
    Terms        what is promised about objects whose classes declare nothing

Does not: compare a replay; `graphpact.pact.checks` does.
"""

import dataclasses
import enum
import numbers
import operator
import reprlib
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.errors import EngineError
from graphpact.pact.walk import Form, attributes_of, parts_of

_BOUNDED = "graphpact.bounded"  # key in a dataclass field's metadata
_UPDATED = "graphpact.updated"
ANY = object()
"""The promised value of a leaf if only its type is promised."""
BY_VALUE = (numbers.Number, str, bytes, range, slice, torch.device)
"""Types of host values that are compared by value; objects of other types are compared by identity."""


def bounded(**field_kwargs: Any) -> Any:
    """Return a dataclass field for a host number whose replayed value may be smaller than the captured one.

    Use it for limits of recorded kernels: ``max_kv_len: int = bounded()``. The field is an int or a float, or
    a list or tuple of them with constant length; None, a bool or NaN is refused at capture. Type checkers
    treat ``bounded()`` as a default: place such fields last, or make the dataclass ``kw_only``.

    Args:
        field_kwargs: Arguments of `dataclasses.field`: ``default``, ``kw_only``, ``metadata``.
    """
    return _marked(_BOUNDED, field_kwargs)


def updated(**field_kwargs: Any) -> Any:
    """Return a dataclass field for arguments of tasks, of which only the type is promised.

    Each replay updates the tasks with the value of its step; see `graphpact.graphs.GraphDriver.task`.
    """
    return _marked(_UPDATED, field_kwargs)


def _marked(mark: str, field_kwargs: dict[str, Any]) -> Any:
    metadata = {**(field_kwargs.pop("metadata", None) or {}), mark: True}
    return dataclasses.field(metadata=metadata, **field_kwargs)


class TensorFacts(NamedTuple):
    """The promised ``address``, ``shape``, ``stride`` (in elements), ``dtype`` and ``device`` of a tensor."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorFacts":
        """Return the properties of ``tensor``."""
        return cls(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is promised about parts whose classes declare nothing, such as those of another engine.

    Args:
        only: The paths of the attributes that are promised; None for all. Others may come and go.
        limits: Names of fields whose number may be smaller at replay, as if declared `bounded`.
        shorter_views: Whether a replayed tensor may be a shorter view of the captured memory. A graph reads
            the captured extent in any case.
    """

    only: Collection[str] | None = None
    limits: Collection[str] = ()
    shorter_views: bool = False

    def below(self, part: Any) -> "Terms":
        """Return the terms for ``part``, of which all is promised unless it has attributes."""
        if self.only is None or attributes_of(part, root=False) is not None:
            return self
        return dataclasses.replace(self, only=None)


STRICT_TERMS = Terms()
"""The terms of a lane: everything is promised, as the classes declare it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Promise:
    """The promise about one container or leaf at ``path``: its exact ``type``, and its value or parts.

    Args:
        value: The `TensorFacts` or the host value of a leaf, `ANY` if it may change; None for a container.
        owner: Label of the slot whose memory contains the tensor, or None.
        offset: Bytes from the start of that slot's buffer to the tensor.
        bounded: Whether a replay may have a smaller number.
        form: The form of a container; None for a leaf.
        parts: The promises of a container's parts.
        is_open: Whether other parts may come and go.
        may_be_shorter: Whether a replayed tensor may be a shorter view.
    """

    path: str
    type: type
    value: Any = None
    owner: str | None = None
    offset: int | None = None
    bounded: bool = False
    form: Form | None = None
    parts: Mapping[Hashable, "Promise"] = dataclasses.field(default_factory=dict)
    is_open: bool = False
    may_be_shorter: bool = False

    def __iter__(self) -> Iterator["Promise"]:
        yield self
        for part in self.parts.values():
            yield from part


def promise_of(
    path: str,
    value: Any,
    shape: object,
    registry: CudaGraphBufferRegistry | None,
    *,
    terms: Terms = STRICT_TERMS,
    root: bool = False,
    is_bounded: bool = False,
    form_only: bool = False,
) -> Promise:
    """Return the promises of ``value`` and its parts."""
    kind: Any = type(value)
    if form_only and ((parts := parts_of(value, root=root)) is None or parts.form == "items"):
        return Promise(path, kind, ANY)
    if is_bounded:
        _require_numbers(path, value, shape)
    if isinstance(value, torch.Tensor):
        slot = None if registry is None else registry.slot_of(value)
        if slot is None or slot.buffer is None:
            return Promise(path, kind, TensorFacts.of(value), may_be_shorter=terms.shorter_views)
        offset = value.data_ptr() - slot.buffer.data_ptr()
        return Promise(path, kind, TensorFacts.of(value), slot.label, offset)
    parts = parts_of(value, root=root)
    if parts is None:
        return Promise(path, kind, value, bounded=is_bounded)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    marks: dict[Hashable, Mapping[str, Any]] = {field.name: field.metadata for field in fields}
    promises = {}
    for key, item in parts.items.items():
        mark, at = marks.get(key, {}), parts.path(path, key)
        if terms.only is not None and at not in terms.only:
            continue
        is_limit = key in terms.limits and isinstance(item, (int, float)) and not isinstance(item, bool)
        limit, form = is_bounded or is_limit or _BOUNDED in mark, form_only or _UPDATED in mark
        promises[key] = promise_of(
            at, item, shape, registry, terms=terms.below(item), is_bounded=limit, form_only=form
        )
    return Promise(path, kind, form=parts.form, parts=promises, is_open=terms.only is not None)


def _require_numbers(path: str, value: Any, shape: object) -> None:
    """Raise `EngineError` unless a bounded field is a number, or a list or tuple of numbers."""
    of_items = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
    for number in value if of_items else (value,):
        is_number = isinstance(number, (int, float)) and not isinstance(number, (bool, enum.Enum))
        if not is_number or number != number:  # noqa: PLR0124  NaN
            raise EngineError(
                f"{shape}: {path} is declared bounded() and is {show_value(value)} at capture; it must be a"
                " number, or a list or tuple of numbers",
                hint="set it to the largest number that a replay may have, or leave out bounded()",
            )


def is_within(shape: torch.Size, captured: torch.Size) -> bool:
    """Return whether a view of ``shape`` is a part of one of the ``captured`` shape and equal strides."""
    return len(shape) == len(captured) and all(map(operator.le, shape, captured))


def show_value(value: Any) -> str:
    """Return a host value as one short line for a message; opaque objects show type and identity."""
    if isinstance(value, type):
        return type_name(value)
    if isinstance(value, torch.Size):
        return str(tuple(value))
    if isinstance(value, (torch.Tensor, list, tuple)) or not is_readable(value):
        return f"the {type(value).__name__} at {id(value):#x}"
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    return short.repr(value)


def is_readable(value: Any) -> bool:
    """Return whether a host value has a readable ``repr``; other values are compared by identity."""
    return isinstance(value, (*BY_VALUE, enum.Enum, torch.dtype, type(None)))


def type_name(kind: type) -> str:
    """Return the name of a type with its module, which is left out for builtins."""
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"
