"""`Verifier`: runs a share of a lane's batches again, eagerly, on a copy of the KV cache.

The copy matters: an eager run on the live cache would write the right keys over what a wrong replay
wrote, and so hide it. After both runs the logits of the real rows must agree, and so must the whole
KV cache outside the scratch page: a replay that writes to another slot is found there. The page table
must be as it was before the replay.

As an observer of the lane it sees the view and the metadata that the replay was prepared with. Where the
runs differ it reads them, after the replay since a graph may write its own metadata, and names what
differs first:

    view           the real rows, against the batch
    metadata       against what the backend derives eagerly, from the batch and from the padded view: what
                   agrees with either is right, and what the backend leaves unwritten is not compared
    padded rows    suspects, where all of that agrees: what capture did not have there, or what the
                   backend does not derive from the view

Does not: repair anything, or look at batches that ran eagerly anyway.
"""

import enum
import math
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpact.attention import AttentionBackend, KVBuffers
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot
from graphpact.errors import EngineError, ReplayError, VerificationError
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane
from graphpact.pact import Pact, walk
from graphpact.shapes import GraphShape

# Replay and eager run may take other kernels, because their row counts differ: sums in another order.
_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}
_COARSEST = 1e-1  # of any other dtype
_MANY = 4  # of more fields, the others are counted

_Around = Generator[None, Any, Any]


@dataclass(slots=True)
class _Replay:
    """What was seen of one replay."""

    batch: ForwardBatch
    shape: GraphShape
    view: ForwardBatch
    view_before: ForwardBatch
    """A copy of the view as it was when it was made: the graph may write its slots."""
    metadata: Any = None


