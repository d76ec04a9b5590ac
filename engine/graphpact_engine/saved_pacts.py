"""Pacts as plain data: what a pact promised, kept in a file and compared across processes.

`SavedPacts` is a JSON document in which a tensor's place is a slot and an offset, so that two engines,
two machines or two versions of a plugin can be compared by `diff`. A file is checked as it is read,
and nothing in it is executed or imported.

Does not: hold a replay to anything: addresses and live objects are for `graphpact.pact`.
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
from graphpact.pact import Pact, Promise, TensorFacts, is_readable, type_name
from graphpact.shapes import GraphShape

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Scalar: TypeAlias = bool | int | float | str | None

K = TypeVar("K")
V = TypeVar("V")

FORMAT = 1
"""The version of the document that `SavedPacts` writes, and the only one that it reads."""

_DOCUMENT: Final = "graphpact pacts"
_STRICT: Any = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # pydantic's ConfigDict

# -- the document --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class SavedTensor:
    """What a tensor promises in every process.

    Args:
        shape: Its sizes.
        stride: In elements.
        dtype: Element type without ``torch.``.
        device: Where it lies.
        slot: Label of the slot in whose memory it begins; None where it is no slot's.
        offset: Bytes from the start of that slot's buffer; None where there is none.
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
        path: Where it is.
        type: Name of its type, with its module but for Python's own.
        tensor: What a tensor promises; None for all else.
        value: A host number, a bool or None itself; every other host value in words, and so is a number
            that JSON lacks. None for a container, and for an object whose identity was promised.
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
    """What one captured shape of one lane promised, as plain data."""

    __pydantic_config__: ClassVar[Any] = _STRICT

    lane: str
    mode: ForwardMode
    batch_size: int
    num_tokens: int
    variant: str
    promises: tuple[SavedPromise, ...]

    @property
    def shape(self) -> GraphShape:
        """The captured shape."""
        return GraphShape(self.mode, self.batch_size, self.num_tokens, self.variant)

    @classmethod
    def of(cls, lane: str, pact: Pact) -> "SavedPact":
        """Return what of ``pact`` can be compared with a pact of another process.

        Args:
            lane: The name of the lane that captured the shape.
            pact: What the capture promised.
        """
        shape, promises = pact.shape, tuple(map(_save, pact.promises))
        return cls(lane, shape.mode, shape.batch_size, shape.num_tokens, shape.variant, promises)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedPacts:
    """The pacts of an engine as plain data: what is written to a file, and compared by `diff`.

    Args:
        document: What tells such a file from another one.
        format: The version of the document.
        pacts: In the order of lanes and captures; one for each lane and shape.
    """

    __pydantic_config__: ClassVar[Any] = _STRICT

    document: Literal["graphpact pacts"] = _DOCUMENT
    format: int = FORMAT
    pacts: tuple[SavedPact, ...]

    @classmethod
    def of(cls, pacts: Iterable[tuple[str, Pact]]) -> "SavedPacts":
        """Return ``pacts``, each with the name of its lane, as plain data."""
        return cls(pacts=tuple(SavedPact.of(lane, pact) for lane, pact in pacts))

    def to_dict(self) -> dict[str, Any]:
        """Return the document, ready for JSON."""
        document: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return document

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        """Write the document to ``path``.

        Args:
            path: Where to.
            overwrite: Whether a file that is there may be replaced.

        Raises:
            UsageError: The file is there, or cannot be written.
        """
        require_target(path, overwrite=overwrite)
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        try:
            with path.open("w" if overwrite else "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise _unwritable(path, error.strerror or str(error)) from error

    @classmethod
    def load(cls, path: Path) -> "SavedPacts":
        """Read a document that `save` wrote. Nothing in it is executed or imported.

        Raises:
            UsageError: The file cannot be read, is something else, is of another format, or is broken.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _foreign(f"{path} cannot be read: {error.strerror or error}") from error
        return cls.from_json(content, str(path))

    @classmethod
    def from_json(cls, content: bytes | str, source: str = "the document") -> "SavedPacts":
        """Read a document from memory; ``source`` is what messages call it.

        Raises:
            UsageError: It is something else, of another format, or broken.
        """
        from pydantic import ValidationError  # noqa: PLC0415  only who loads pacts waits for it

        _require_ours(content, source)
        try:
            saved = _adapter().validate_json(content)
        except ValidationError as error:
            first, *more = error.errors(include_url=False, include_context=False)
            where = ".".join(map(str, first["loc"])) or "the whole"
            tail = f" and {len(more)} more" if more else ""
            raise _broken(source, f"{where}: {first['msg']}{tail}") from error
        _require_unique(saved, source)
        return saved


def require_target(path: Path, *, overwrite: bool = False) -> None:
    """See whether pacts can be written to ``path``, as far as that can be told without writing.

    For who has long work to do before there is something to save.

    Args:
        path: Where to.
        overwrite: Whether a file that is there may be replaced.

    Raises:
        UsageError: It is a directory, lies in none, or is there and may not be replaced.
    """
    if path.is_dir():
        raise _unwritable(path, "it is a directory")
    if not path.parent.is_dir():
        raise _unwritable(path, f"there is no directory {path.parent}")
    if path.exists() and not overwrite:
        hint = "name another file, or ask to write over it (--force)"
        raise UsageError(f"{path} is there already", hint=hint)


def _unwritable(path: Path, why: str) -> UsageError:
    hint = "name a file that can be written"
    return UsageError(f"pacts cannot be written to {path}: {why}", hint=hint)


def _foreign(what: str) -> UsageError:
    return UsageError(what, hint="name a file that `graphpact pact save` wrote")


def _require_ours(content: bytes | str, source: str) -> None:
    """See that a document says that it is ours, and of a format that is known."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        document = json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _foreign(f"{source} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("document") != _DOCUMENT:
        raise _foreign(
            f'{source} is JSON and no document of pacts: it lacks "document": "{_DOCUMENT}"'
        )
    found = document.get("format")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise _broken(source, f"format: {found!r} is no version")
    if found != FORMAT:
        raise UsageError(
            f"{source} has format {found}; this graphpact reads format {FORMAT}",
            hint="update graphpact, or save the pacts again with this one",
        )


def _require_unique(saved: SavedPacts, source: str) -> None:
    """See that no pact and no promise is there twice: which of them counts?"""
    seen: set[Hashable] = set()
    for pact in saved.pacts:
        whose = (pact.lane, pact.shape)
        for key in (whose, *((*whose, promise.path) for promise in pact.promises)):
            if key in seen:
                raise _broken(source, f"{' '.join(map(str, key))} is there twice")
            seen.add(key)


def _broken(source: str, what: str) -> UsageError:
    return UsageError(
        f"{source} is a broken document of pacts: {what}",
        hint="save the pacts again: graphpact pact save FILE --model DIR",
    )


def _adapter() -> "TypeAdapter[SavedPacts]":
    from pydantic import TypeAdapter  # noqa: PLC0415  only who saves or loads pacts waits for it

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
    """Return a host value as JSON has it; in words where JSON lacks it, None where only identity counts."""
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
        lane: In which lane.
        shape: Of which captured shape, in words; None where the whole lane came or went.
        path: Of which field; None where the whole shape came or went.
        what: What differs: ``lane``, ``shape`` or ``field`` where it came or went, else an attribute of
            `SavedPromise` or of `SavedTensor`.
        old: What it was; None where it came.
        new: What it is; None where it went.
    """

    lane: str
    shape: str | None
    path: str | None
    what: str
    old: Scalar | tuple[int, ...]
    new: Scalar | tuple[int, ...]


def diff(old: SavedPacts, new: SavedPacts) -> tuple[Change, ...]:
    """Return what changed from ``old`` to ``new``, by lane, shape and field; empty where nothing did."""
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
    """Yield what differs between two promises of one path: what, old, new."""
    if old is None or new is None:
        yield "field", None if old is None else old.type, None if new is None else new.type
        return
    for name in ("type", "value", "bounded"):
        a, b = getattr(old, name), getattr(new, name)
        if a != b or type(a) is not type(b):  # 1 == True
            yield name, a, b
    if old.tensor is None or new.tensor is None:
        return  # another type, which is said
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
    """Yield every key of both, those of ``old`` first, with what each has there."""
    for key in {**old, **new}:
        yield key, old.get(key), new.get(key)
