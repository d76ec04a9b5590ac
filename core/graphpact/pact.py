"""The pact: the promises of a capture, and the check that a replay keeps them.

A pact records a walk over the view and the metadata of one captured shape: address, shape, stride, dtype and
device of tensors; values of host numbers, or the maximum for `bounded` fields; exact types and fields of
objects. `Pact.check` runs in every step, so it is one expression that is compiled at capture. If it is False,
the walk is repeated and finds every field that differs.

Does not: read the contents of tensors, so it never waits for a device, and equal addresses do not prove equal
contents; or outlive its process (`graphpact_engine.saved_pacts` does).
"""

import dataclasses
import enum
import functools
import keyword
import numbers
import reprlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, Literal, NamedTuple

import torch

from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.errors import BREACHES, Breach, BreachKind, EngineError, PactBreach
from graphpact.shapes import GraphShape

_BOUNDED = "graphpact.bounded"  # key in a dataclass field's metadata
_UPDATED = "graphpact.updated"
_MAX_ROWS = 12  # of the table of breaches
ANY = object()
"""The promised value of a leaf of which only the type is promised."""
_LEAVES = frozenset({torch.Tensor, int, float, bool, str, type(None)})  # most are of these
_TENSOR_RULES: tuple[BreachKind, ...] = ("address", "shape", "stride", "dtype", "device")


def bounded(**field_kwargs: Any) -> Any:
    """Return a dataclass field for a host number whose replayed value may be smaller than the captured one.

    It is for limits of recorded kernels: ``max_kv_len: int = bounded()``. The field is an int or a float, or
    a list or tuple of them with constant length; None, a bool or NaN is refused at capture. Type checkers
    treat ``bounded()`` as a default: place such fields last, or make the dataclass ``kw_only``.

    Args:
        field_kwargs: Arguments of `dataclasses.field`: ``default``, ``kw_only``, ``metadata``.
    """
    return _marked(_BOUNDED, field_kwargs)


def updated(**field_kwargs: Any) -> Any:
    """Return a dataclass field, as `bounded` does, for arguments of tasks: only its type is promised.

    Each replay updates the tasks by its own value: see `graphpact.graphs.GraphDriver.task`.
    """
    return _marked(_UPDATED, field_kwargs)


def _marked(mark: str, field_kwargs: dict[str, Any]) -> Any:
    metadata = {**(field_kwargs.pop("metadata", None) or {}), mark: True}
    return dataclasses.field(metadata=metadata, **field_kwargs)


# -- the walk ------------------------------------------------------------------------------------------

_Form = Literal["fields", "keys", "items"]


class _Parts(NamedTuple):
    """The parts of a container: attributes by name, values by key, or items by index."""

    form: _Form
    items: dict[Hashable, Any]

    def path(self, path: str, key: Hashable) -> str:
        """Return the path of a part; ``path`` is the container's."""
        return f"{path}.{key}" if self.form == "fields" else f"{path}[{key!r}]"