class Verifier:
    """Stands around `Lane.run` and holds a share of its replays to an eager run.

    A lane gets its observers when it is built, so a verifier comes first and joins its lane afterwards::

        verifier = Verifier(...)
        lane = Lane(..., observers=[verifier])
        verifier.join(lane)
        logits = verifier.run(batch)

    Args:
        make_backend: ``(kv_cache) -> backend``: builds the lane's kind of backend on another cache.
        kv_cache: The live cache.
        shadow: A cache of the same shape; overwritten for each verified step.
        share: Of the replays, 0 to 1.
        page_size: KV slots in a page; page 0 is scratch and not compared.
        seed: Of the choice of steps.

    Attributes:
        verified: Replays that were held to an eager run so far.
        largest_difference: Of all logits, keys and values that were compared so far.
    """

    def __init__(
        self,
        *,
        make_backend: Callable[[KVBuffers], AttentionBackend],
        kv_cache: KVBuffers,
        shadow: KVBuffers,
        share: float,
        page_size: int,
        seed: int = 0,
    ) -> None:
        self.share = share
        self.verified = 0
        self.largest_difference = 0.0
        self._live = [*kv_cache.k, *kv_cache.v]
        self._shadow = [*shadow.k, *shadow.v]
        self._backend = make_backend(shadow)
        self._page_size = page_size
        self._random = random.Random(seed)  # noqa: S311  it picks steps, it keeps no secret
        self._lane: Lane | None = None
        self._looking: tuple[ForwardBatch, ForwardBatch] | None = None  # a batch, and its copy
        self._replay: _Replay | None = None

    @property
    def lane(self) -> Lane:
        """Whose replays are verified.

        Raises:
            EngineError: It has joined none.
        """
        if self._lane is None:
            raise EngineError(
                "the verifier has joined no lane",
                hint="build the lane with observers=[verifier], then call verifier.join(lane)",
            )
        return self._lane

    def join(self, lane: Lane) -> None:
        """Verify replays of ``lane`` from here on.

        Raises:
            EngineError: It observes another lane, or this one was built without it.
        """
        if self._lane is not None:
            raise EngineError(
                f"the verifier of lane {self._lane.name!r} cannot be that of {lane.name!r} too",
                hint="build one verifier for each lane",
            )
        if not lane.plugin_manager.is_registered(self):
            raise EngineError(
                f"lane {lane.name!r} was built without the verifier that is to join it",
                hint="give it to the lane: Lane(..., observers=[verifier])",
            )
        self._lane = lane

    # -- looking on: outermost, to see what the lane gets ----------------------------------------

    @hookimpl(wrapper=True, tryfirst=True)
    def prepare_replay(self, batch: ForwardBatch, shape: GraphShape) -> _Around:
        """See the view of a verified step."""
        view = yield
        if self._looking is not None:
            given, kept = self._looking
            seen = kept if batch is given else batch
            self._replay = _Replay(seen, shape, view, _copy_of(view))
        return view

    @hookimpl(wrapper=True, tryfirst=True)
    def init_metadata_replay(self) -> _Around:
        """See the metadata of a verified step."""
        metadata = yield
        if self._replay is not None:
            self._replay.metadata = metadata
        return metadata

    # -- the step --------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Return what the lane returns; raise where an eager run of a replayed batch differs.

        Raises:
            VerificationError: Names the request row or the KV slot that differs most, by how much, and
                the first field of view or metadata that differs; or the entry of the page table that
                the replay changed.
            EngineError: It has joined no lane.
        """
        lane = self.lane
        if self._random.random() >= self.share:
            return lane.run(batch)
        torch._foreach_copy_(self._shadow, self._live)
        table = lane.backend.context.req_to_token
        table_before = table.clone()
        kept = _copy_of(batch)  # should a hook write into the batch
        eager_runs = lane.stats.eager.total()
        self._looking = batch, kept
        try:
            logits = lane.run(batch)
        except (RuntimeError, IndexError, ReplayError) as error:
            # Kernels make checks of their own, and know no field's name.
            if self._replay is None or self._replay.metadata is None:
                raise
            what = error.message if isinstance(error, ReplayError) else f"{error!r}"
            found = self._error(f"the replay of {self._replay.shape} fails: {what}", self._replay)
            if found.field is None and not found.suspects and isinstance(error, ReplayError):
                found.hint = error.hint or found.hint
            raise found from error
        finally:
            replay, self._replay, self._looking = self._replay, None, None
        if replay is None and lane.stats.eager.total() > eager_runs:
            return logits
        self._compare_table(table_before, table, replay)
        if replay is not None and lane.driver is not None and lane.driver.repeats_eager_kernels:
            # The same kernels on the same rows: other work of the graph shows down to the last bit,
            # which no tolerance for other kernels could tell from their rounding.
            view = replay.view_before
            metadata = self._backend.init_metadata_eager(view)
            padded = lane.model(view, self._backend, metadata)[: len(logits)]
            if padded.shape == logits.shape:
                self._compare_all(logits, padded, replay, exactly=True)
        metadata = self._backend.init_metadata_eager(kept)
        expected = lane.model(kept, self._backend, metadata)
        self.verified += 1
        if logits.shape != expected.shape:
            raise VerificationError(
                f"lane {lane.name!r}: {batch.batch_size} requests came back with logits"
                f" {tuple(logits.shape)}, an eager run gives {tuple(expected.shape)}",
                hint="a runner returns the rows of the batch's requests, and no padded ones",
                lane=lane.name,
                shape=None if replay is None else replay.shape,
            )
        self._compare_all(logits, expected, replay)
        return logits

    def _compare_all(
        self,
        logits: torch.Tensor,
        expected: torch.Tensor,
        replay: _Replay | None,
        *,
        exactly: bool = False,
    ) -> None:
        """Compare logits, and both KV caches outside the scratch page."""
        how: dict[str, Any] = {"replay": replay, "exactly": exactly}
        self._compare("logits of request", logits, expected, first=0, **how)
        layers = len(self._live) // 2
        for i, (live, shadow) in enumerate(zip(self._live, self._shadow, strict=True)):
            kind = "keys" if i < layers else "values"
            what = f"{kind} of layer {i % layers} in KV slot"
            self._compare(what, live, shadow, first=self._page_size, **how)

    def _compare_table(
        self, before: torch.Tensor, after: torch.Tensor, replay: _Replay | None
    ) -> None:
        if torch.equal(before, after):
            return
        row, position = (before != after).nonzero()[0].tolist()
        was, is_now = int(before[row, position]), int(after[row, position])
        raise VerificationError(
            f"lane {self.lane.name!r}: replay changed the page table: {_what(replay)}:"
            f" req_to_token[{row}, {position}] was {was} and is {is_now}",
            hint="the table is the engine's: recorded work and metadata hooks only read it",
            lane=self.lane.name,
            shape=None if replay is None else replay.shape,
            field="req_to_token",
        )

    def _compare(
        self,
        what: str,
        replayed: torch.Tensor,
        eager: torch.Tensor,
        *,
        first: int,
        replay: _Replay | None,
        exactly: bool = False,
    ) -> None:
        # Most rows of a cache are equal to the bit, and only the others are worth a closer look.
        unequal = (replayed[first:] != eager[first:]).flatten(1).any(dim=1)
        rows = unequal.nonzero().squeeze(1) + first
        if not len(rows):
            return
        a, b = replayed[rows].double(), eager[rows].double()
        # A difference to NaN is NaN, which no comparison of the maximum would see.
        same = (a == b) | (a.isnan() & b.isnan())  # poison that neither run touched agrees
        off = torch.where(same, 0.0, (a - b).abs()).flatten(1).amax(dim=1)
        off = off.nan_to_num(nan=float("inf"), posinf=float("inf"))
        scale = b.abs().nan_to_num(nan=0.0, posinf=0.0).amax().item()
        worst = off.amax().item()
        if not exactly:
            self.largest_difference = max(self.largest_difference, worst)
        tolerance = _TOLERANCE.get(eager.dtype, _COARSEST) * max(1.0, scale)
        if worst <= (0.0 if exactly else tolerance):
            return
        if self._is_the_runners(replayed, eager, replay, tolerance):
            what = f"the graph's outputs agree, what the runner made of them does not: {what}"
        rows_of = "an eager run of the same padded rows" if exactly else "eager run"
        raise self._error(
            f"replay and {rows_of} differ: {_what(replay)}: {what} {int(rows[off.argmax()])} by {worst:.3g}"
            f" (values up to {scale:.3g})",
            replay,
            largest_difference=worst,
        )

    def _is_the_runners(
        self,
        logits: torch.Tensor,
        eager: torch.Tensor,
        replay: _Replay | None,
        tolerance: float,
    ) -> bool:
        """Return whether the graph gave the eager run's logits, and its runner returned others."""
        graph = None if replay is None else dict(self.lane.graphs()).get(replay.shape)
        outputs = None if graph is None else graph.outputs
        if not isinstance(outputs, torch.Tensor) or outputs.shape[1:] != logits.shape[1:]:
            return False
        rows = outputs[: len(eager)]
        if rows.shape != eager.shape or rows.data_ptr() == logits.data_ptr():
            return False
        return bool(((rows.double() - eager.double()).abs() <= tolerance).all())

    def _error(
        self, what: str, replay: _Replay | None, *, largest_difference: float = math.inf
    ) -> VerificationError:
        """Return the error for ``what`` went wrong, with what made it so."""
        caches = [*self._live, *self._shadow]
        cause = _AROUND
        if replay is not None:
            cause = _Diagnosis(self.lane, self._backend, replay, caches).cause()
        return VerificationError(
            f"lane {self.lane.name!r}: {what}; {cause.text}",
            hint=cause.hint,
            lane=self.lane.name,
            shape=None if replay is None else replay.shape,
            field=cause.field,
            suspects=cause.suspects,
            largest_difference=largest_difference,
        )


