"""`Diagnosis`: finds the first field that differs between a replay and an eager run of the same batch.

It runs after a wrong replay, because a graph may write its own metadata. It compares in this order:

    view            the live rows with the batch
    metadata        with the metadata that the backend derives eagerly from the batch and from the padded
                    view: an element that agrees with either is correct; unwritten elements are not compared
    padding rows    only if all of the above agrees; suspects are rows that differ from those at capture, or
                    from the metadata that the backend derives from the view

Does not: decide whether a replay is wrong; the verifier does.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpact.attention import AttentionBackend
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot
from graphpact.lane import Lane
from graphpact.memory_map import MemoryMap
from graphpact.pact import ANY, Pact, walk
from graphpact.shapes import GraphShape
from graphpact.tensors import model_tolerance, storage_id

_MAX_LISTED = 4  # further fields are only counted

_ABSENT = object()
_TYPE = ": type"  # path suffix of the type of a container
_PADDED_COUNT = "view.batch_size"  # padding changes the value of this field only
# Types compared by value. Any other object, such as a plan, belongs to one run and is not compared.
_VALUES = (
    *(bool, int, float, complex, str, bytes, enum.Enum),
    *(type, type(None), torch.dtype, torch.device, torch.Size),
)


@dataclass(slots=True)
class Replay:
    """The batch, view and metadata of one replay.

    Args:
        batch: The live batch.
        shape: The replayed shape.
        view: The static inputs.
        view_before: A copy of the view before the replay: the graph may write its slots.
        rows: The batch that the metadata was made from: the view, unless attention leaves the graph.
        metadata: The metadata of the replay; None before the hook has run.
    """

    batch: ForwardBatch
    shape: GraphShape
    view: ForwardBatch
    view_before: ForwardBatch
    rows: ForwardBatch | None = None
    metadata: Any = None


@dataclass(frozen=True, slots=True)
class Cause:
    """The last part of an error message, and the attributes of the error.

    Args:
        text: The cause in words.
        hint: What to do.
        field: The first field that differs, or None.
        suspects: Fields of padding rows that may be the cause, where ``field`` is None.
    """

    text: str
    hint: str
    field: str | None = None
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Finding:
    """A field that differs, a text with the index and both values, and whether a slot has the field."""

    field: str
    text: str
    in_slot: bool


class _Reference:
    """The expected value of a leaf.

    Args:
        value: The leaf of an eager run; absent by default.
        again: The same leaf, derived again in memory with other initial contents.
        bounded: Whether a larger number is also correct.

    Attributes:
        written: For a tensor, a mask of the elements in which ``value`` and ``again`` agree. Only these were
            written, and only these are compared.
    """

    def __init__(self, value: Any = _ABSENT, again: Any = _ABSENT, *, bounded: bool = False) -> None:
        self.value = value
        self.bounded = bounded
        self.written = torch.zeros(0, dtype=torch.bool)
        if isinstance(value, torch.Tensor):
            self.value = value.cpu()
            self.written = torch.zeros(value.shape, dtype=torch.bool)
            if isinstance(again, torch.Tensor) and again.shape == value.shape:
                self.written = _is_close(self.value, again.cpu())

    def holds(self, replayed: Any) -> bool:
        """Return whether ``replayed`` agrees with the expected value."""
        value = self.value
        if isinstance(value, torch.Tensor):
            return isinstance(replayed, torch.Tensor) and not bool(self.wrong(replayed).any())
        if type(replayed) is not type(value):
            return False
        if self.bounded:
            return bool(replayed >= value)
        is_nan = isinstance(value, float) and value != value  # noqa: PLR0124  true for NaN
        return is_nan or not isinstance(value, _VALUES) or bool(replayed == value)

    def wrong(self, replayed: torch.Tensor) -> torch.Tensor:
        """Return a mask, in the shape of ``value``, of the elements that differ in ``replayed``."""
        wrong = self.written.clone()
        if replayed.dim() == wrong.dim():
            both = _common(replayed, wrong)
            wrong[both] &= ~_is_close(replayed[both].cpu(), self.value[both])
        return wrong

    def first_wrong(self, replayed: torch.Tensor, unless: "_Reference") -> tuple[int, ...] | None:
        """Return the first index at which ``replayed`` agrees with neither this nor ``unless``, or None."""
        wrong = self.wrong(replayed)
        if isinstance(unless.value, torch.Tensor) and unless.value.dim() == wrong.dim():
            right = unless.written & ~unless.wrong(replayed)
            both = _common(wrong, right)
            wrong[both] &= ~right[both]
        at = wrong.nonzero()
        return tuple(at[0].tolist()) if len(at) else None


_NOTHING = _Reference()


class _Derived:
    """The metadata that a backend derives eagerly from one batch, by leaf."""

    def __init__(self, backend: AttentionBackend, batch: ForwardBatch, shape: GraphShape) -> None:
        once, again = (_leaves(backend.init_metadata_eager(batch, fill=fill), shape) for fill in (0, 1))
        self._leaves = {
            path: _Reference(value, again.get(path, (_ABSENT, False))[0], bounded=is_bounded)
            for path, (value, is_bounded) in once.items()
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __getitem__(self, path: str) -> _Reference:
        return self._leaves.get(path, _NOTHING)


class Diagnosis:
    """The diagnosis of one wrong replay.

    Args:
        lane: The lane of the replay.
        backend: A backend like the lane's, on the shadow cache.
        replay: The batch, view and metadata of the replay.
        caches: Tensors of the KV caches, which are not compared as metadata.
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
        """Return the cause of the wrong replay."""
        found = list(self._wrong_in_view())
        if found:
            return _first(found, hint="check the fill of the slot, and any write to it after the fill")
        replay = self._replay
        try:
            eager = _Derived(self._backend, replay.batch, replay.shape)
            padded = _Derived(self._backend, replay.rows or replay.view, replay.shape)
            metadata = {path: value for path, (value, _) in _leaves(replay.metadata, replay.shape).items()}
        except Exception as error:  # noqa: BLE001  a plugin error must not hide the difference
            return _rest(
                "the view agrees in its live rows; metadata could not be compared:"
                f" {type(error).__name__}: {error}",
                self._padded_view(),
            )
        found = list(self._wrong_in_metadata(metadata, eager, padded))
        if found and self._lane.backend.records_metadata and found[0].in_slot:
            name = self._lane.driver.name
            cause = _first(
                found,
                hint="the hook does not write it: either fill_metadata() is wrong for this batch, or replay()"
                f" of the graph driver {name!r} does not repeat all recorded work; run `graphpact check"
                f" driver:{name}`, and `graphpact check` with the backend's name",
            )
            by = f"the graph makes this metadata: graph driver {name!r} replays the recorded fill_metadata()"
            return replace(cause, text=f"{cause.text}; {by}")
        if found:
            return _first(
                found,
                hint="init_metadata_replay() must refresh every tensor in place; a graph keeps host numbers"
                " of its capture: make a number valid for every batch, or put it in a tensor",
            )
        text = (
            "every field agrees in its live rows; the cause is in the padding rows, in the contents of the"
            " cache, or in the recorded work itself"
        )
        by_padding = [  # host numbers depend on the shape, so padding changes them anyway
            other.field
            for other in self._wrong_in_metadata(metadata, eager, None)
            if isinstance(metadata.get(other.field), torch.Tensor)
        ]
        if by_padding:
            text += f"; changed by padding, not by the replay: {_list(by_padding, ', ')}"
        return _rest(
            text,
            [
                *self._padded_view(),
                *self._padded_metadata(metadata, eager, padded),
                *self._frozen(),
            ],
        )

    # -- live rows -------------------------------------------------------------------------------

    def _wrong_in_view(self) -> Iterator[_Finding]:
        """Yield the fields whose live rows differ from the batch."""
        for path, value in self._batch.items():
            replayed = self._view.get(path, _ABSENT)
            if not isinstance(value, torch.Tensor) and not isinstance(replayed, torch.Tensor):
                continue
            slot = self._memory.slot_of(replayed)
            if slot is not None and (slot.is_computed or slot.source_fn is not None):
                continue  # its value is not a copy of the field
            if slot is not None and slot.optional and value is None:
                continue  # the slot keeps its initial value
            yield from self._differs(path, replayed, _Reference(value, value))

    def _wrong_in_metadata(
        self, metadata: Mapping[str, Any], eager: _Derived, padded: _Derived | None
    ) -> Iterator[_Finding]:
        """Yield the fields that agree with the metadata of neither the batch nor the padded view.

        Padding may change fields of a correct replay: a count of rows, or elements that no kernel reads.
        """
        for path in dict.fromkeys([*eager, *metadata]):
            replayed = metadata.get(path, _ABSENT)
            unless = _NOTHING if padded is None else padded[path]
            yield from self._differs(path, replayed, eager[path], unless=unless)

    # -- padding rows ----------------------------------------------------------------------------

    def _padded_view(self) -> list[_Finding]:
        """Return the fields whose padding rows differ from those at capture.

        Rows that no padding policy explains come first.
        """
        dummy = dict(walk({"view": self._lane.runner.dummy(self._replay.shape)}))
        found = []
        for path, replayed in self._view.items():
            slot, captured = self._memory.slot_of(replayed), dummy.get(path)
            if slot is None or slot.is_computed or not isinstance(captured, torch.Tensor):
                continue
            batch = self._batch.get(path, _ABSENT)
            real = _Reference(batch, batch)
            rank, than = 0, "at capture"
            if slot.keeps_tail:
                rank, than = 2, f"kept because {slot.reason}, at capture"
            elif _holds_pad_value(replayed, real, slot):
                rank, than = 1, "its pad value, at capture"
            reference = _Reference(captured, captured)
            found += [
                (rank, finding)
                for finding in self._differs(path, replayed, reference, unless=real, than=than)
            ]
        return [finding for _, finding in sorted(found, key=lambda pair: pair[0])]

    def _padded_metadata(
        self, metadata: Mapping[str, Any], eager: _Derived, padded: _Derived
    ) -> Iterator[_Finding]:
        """Yield the fields that differ from the metadata that the backend derives from the padded view."""
        for path in padded:
            replayed = metadata.get(path, _ABSENT)
            yield from self._differs(
                path, replayed, padded[path], unless=eager[path], than="derived from the view"
            )

    def _frozen(self) -> Iterator[_Finding]:
        """Yield the host numbers of the view that differ from the batch: a graph keeps those of capture."""
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
        """Yield a finding if ``replayed`` agrees with neither ``reference`` nor ``unless``."""
        slot, at = self._memory.slot_of(replayed), None
        if isinstance(replayed, torch.Tensor) and isinstance(reference.value, torch.Tensor):
            if storage_id(replayed) in self._caches:
                return
            if slot is not None and slot.role == "workspace":
                return
            at = reference.first_wrong(replayed, unless)
            if at is None:
                return
        elif reference.holds(replayed) or unless.holds(replayed):
            return
        where = path if not at else f"{path}{list(at)}"
        owner = f" ({slot.label})" if slot is not None else ""
        yield _Finding(
            path.removesuffix(_TYPE),
            f"{where}: replay {_show(replayed, at)}, {than} {_show(reference.value, at)}{owner}",
            in_slot=slot is not None,
        )


