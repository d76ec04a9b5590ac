"""Pacts as plain data, which can be saved to a file and compared across processes.

`SavedPacts` is a JSON document. The location of a tensor is a slot and an offset, not an address, so that two
engines, two machines or two versions of a plugin can be compared by `diff`. A file is validated when it is
read, and nothing in it is executed or imported.

Does not: check replays; `graphpact.pact` does, with addresses and live objects.
"""

import dataclasses
import enum
import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, TypeVar

from graphpact.batch import ForwardMode
from graphpact.errors import UsageError
from graphpact.files import read_file, write_file
from graphpact.graphs.driver import Externals
from graphpact.pact import Pact, Promise, TensorFacts, is_readable, type_name
from graphpact.shapes import GraphShape

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Scalar: TypeAlias = bool | int | float | str | None

K = TypeVar("K")
V = TypeVar("V")

FORMAT = 2
"""The version of the document that `SavedPacts` writes. Version 1, without ``externals``, is also read."""

_DOCUMENT: Final = "graphpact pacts"
_STRICT: Any = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # pydantic's ConfigDict

# -- the document --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class SavedTensor:
    """The properties of a tensor that are the same in every process.

    Args:
        shape: The sizes.
        stride: The strides in elements.
        dtype: The dtype without ``torch.``.
        device: The device.
        slot: Label of the slot in whose memory the tensor begins; None if it is in no slot.
        offset: Bytes from the start of that slot's buffer; None if it is in no slot.
    """

    __pydantic_config__: ClassVar[Any] = _STRICT

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    slot: str | None
    offset: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class SavedPromise:
    """One container or leaf of a saved pact.

    Args:
        path: The path of the field.
        type: Name of its type, with the module unless it is a builtin.
        tensor: The properties of a tensor; None for anything else.
        value: A host number or bool as it is; any other host value, and a number that JSON lacks, as a
            string. None for None, for a container, and for an object that is compared by identity.
        bounded: Whether a replay may have a smaller number.
    """

    __pydantic_config__: ClassVar[Any] = _STRICT

    path: str
    type: str
    tensor: SavedTensor | None
    value: Scalar
    bounded: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SavedPact:
    """The pact of one captured shape of one lane, as plain data.

    Args:
        lane: Name of the lane.
        mode: Forward mode of the shape.
        batch_size: Padded request count of the shape.
        num_tokens: Padded token count of the shape.
        variant: Variant of the shape.
        promises: The promises, in the order of the pact.
        externals: How much of the memory that the graph reads the driver reports. The pact covers the
            reported tensors of the backend. None if the file does not say, because it has format 1.
    """

    __pydantic_config__: ClassVar[Any] = _STRICT

    lane: str
    mode: ForwardMode
    batch_size: int
    num_tokens: int
    variant: str
    promises: tuple[SavedPromise, ...]
    externals: Externals | None = None

    @property
    def shape(self) -> GraphShape:
        """The captured shape."""
        return GraphShape(self.mode, self.batch_size, self.num_tokens, self.variant)

    @classmethod
    def of(cls, lane: str, pact: Pact[GraphShape], externals: Externals | None = None) -> "SavedPact":
        """Return the part of ``pact`` that can be compared with a pact of another process.

        Args:
            lane: The name of the lane that captured the shape.
            pact: The pact of the shape.
            externals: How much the driver knows of the memory that the graph reads; None if that is unknown.
        """
        shape, promises = pact.shape, tuple(map(_save, pact.promises))
        return cls(
            *(lane, shape.mode, shape.batch_size, shape.num_tokens, shape.variant),
            promises,
            externals,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedPacts:
    """The pacts of an engine as plain data, to be saved to a file and compared by `diff`.

    Args:
        document: Marks the file as a document of pacts.
        format: The version of the document.
        pacts: One pact for each lane and shape, in the order of lanes and captures.
    """

    __pydantic_config__: ClassVar[Any] = _STRICT

    document: Literal["graphpact pacts"] = _DOCUMENT
    format: int = FORMAT
    pacts: tuple[SavedPact, ...]

    @classmethod
    def of(cls, pacts: Iterable[tuple[str, Pact[GraphShape]]]) -> "SavedPacts":
        """Return pacts, each given with the name of its lane, as plain data."""
        return cls(pacts=tuple(SavedPact.of(lane, pact) for lane, pact in pacts))

    def to_dict(self) -> dict[str, Any]:
        """Return the document, ready for JSON."""
        document: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return document

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        """Write the document to ``path``.

        Args:
            path: The file to write.
            overwrite: Whether to replace an existing file.

        Raises:
            UsageError: The file exists, or cannot be written.
            GraphpactError: The disk is full or broken; an existing file is unchanged.
        """
        require_target(path, overwrite=overwrite)
        write_file(path, json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "SavedPacts":
        """Read a document that `save` wrote. Nothing in it is executed or imported.

        Raises:
            UsageError: The file cannot be read, is not a document of pacts, has a newer format, or is
                invalid.
        """
        try:
            content = read_file(path)
        except OSError as error:
            raise _foreign(f"{path} cannot be read: {error.strerror or error}") from error
        return cls.from_json(content, str(path))

    @classmethod
    def from_json(cls, content: bytes | str, source: str = "the document") -> "SavedPacts":
        """Read a document from memory; error messages call it ``source``.

        Raises:
            UsageError: It is not a document of pacts, has a newer format, or is invalid.
        """
        from pydantic import ValidationError  # noqa: PLC0415  slow import, needed only to load

        _require_ours(content, source)
        try:
            saved = _adapter().validate_json(content)
        except ValidationError as error:
            first, *more = error.errors(include_url=False, include_context=False)
            where = ".".join(map(str, first["loc"])) or "the document"
            tail = f" and {len(more)} more" if more else ""
            raise _broken(source, f"{where}: {first['msg']}{tail}") from error
        _require_unique(saved, source)
        return dataclasses.replace(saved, format=FORMAT)


def require_target(path: Path, *, overwrite: bool = False) -> None:
    """Check, without writing, that pacts can be written to ``path``.

    Call this before long work whose result will be saved.

    Args:
        path: The file to write.
        overwrite: Whether to replace an existing file.

    Raises:
        UsageError: It is a directory, its directory does not exist, or it exists and may not be replaced.
    """
    if path.is_dir():
        raise _unwritable(path, "it is a directory")
    if not path.parent.is_dir():
        raise _unwritable(path, f"there is no directory {path.parent}")
    if path.exists() and not overwrite:
        hint = "name another file, or pass --force to replace it"
        raise UsageError(f"{path} already exists", hint=hint)


def _unwritable(path: Path, why: str) -> UsageError:
    hint = "name a file that can be written"
    return UsageError(f"pacts cannot be written to {path}: {why}", hint=hint)


def _foreign(what: str) -> UsageError:
    return UsageError(what, hint="name a file that `graphpact pact save` wrote")


def _require_ours(content: bytes | str, source: str) -> None:
    """Check the ``document`` and ``format`` entries of a document."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        document = json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _foreign(f"{source} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("document") != _DOCUMENT:
        raise _foreign(f'{source} is JSON but not a document of pacts: it lacks "document": "{_DOCUMENT}"')
    found = document.get("format")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise _broken(source, f"format: {found!r} is not a version")
    if found > FORMAT:
        raise UsageError(
            f"{source} has format {found}; this graphpact reads formats up to {FORMAT}",
            hint="update graphpact, or save the pacts again with this one",
        )


def _require_unique(saved: SavedPacts, source: str) -> None:
    """Check that no pact and no promise occurs twice."""
    seen: set[Hashable] = set()
    for pact in saved.pacts:
        owner = (pact.lane, pact.shape)
        for key in (owner, *((*owner, promise.path) for promise in pact.promises)):
            if key in seen:
                raise _broken(source, f"{' '.join(map(str, key))} occurs twice")
            seen.add(key)


def _broken(source: str, fault: str) -> UsageError:
    return UsageError(
        f"{source} is an invalid document of pacts: {fault}",
        hint="save the pacts again: graphpact pact save FILE --model DIR",
    )


def _adapter() -> "TypeAdapter[SavedPacts]":
    from pydantic import TypeAdapter  # noqa: PLC0415  slow import, needed only to save or load

    return TypeAdapter(SavedPacts)


def _save(promise: Promise) -> SavedPromise:
    facts, tensor, value = promise.value, None, None
    if isinstance(facts, TensorFacts):
        dtype = str(facts.dtype).removeprefix("torch.")
        place = (promise.owner, promise.offset)
        tensor = SavedTensor(tuple(facts.shape), facts.stride, dtype, str(facts.device), *place)
    elif promise.form is None:
        value = _scalar(facts)
    return SavedPromise(promise.path, type_name(promise.type), tensor, value, promise.bounded)


def _scalar(value: Any) -> Scalar:
    """Return a host value for JSON: a string if JSON lacks its type, None if it is compared by identity."""
    if isinstance(value, enum.Enum):
        return str(value.name)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, type):
        return type_name(value)
    return repr(value) if is_readable(value) else None


# -- comparing -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One difference between two documents of pacts.

    Args:
        lane: Name of the lane.
        shape: The captured shape; None if the whole lane was added or removed.
        path: The field; None if the whole shape was added or removed.
        what: ``lane``, ``shape`` or ``field`` if that was added or removed; otherwise the attribute of
            `SavedPromise` or of `SavedTensor` that differs.
        old: The old value; None if it was added.
        new: The new value; None if it was removed.
    """

    lane: str
    shape: str | None
    path: str | None
    what: str
    old: Scalar | tuple[int, ...]
    new: Scalar | tuple[int, ...]


def diff(old: SavedPacts, new: SavedPacts) -> tuple[Change, ...]:
    """Return the changes from ``old`` to ``new`` by lane, shape and field; ``externals`` is not compared."""
    return tuple(_diff(old, new))


def _diff(old: SavedPacts, new: SavedPacts) -> Iterator[Change]:
    for lane, was, now in _pairs(_by_lane(old), _by_lane(new)):
        if was is None or now is None:
            yield Change(lane, None, None, "lane", _count(was, "shape"), _count(now, "shape"))
            continue
        for shape, before, after in _pairs(was, now):
            words = str(shape)
            if before is None or after is None:
                ends = _count(before, "field"), _count(after, "field")
                yield Change(lane, words, None, "shape", *ends)
                continue
            for path, first, second in _pairs(before, after):
                for what, a, b in _changes(first, second):
                    yield Change(lane, words, path, what, a, b)


def _changes(
    old: SavedPromise | None, new: SavedPromise | None
) -> Iterator[tuple[str, Scalar | tuple[int, ...], Scalar | tuple[int, ...]]]:
    """Yield the differences between two promises of one path: attribute, old, new."""
    if old is None or new is None:
        yield "field", None if old is None else old.type, None if new is None else new.type
        return
    for name in ("type", "value", "bounded"):
        a, b = getattr(old, name), getattr(new, name)
        if a != b or type(a) is not type(b):  # 1 == True
            yield name, a, b
    if old.tensor is None or new.tensor is None:
        return  # the type differs, which was yielded
    for field in dataclasses.fields(SavedTensor):
        if (a := getattr(old.tensor, field.name)) != (b := getattr(new.tensor, field.name)):
            yield field.name, a, b


def _by_lane(saved: SavedPacts) -> dict[str, dict[GraphShape, dict[str, SavedPromise]]]:
    """Return the promises by lane, shape and path."""
    lanes: dict[str, dict[GraphShape, dict[str, SavedPromise]]] = {}
    for pact in saved.pacts:
        lanes.setdefault(pact.lane, {})[pact.shape] = {p.path: p for p in pact.promises}
    return lanes


def _count(found: Mapping[Any, Any] | None, what: str) -> str | None:
    return None if found is None else f"{len(found)} {what}{'' if len(found) == 1 else 's'}"


def _pairs(old: Mapping[K, V], new: Mapping[K, V]) -> Iterator[tuple[K, V | None, V | None]]:
    """Yield every key of both, those of ``old`` first, with both values."""
    for key in {**old, **new}:
        yield key, old.get(key), new.get(key)