# -- what differs first ----------------------------------------------------------------------------

_ABSENT = object()
_TYPE = ": type"  # of a container, among its parts
_PADDED_COUNT = "view.batch_size"  # the one field that is padded by its value
# What is compared by value; any other object is one run's own, such as a plan.
_VALUES = (
    *(bool, int, float, complex, str, bytes, enum.Enum),
    *(type, type(None), torch.dtype, torch.device, torch.Size),
)


@dataclass(frozen=True, slots=True)
class _Cause:
    """The end of an error's message, and its attributes."""

    text: str
    hint: str
    field: str | None = None
    suspects: tuple[str, ...] = ()


_AROUND = _Cause(
    "no hook prepared a replay for it, and the lane counted no eager run",
    "a runner replays through Lane.replay(), where hooks, pact and verification are",
)


def _what(replay: _Replay | None) -> str:
    return "a run around Lane.replay()" if replay is None else str(replay.shape)


def _copy_of(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch with tensors of its own."""
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in batch.tensors().items()}
    return replace(batch, **copies)


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
                self.written = _same(self.value, again.cpu())

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
            wrong[both] &= ~_same(replayed[both].cpu(), self.value[both])
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


class _Diagnosis:
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
        replay: _Replay,
        caches: Iterable[torch.Tensor],
    ) -> None:
        self._lane = lane
        self._backend = backend
        self._replay = replay
        self._batch, self._view = (
            {path: value for path, value in walk({"view": part}) if path != _PADDED_COUNT}
            for part in (replay.batch, replay.view)
        )
        self._caches = {cache.untyped_storage().data_ptr() for cache in caches}

    def cause(self) -> _Cause:
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
        by_padding = [other.field for other in self._wrong_in_metadata(metadata, eager, None)]
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
            slot = self._slot(replayed)
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
        dummy = dict(walk({"view": self._lane.runner.dummy_batch(self._replay.shape)}))
        found = []
        for path, replayed in self._view.items():
            slot, captured = self._slot(replayed), dummy.get(path)
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
        slot, at = self._slot(replayed), None
        if isinstance(replayed, torch.Tensor) and isinstance(reference.value, torch.Tensor):
            if replayed.untyped_storage().data_ptr() in self._caches:
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

    def _slot(self, value: Any) -> GraphSlot | None:
        registry = self._lane.registry
        if registry is None or not isinstance(value, torch.Tensor):
            return None
        return registry.slot_of(value)


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


def _rest(text: str, suspects: Sequence[_Finding]) -> _Cause:
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
    return _Cause(text, hint, suspects=tuple(finding.field for finding in suspects))


def _first(found: Sequence[_Finding], *, hint: str) -> _Cause:
    """Return the cause that names the first of ``found``, and the others less loudly."""
    text = f"first field that differs: {found[0].text}"
    if len(found) > 1:
        text += f"; also {_list([finding.field for finding in found[1:]], ', ')}"
    return _Cause(text, hint, field=found[0].field)


def _list(words: Sequence[str], between: str) -> str:
    more = f"{between}and {len(words) - _MANY} more" if len(words) > _MANY else ""
    return between.join(words[:_MANY]) + more


def _common(a: torch.Tensor, b: torch.Tensor) -> tuple[slice, ...]:
    """Return the leading block that both have."""
    return tuple(slice(min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return which elements are equal; of floats, as equal as two kernels make them."""
    if not (a.is_floating_point() and b.is_floating_point()):
        return a == b
    tolerance = max(_TOLERANCE.get(dtype, _COARSEST) for dtype in (a.dtype, b.dtype))
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