def _leaves(metadata: Any, shape: GraphShape) -> dict[str, tuple[Any, bool]]:
    """Return the leaves of metadata by path, and the types of its containers; each with its ``bounded``."""
    values = dict(walk({"metadata": metadata}))
    return {
        f"{promise.path}{_TYPE}" if promise.form else promise.path: (
            promise.type if promise.form else values[promise.path],
            promise.bounded,
        )
        for promise in Pact.of(shape, metadata=metadata).promises
        if promise.value is not ANY  # an argument of tasks, which the graph does not read here
    }


def _rest(text: str, suspects: Sequence[_Finding]) -> Cause:
    """Return the cause if all live rows agree."""
    if suspects:
        text += f"; suspects: {_list([finding.text for finding in suspects], '; ')}"
        hint = "check that no kernel depends on the value of a suspect; see its owner and padding policy"
    else:
        hint = (
            "the graph read memory that the replay did not refresh, or recorded another code path."
            ' `graphpact doctor --memory` lists what graphs read; verify.pact = "always" detects moved'
            " tensors; strict = true for the lane detects rows that were not written"
        )
    return Cause(text, hint, suspects=tuple(finding.field for finding in suspects))


def _first(found: Sequence[_Finding], *, hint: str) -> Cause:
    """Return the cause with the first finding in full, and the fields of the others."""
    text = f"first field that differs: {found[0].text}"
    if len(found) > 1:
        text += f"; also {_list([finding.field for finding in found[1:]], ', ')}"
    return Cause(text, hint, field=found[0].field)


def _list(words: Sequence[str], between: str) -> str:
    more = f"{between}and {len(words) - _MAX_LISTED} more" if len(words) > _MAX_LISTED else ""
    return between.join(words[:_MAX_LISTED]) + more


def _common(a: torch.Tensor, b: torch.Tensor) -> tuple[slice, ...]:
    """Return the index of the leading block that both tensors have."""
    return tuple(slice(min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))


def _is_close(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements that are equal; floats within the tolerance of their dtype."""
    if not (a.is_floating_point() and b.is_floating_point()):
        return a == b
    tolerance = max(model_tolerance(dtype) for dtype in (a.dtype, b.dtype))
    return torch.isclose(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def _holds_pad_value(replayed: torch.Tensor, real: _Reference, slot: GraphSlot) -> bool:
    """Return whether the padding rows of a slot hold its pad value."""
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