def walk(parts: Mapping[str, Any], *, without: Sequence[object] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every leaf under ``parts``, the roots by name, with its path, such as ``metadata.kv_indptr``.

    Containers are dataclasses, named tuples, mappings, lists, tuples, and plain objects that are themselves
    roots; everything else is a leaf. An empty container yields nothing, nor do the objects ``without``.
    """
    out = {id(each) for each in without}
    for name, root in parts.items():
        yield from _walk(name, root, out, root=True)


def _walk(path: str, value: Any, out: Collection[int], *, root: bool = False) -> Iterator[tuple[str, Any]]:
    if id(value) in out:
        return
    parts = _parts(value, root=root)
    if parts is None:
        yield path, value
        return
    for key, item in parts.items.items():
        yield from _walk(parts.path(path, key), item, out)


def _parts(value: Any, *, root: bool = False) -> _Parts | None:
    """Return the parts of a container, or None for a leaf."""
    if type(value) in _LEAVES:
        return None
    names = _attributes(value, root=root)
    if names is not None:
        return _Parts("fields", {name: getattr(value, name) for name in names})
    if isinstance(value, Mapping):
        return _Parts("keys", dict(value))
    if isinstance(value, (list, tuple)):
        return _Parts("items", dict(enumerate(value)))
    return None


def _attributes(value: Any, *, root: bool) -> list[str] | None:
    """Return the names of the fields of ``value`` that are set, or None if it has no fields.

    The fields of an object of a plain class, at a root of the walk, are its attributes.
    """
    kind: Any = type(value)
    if isinstance(value, (type, torch.Tensor, enum.Enum)):
        return None
    declared = _declared_fields(kind)
    if declared is not None:
        return [name for name in declared if hasattr(value, name)]
    if not root or kind.__module__ == "builtins" or isinstance(value, (Mapping, list, tuple)):
        return None
    slots = [name for name in _slot_names(kind) if hasattr(value, name)]
    return [*slots, *vars(value)] if hasattr(value, "__dict__") else slots or None


@functools.lru_cache
def _declared_fields(kind: Any) -> Sequence[str] | None:
    """Return the fields of a dataclass or a named tuple, or None for another type."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return getattr(kind, "_fields", None) if issubclass(kind, tuple) else None


def _slot_names(kind: type) -> Iterator[str]:
    """Yield the attribute names in ``__slots__`` of a class and its bases, private ones mangled."""
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name.startswith("__") and not name.endswith("__"):
                yield f"_{base.__name__.lstrip('_')}{name}"
            elif name not in ("__dict__", "__weakref__"):
                yield name


# -- promises ------------------------------------------------------------------------------------------


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


@dataclasses.dataclass(frozen=True, slots=True)
class Promise:
    """The promise of the exact ``type`` of a container or a leaf at ``path``: a node of the walked tree.

    Args:
        value: The `TensorFacts` or the host value of a leaf, `ANY` if it may change; None for a container.
        owner: Label of the slot in whose memory a tensor lies, or None.
        offset: Bytes from the start of that slot's buffer to the tensor.
        bounded: Whether a replay may have a smaller number.
        form: The form of a container; None for a leaf.
        parts: The promises of a container's parts.
    """

    path: str
    type: type
    value: Any = None
    owner: str | None = None
    offset: int | None = None
    bounded: bool = False
    form: _Form | None = None
    parts: Mapping[Hashable, "Promise"] = dataclasses.field(default_factory=dict)

    def __iter__(self) -> Iterator["Promise"]:
        yield self
        for part in self.parts.values():
            yield from part


class Pact:
    """The promises of one captured shape; `of` makes it of the parts of a capture."""

    def __init__(
        self, shape: GraphShape, roots: Mapping[str, Promise], registry: CudaGraphBufferRegistry | None = None
    ) -> None:
        self.shape = shape
        self._roots = roots
        self._registry = registry
        self._holds = _compile(roots)

    @classmethod
    def of(
        cls,
        shape: GraphShape,
        registry: CudaGraphBufferRegistry | None = None,
        forms: Collection[str] = (),
        **parts: Any,
    ) -> "Pact":
        """Return the pact of the captured ``shape`` and its named ``parts``: ``view=..., metadata=...``.

        With its ``registry``, promises and breaches name the slot and the owner of a tensor. Of the parts in
        ``forms``, which no graph reads, only types and fields are promised, and lists are leaves.

        Raises:
            EngineError: A `bounded` field is no number and no list or tuple of numbers.
        """
        roots = {
            name: _promise(name, part, shape, registry, root=True, form_only=name in forms)
            for name, part in parts.items()
        }
        return cls(shape, roots, registry)

    @property
    def promises(self) -> list[Promise]:
        """Every container and every leaf, in the order of the walk."""
        return [promise for root in self._roots.values() for promise in root]

    def check(self, **parts: Any) -> None:
        """Check the same named ``parts`` of a replay.

        Raises:
            PactBreach: They differ. It has every difference with field, both values, owner and advice.
        """
        try:
            if self._holds(parts):
                return
        except (AttributeError, LookupError):  # a captured part is missing
            pass
        found = self.breaches(**parts)
        if found:
            raise PactBreach(_message(self.shape, found), hint=found[0].advice, breaches=found)

    def breaches(self, **parts: Any) -> tuple[Breach, ...]:
        """Return every difference between the named ``parts`` of a replay and the pact.

        `check` calls it if its compiled expression is False. That expression may be too strict (NaN is not
        equal to NaN there), never too lax.
        """
        found: list[Breach] = []
        for name in {**self._roots, **parts}:
            if name in self._roots and name in parts:
                found += self._differences(self._roots[name], parts[name], root=True)
            else:
                lost, new = (name, "none") if name in self._roots else ("none", name)
                found.append(
                    Breach(name, "fields", f"missing {lost}", f"new {new}", None, BREACHES["fields"][1])
                )
        return tuple(found)

    def _differences(self, promise: Promise, value: Any, *, root: bool = False) -> Iterator[Breach]:
        parts = _parts(value, root=root)
        form = None if parts is None else parts.form
        if type(value) is not promise.type:
            yield _breach(promise, "type", *_type_names(promise.type, type(value)))
        elif parts is None:
            yield from self._leaf_differences(promise, value)
        now = {} if parts is None else parts.items
        lost = [key for key in promise.parts if key not in now]
        new = [key for key in now if key not in promise.parts]
        if form == promise.form == "items":
            if lost or new:
                yield _breach(promise, "length", str(len(promise.parts)), str(len(now)))
        elif (lost or new) and "items" not in (form, promise.form):
            missing, extra = _names(promise.form, lost), _names(form, new)
            yield _breach(promise, "fields", f"missing {missing}", f"new {extra}")
        if form == promise.form:
            for key, part in promise.parts.items():
                if key in now:
                    yield from self._differences(part, now[key])

    def _leaf_differences(self, promise: Promise, value: Any) -> Iterator[Breach]:
        if promise.value is ANY:
            return
        if isinstance(value, torch.Tensor):
            facts = zip(_TENSOR_RULES, promise.value, TensorFacts.of(value), strict=True)
            for rule, captured, now in facts:
                if rule == "address" and captured != now:
                    yield _breach(promise, rule, hex(captured), self._place(promise, value))
                elif captured != now:
                    yield _breach(promise, rule, str(captured), str(now))
        elif promise.bounded:
            if not value <= promise.value:
                yield _breach(promise, "bound", f"<= {promise.value!r}", repr(value))
        elif not _is_same(promise.value, value):
            yield _breach(promise, "value", _show(promise.value), _show(value))

    def _place(self, promise: Promise, tensor: torch.Tensor) -> str:
        """Return the address of a replayed tensor, with its slot if that is not the captured one."""
        slot = None if self._registry is None else self._registry.slot_of(tensor)
        where = "" if slot is None or slot.label == promise.owner else f" in {slot.label}"
        return f"{tensor.data_ptr():#x}{where}"


def _promise(
    path: str,
    value: Any,
    shape: GraphShape,
    registry: CudaGraphBufferRegistry | None,
    *,
    root: bool = False,
    is_bounded: bool = False,
    form_only: bool = False,
) -> Promise:
    """Return the promises of ``value`` and its parts."""
    kind: Any = type(value)
    if form_only and ((parts := _parts(value, root=root)) is None or parts.form == "items"):
        return Promise(path, kind, ANY)
    if is_bounded:
        _require_numbers(path, value, shape)
    if isinstance(value, torch.Tensor):
        slot = None if registry is None else registry.slot_of(value)
        if slot is None or slot.buffer is None:
            return Promise(path, kind, TensorFacts.of(value))
        offset = value.data_ptr() - slot.buffer.data_ptr()
        return Promise(path, kind, TensorFacts.of(value), slot.label, offset)
    parts = _parts(value, root=root)
    if parts is None:
        return Promise(path, kind, value, bounded=is_bounded)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    marks: dict[Hashable, Mapping[str, Any]] = {field.name: field.metadata for field in fields}
    promises = {}
    for key, item in parts.items.items():
        mark, at = marks.get(key, {}), parts.path(path, key)
        limit, form = is_bounded or _BOUNDED in mark, form_only or _UPDATED in mark
        promises[key] = _promise(at, item, shape, registry, is_bounded=limit, form_only=form)
    return Promise(path, kind, form=parts.form, parts=promises)


def _require_numbers(path: str, value: Any, shape: GraphShape) -> None:
    """Raise `EngineError` unless a bounded field is a number, or a list or tuple of numbers."""
    of_items = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
    for number in value if of_items else (value,):
        is_number = isinstance(number, (int, float)) and not isinstance(number, (bool, enum.Enum))
        if not is_number or number != number:  # noqa: PLR0124  NaN
            raise EngineError(
                f"{shape}: {path} is declared bounded() and is {_show(value)} at capture; it must be a"
                " number, or a list or tuple of numbers",
                hint="give it the largest number that a replay may have, or leave out bounded()",
            )


# -- comparing -----------------------------------------------------------------------------------------

_BY_VALUE = (numbers.Number, str, bytes, range, slice, torch.device)


def _is_same(captured: Any, now: Any) -> bool:
    """Return whether a host value equals the captured one. Objects such as plans are compared by identity."""
    if captured is now:
        return True
    if not isinstance(captured, _BY_VALUE) or isinstance(captured, enum.Enum):
        return False
    return bool(captured == now) or bool(captured != captured and now != now)  # noqa: PLR0124  NaN


def _compile(roots: Mapping[str, Promise]) -> Callable[[Mapping[str, Any]], bool]:
    """Return a function ``parts -> bool`` that checks the promises ``roots``.

    It is one chain of comparisons in generated source code, as `dataclasses` generates methods, and calls
    only torch. Captured values are constants in its namespace; the source contains only plain names.
    """
    source = _Source()
    terms = [f"len(parts) == {len(roots)}"]
    for name, promise in roots.items():
        terms += source.terms(promise, f"parts[{source.constant(name)}]")
    chain = "\n        and ".join(terms)
    code = f"def holds(parts):\n    return (\n        {chain}\n    )\n"
    exec(_code_of(code), source.names)  # noqa: S102  the source has plain names only, see above
    holds: Callable[[Mapping[str, Any]], bool] = source.names["holds"]
    return holds


@functools.lru_cache(maxsize=1024)
def _code_of(source: str) -> CodeType:
    """Return the code of ``source``. Captures of one kind have equal source, and compiling takes longest."""
    return compile(source, "<pact>", "exec")


class _Source:
    """The source code of a pact's comparisons, and its constants by name."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}

    def constant(self, value: Any) -> str:
        """Return a new name for the constant ``value``."""
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def terms(self, promise: Promise, expression: str) -> Iterator[str]:
        """Yield the conditions under which ``expression`` keeps ``promise``."""
        if _is_singleton(promise):
            yield f"{expression} is {self.constant(promise.value)}"
            return
        v = f"v{len(self.names)}"  # unique, since the type takes the next constant
        yield f"type({v} := {expression}) is {self.constant(promise.type)}"
        if promise.value is ANY:
            return
        if promise.form == "items":
            yield f"len({v}) == {len(promise.parts)}"
        elif promise.form == "keys":
            yield f"{v}.keys() == {self.constant(frozenset(promise.parts))}"
        elif promise.form == "fields":
            declared = _declared_fields(promise.type)
            if declared is None or len(declared) != len(promise.parts):  # attributes may come and go
                names = self.constant(lambda now: set(_attributes(now, root=True) or ()))
                yield f"{names}({v}) == {self.constant(set(promise.parts))}"
        elif isinstance(promise.value, TensorFacts):
            facts = ("data_ptr() ==", "shape ==", "stride() ==", "dtype is", "device ==")
            for fact, captured in zip(facts, promise.value, strict=True):
                yield f"{v}.{fact} {self.constant(captured)}"
        else:
            yield f"{v} {'<=' if promise.bounded else '=='} {self.constant(promise.value)}"
        for key, part in promise.parts.items():
            yield from self.terms(part, self._part(promise.form, v, key))

    def _part(self, form: _Form | None, v: str, key: Hashable) -> str:
        if form != "fields":
            return f"{v}[{self.constant(key)}]"
        name = str(key)
        if name.isascii() and name.isidentifier() and not keyword.iskeyword(name):
            return f"{v}.{name}"
        return f"{self.constant(getattr)}({v}, {self.constant(key)})"


def _is_singleton(promise: Promise) -> bool:
    """Return whether ``promise`` is of a leaf that is compared by identity."""
    value = promise.value
    if promise.form is not None or promise.bounded or value is ANY or isinstance(value, TensorFacts):
        return False
    return not isinstance(value, _BY_VALUE) or isinstance(value, (bool, enum.Enum))


# -- messages ------------------------------------------------------------------------------------------


def _breach(promise: Promise, rule: BreachKind, captured: str, replayed: str) -> Breach:
    advice = BREACHES[rule][1]
    if rule == "value" and not isinstance(promise.value, numbers.Number):
        advice = "the graph was recorded with the captured one; pass the same to every replay"
    elif rule == "type" and type(None) is promise.type:
        advice = "the graph was recorded without it: set it at capture too, or leave it None"
    elif rule == "type" and replayed == "NoneType":
        advice = "the graph was recorded with it: keep the captured one, refreshed in place"
    return Breach(promise.path, rule, captured, replayed, promise.owner, advice)


def _names(form: _Form | None, keys: Iterable[Hashable]) -> str:
    return ", ".join(map(repr if form == "keys" else str, keys)) or "none"


def _show(value: Any) -> str:
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
    """Return whether a host value has a readable ``repr``; others are compared by identity."""
    return isinstance(value, (*_BY_VALUE, enum.Enum, torch.dtype, type(None)))


def type_name(kind: type) -> str:
    """Return the name of a type with its module; without it for builtins."""
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


def _type_names(captured: type, replayed: type) -> tuple[str, str]:
    """Return the names of two types, with modules if the names are equal."""
    if captured.__name__ == replayed.__name__:
        return type_name(captured), type_name(replayed)
    return captured.__name__, replayed.__name__


def _message(shape: GraphShape, breaches: Sequence[Breach]) -> str:
    """Return the message of a breach: one line for the first field, then a table of all."""
    first = breaches[0]
    of_first = [breach.text for breach in breaches if breach.path == first.path]
    owner = f" ({first.owner})" if first.owner else ""
    more = len(breaches) - len(of_first)
    tail = f"; and {more} more in other fields" if more else ""
    lines = [f"{shape}: {first.path}{owner}: {'; '.join(of_first)}{tail}"]
    rows = [("field", "rule", "captured", "replayed", "owner")]
    rows += [(b.path, b.rule, b.captured, b.replayed, b.owner or "-") for b in breaches[:_MAX_ROWS]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    layout = "".join(f"  {{:{width}}}" for width in widths)
    lines += [layout.format(*row).rstrip() for row in rows]
    if len(breaches) > _MAX_ROWS:
        lines.append(f"  ... and {len(breaches) - _MAX_ROWS} more")
    return "\n".join(lines)
