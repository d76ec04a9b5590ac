"""`Diagnosis`: what differs first between a replay and an eager run of the same batch, field by field.

It is made after the replay, since a graph may write its own metadata, and only of one that went wrong:

    view           the real rows, against the batch
    metadata       against what the backend derives eagerly, from the batch and from the padded view: what
                   agrees with either is right, and what the backend leaves unwritten is not compared
    padded rows    suspects, where all of that agrees: what capture did not have there, or what the
                   backend does not derive from the view

Does not: decide that something went wrong; the verifier does.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpact.attention import AttentionBackend
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot
from graphpact.lane import Lane
from graphpact.memory_map import MemoryMap
from graphpact.pact import Pact, walk
from graphpact.shapes import GraphShape
from graphpact.tensors import storage_id, tolerance_of

_MANY = 4  # of more fields, the others are counted

_ABSENT = object()
_TYPE = ": type"  # of a container, among its parts
_PADDED_COUNT = "view.batch_size"  # the one field that is padded by its value
# What is compared by value; any other object is one run's own, such as a plan.
_VALUES = (
    *(bool, int, float, complex, str, bytes, enum.Enum),
    *(type, type(None), torch.dtype, torch.device, torch.Size),
)


@dataclass(slots=True)
class Replay:
    """What was seen of one replay."""

    batch: ForwardBatch
    shape: GraphShape
    view: ForwardBatch
    view_before: ForwardBatch
    """A copy of the view as it was when it was made: the graph may write its slots."""
    metadata: Any = None


@dataclass(frozen=True, slots=True)
class Cause:
    """The end of an error's message, and its attributes."""

    text: str
    hint: str
    field: str | None = None
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Finding:
    """A field that differs, and a phrase that says where, and what both sides hold."""

    field: str
    text: str


class _Reference:
    """What a leaf should hold.

    Args:
        value: The leaf of an eager run; none, by default.
        again: The same leaf, derived once more in memory that held something else.
        bounded: Whether a larger number is as good.

    Attributes:
        written: Of a tensor, the elements in which ``value`` and ``again`` agree: no others were
            written, and no others are compared.
    """

    def __init__(
        self, value: Any = _ABSENT, again: Any = _ABSENT, *, bounded: bool = False
    ) -> None:
        self.value = value
        self.bounded = bounded
        self.written = torch.zeros(0, dtype=torch.bool)
        if isinstance(value, torch.Tensor):
            self.value = value.cpu()
            self.written = torch.zeros(value.shape, dtype=torch.bool)
            if isinstance(again, torch.Tensor) and again.shape == value.shape:
                self.written = _is_close(self.value, again.cpu())

    def holds(self, replayed: Any) -> bool:
        """Return whether ``replayed`` is as it should be."""
        value = self.value
        if isinstance(value, torch.Tensor):
            return isinstance(replayed, torch.Tensor) and not bool(self.wrong(replayed).any())
        if type(replayed) is not type(value):
            return False
        if self.bounded:
            return bool(replayed >= value)
        is_nan = isinstance(value, float) and value != value  # noqa: PLR0124  NaN stays NaN
        return is_nan or not isinstance(value, _VALUES) or bool(replayed == value)

    def wrong(self, replayed: torch.Tensor) -> torch.Tensor:
        """Return, in the shape of ``value``, what the leading block of ``replayed`` does not hold."""
        wrong = self.written.clone()
        if replayed.dim() == wrong.dim():
            both = _common(replayed, wrong)
            wrong[both] &= ~_is_close(replayed[both].cpu(), self.value[both])
        return wrong

    def first_wrong(self, replayed: torch.Tensor, unless: "_Reference") -> tuple[int, ...] | None:
        """Return the first index at which ``replayed`` holds neither this nor ``unless``, or None."""
        wrong = self.wrong(replayed)
        if isinstance(unless.value, torch.Tensor) and unless.value.dim() == wrong.dim():
            right = unless.written & ~unless.wrong(replayed)
            both = _common(wrong, right)
            wrong[both] &= ~right[both]
        at = wrong.nonzero()
        return tuple(at[0].tolist()) if len(at) else None


_NOTHING = _Reference()


class _Derived:
    """What a backend derives eagerly from one batch, leaf by leaf."""

    def __init__(self, backend: AttentionBackend, batch: ForwardBatch, shape: GraphShape) -> None:
        once, again = (
            _leaves(backend.init_metadata_eager(batch, fill=fill), shape) for fill in (0, 1)
        )
        self._leaves = {
            path: _Reference(value, again.get(path, (_ABSENT, False))[0], bounded=is_bounded)
            for path, (value, is_bounded) in once.items()
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __getitem__(self, path: str) -> _Reference:
        return self._leaves.get(path, _NOTHING)


class Diagnosis:
    """Finds what differs first, of one replay that went wrong.

    Args:
        lane: Whose replay it was.
        backend: The lane's kind of backend, on the shadow cache.
        replay: What was seen of it.
        caches: Tensors whose content is no metadata, whoever refers to them.
    """

    def __init__(
        self,
        lane: Lane,
        backend: AttentionBackend,
        replay: Replay,
        caches: Iterable[torch.Tensor],
    ) -> None:
        self._lane = lane
        self._backend = backend
        self._replay = replay
        self._batch, self._view = (
            {path: value for path, value in walk({"view": part}) if path != _PADDED_COUNT}
            for part in (replay.batch, replay.view)
        )
        self._caches = set(map(storage_id, caches))
        self._memory = MemoryMap(lane.registry, lane.backend)

    def cause(self) -> Cause:
        """Return what to say of it."""
        found = list(self._wrong_in_view())
        if found:
            return _first(found, hint="see what fills the slot, and what writes it after the fill")
        replay = self._replay
        try:
            eager = _Derived(self._backend, replay.batch, replay.shape)
            padded = _Derived(self._backend, replay.view, replay.shape)
            metadata = {
                path: value for path, (value, _) in _leaves(replay.metadata, replay.shape).items()
            }
        except Exception as error:  # noqa: BLE001  the difference is told, whatever a plugin raises now
            return _rest(
                "the view agrees in its real rows; metadata could not be compared:"
                f" {type(error).__name__}: {error}",
                self._padded_view(),
            )
        found = list(self._wrong_in_metadata(metadata, eager, padded))
        if found:
            return _first(
                found,
                hint="init_metadata_replay() refreshes every tensor in place; a host number stays what"
                " it was at capture: make that hold for every batch, or put it in a tensor",
            )
        text = (
            "every field agrees in its real rows, which leaves padded rows, what the cache held, and the"
            " recorded work itself"
        )
        by_padding = [  # a host number goes by the shape: that padding changes it says nothing
            other.field
            for other in self._wrong_in_metadata(metadata, eager, None)
            if isinstance(metadata.get(other.field), torch.Tensor)
        ]
        if by_padding:
            text += f"; padding, and not the replay, changes {_list(by_padding, ', ')}"
        return _rest(
            text,
            [
                *self._padded_view(),
                *self._padded_metadata(metadata, eager, padded),
                *self._frozen(),
            ],
        )

    # -- real rows -------------------------------------------------------------------------------

    def _wrong_in_view(self) -> Iterator[_Finding]:
        """Yield the fields whose real rows are not the batch's."""
        for path, value in self._batch.items():
            replayed = self._view.get(path, _ABSENT)
            if not isinstance(value, torch.Tensor) and not isinstance(replayed, torch.Tensor):
                continue
            slot = self._memory.slot_of(replayed)
            if slot is not None and (slot.is_computed or slot.source_fn is not None):
                continue  # it is more than a copy of the field
            if slot is not None and slot.optional and value is None:
                continue  # it holds its initial value then
            yield from self._differs(path, replayed, _Reference(value, value))

    def _wrong_in_metadata(
        self, metadata: Mapping[str, Any], eager: _Derived, padded: _Derived | None
    ) -> Iterator[_Finding]:
        """Yield the fields that are neither what the batch makes them nor what the padded view does.

        Padding may change what a right replay holds: a count of rows, or elements that nobody reads.
        """
        for path in dict.fromkeys([*eager, *metadata]):
            replayed = metadata.get(path, _ABSENT)
            unless = _NOTHING if padded is None else padded[path]
            yield from self._differs(path, replayed, eager[path], unless=unless)

    # -- padded rows -----------------------------------------------------------------------------

    def _padded_view(self) -> list[_Finding]:
        """Return the fields whose padded rows are not what capture had there.

        What no policy explains comes first.
        """
        dummy = dict(walk({"view": self._lane.runner.dummy(self._replay.shape)}))
        found = []
        for path, replayed in self._view.items():
            slot, captured = self._memory.slot_of(replayed), dummy.get(path)
            if slot is None or slot.is_computed or not isinstance(captured, torch.Tensor):
                continue
            batch = self._batch.get(path, _ABSENT)
            real = _Reference(batch, batch)
            rank, why = 0, "capture had"
            if slot.keeps_tail:
                rank, why = 2, f"kept because {slot.reason}, capture had"
            elif _holds_pad_value(replayed, real, slot):
                rank, why = 1, "its pad value, capture had"
            reference = _Reference(captured, captured)
            found += [
                (rank, finding)
                for finding in self._differs(path, replayed, reference, unless=real, than=why)
            ]
        return [finding for _, finding in sorted(found, key=lambda pair: pair[0])]

    def _padded_metadata(
        self, metadata: Mapping[str, Any], eager: _Derived, padded: _Derived
    ) -> Iterator[_Finding]:
        """Yield the fields that are not what the backend derives from the view, padded rows and all."""
        for path in padded:
            replayed = metadata.get(path, _ABSENT)
            yield from self._differs(
                path, replayed, padded[path], unless=eager[path], than="from this view"
            )

    def _frozen(self) -> Iterator[_Finding]:
        """Yield the host numbers of the view that are not the batch's: recorded work has capture's."""
        for path, value in self._batch.items():
            replayed = self._view.get(path, _ABSENT)
            if not isinstance(value, torch.Tensor) and not isinstance(replayed, torch.Tensor):
                yield from self._differs(path, replayed, _Reference(value))

    # -- one field -------------------------------------------------------------------------------

    def _differs(
        self,
        path: str,
        replayed: Any,
        reference: _Reference,
        *,
        unless: _Reference = _NOTHING,
        than: str = "eager",
    ) -> Iterator[_Finding]:
        """Yield what is to be said where ``replayed`` holds neither the reference nor ``unless``."""
        slot, at = self._memory.slot_of(replayed), None
        if isinstance(replayed, torch.Tensor) and isinstance(reference.value, torch.Tensor):
            if storage_id(replayed) in self._caches:
                return
            if slot is not None and slot.is_workspace:
                return
            at = reference.first_wrong(replayed, unless)
            if at is None:
                return
        elif reference.holds(replayed) or unless.holds(replayed):
            return
        where = path if not at else f"{path}{list(at)}"
        whose = f" ({slot.label})" if slot is not None else ""
        yield _Finding(
            path.removesuffix(_TYPE),
            f"{where}: replay {_show(replayed, at)}, {than} {_show(reference.value, at)}{whose}",
        )


def _leaves(metadata: Any, shape: GraphShape) -> dict[str, tuple[Any, bool]]:
    """Return what metadata holds by path, types of containers too, and whether each is `bounded`."""
    values = dict(walk({"metadata": metadata}))
    return {
        f"{promise.path}{_TYPE}" if promise.form else promise.path: (
            promise.type if promise.form else values[promise.path],
            promise.bounded,
        )
        for promise in Pact.of(shape, metadata=metadata).promises
    }


def _rest(text: str, suspects: Sequence[_Finding]) -> Cause:
    """Return the cause where no real row tells what it is."""
    if suspects:
        text += f"; suspects: {_list([finding.text for finding in suspects], '; ')}"
        hint = (
            "is what a suspect holds harmless to every kernel? Its owner and padding policy say why"
        )
    else:
        hint = (
            "the graph read something that its replay did not refresh, or recorded another path. What the"
            ' graph reads: `graphpact doctor --memory`; verify.pact = "always" tells of moved tensors,'
            " strict = true in the lane's table of rows that nobody wrote"
        )
    return Cause(text, hint, suspects=tuple(finding.field for finding in suspects))


def _first(found: Sequence[_Finding], *, hint: str) -> Cause:
    """Return the cause that names the first of ``found``, and the others less loudly."""
    text = f"first field that differs: {found[0].text}"
    if len(found) > 1:
        text += f"; also {_list([finding.field for finding in found[1:]], ', ')}"
    return Cause(text, hint, field=found[0].field)


def _list(words: Sequence[str], between: str) -> str:
    more = f"{between}and {len(words) - _MANY} more" if len(words) > _MANY else ""
    return between.join(words[:_MANY]) + more


def _common(a: torch.Tensor, b: torch.Tensor) -> tuple[slice, ...]:
    """Return the leading block that both have."""
    return tuple(slice(min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))


def _is_close(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return which elements are equal; of floats, as equal as two kernels make them."""
    if not (a.is_floating_point() and b.is_floating_point()):
        return a == b
    tolerance = max(tolerance_of(dtype) for dtype in (a.dtype, b.dtype))
    return torch.isclose(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def _holds_pad_value(replayed: torch.Tensor, real: _Reference, slot: GraphSlot) -> bool:
    """Return whether the padded rows of a slot hold what its policy says."""
    value = torch.full(replayed.shape, slot.initial_value, dtype=replayed.dtype)
    return _Reference(value, value).first_wrong(replayed, real) is None


def _show(value: Any, at: tuple[int, ...] | None) -> str:
    if value is _ABSENT:
        return "nothing"
    if isinstance(value, torch.Tensor):
        if at is None:
            return "a tensor"
        inside = len(at) == value.dim() and all(i < n for i, n in zip(at, value.shape, strict=True))
        return str(value[at].item()) if inside else f"nothing there, in shape {tuple(value.shape)}"
    if isinstance(value, type):
        return value.__qualname__
    return repr(value) if isinstance(value, _VALUES) else f"a {type(value).__qualname__}"
