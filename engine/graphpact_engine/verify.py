"""`Verifier`: runs a share of a lane's batches again, eagerly, on a copy of the KV cache.

The copy matters: an eager run on the live cache would write the right keys over what a wrong replay
wrote, and so hide it. After both runs the logits of the real rows must agree, and so must the whole
KV cache outside the scratch page: a replay that writes to another slot is found there. The page table
must be as it was before the replay.

Where a driver's replays run the kernels of eager runs, as the tape's do, a replay is held to the bit to an
eager run of the same padded rows first; other kernels round otherwise, and have a tolerance.

As an observer of the lane it sees the view and the metadata that the replay was prepared with, from which
`graphpact_engine.diagnosis` names what differs first.

Does not: repair anything, or look at batches that ran eagerly anyway.
"""

import math
import random
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import torch

from graphpact.attention import AttentionBackend, KVBuffers, kv_tensors
from graphpact.batch import ForwardBatch
from graphpact.errors import EngineError, ReplayError, VerificationError
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane
from graphpact.shapes import GraphShape
from graphpact_engine.diagnosis import Cause, Diagnosis, Replay, tolerance_of

_Around = Generator[None, Any, Any]


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
        self._live = kv_tensors(kv_cache)
        self._shadow = kv_tensors(shadow)
        self._backend = make_backend(shadow)
        self._page_size = page_size
        self._random = random.Random(seed)  # noqa: S311  it picks steps, it keeps no secret
        self._lane: Lane | None = None
        self._looking: tuple[ForwardBatch, ForwardBatch] | None = None  # a batch, and its copy
        self._replay: Replay | None = None

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
            self._replay = Replay(seen, shape, view, _copy_of(view))
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
        torch._foreach_copy_([*self._shadow.values()], [*self._live.values()])
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
        replay: Replay | None,
        *,
        exactly: bool = False,
    ) -> None:
        """Compare logits, and both KV caches outside the scratch page."""
        how: dict[str, Any] = {"replay": replay, "exactly": exactly}
        self._compare("logits of request", logits, expected, first=0, **how)
        for name, live in self._live.items():
            what = f"{name.removeprefix('the ')} in KV slot"
            self._compare(what, live, self._shadow[name], first=self._page_size, **how)

    def _compare_table(
        self, before: torch.Tensor, after: torch.Tensor, replay: Replay | None
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
        replay: Replay | None,
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
        tolerance = tolerance_of(eager.dtype) * max(1.0, scale)
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
        replay: Replay | None,
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
        self, what: str, replay: Replay | None, *, largest_difference: float = math.inf
    ) -> VerificationError:
        """Return the error for ``what`` went wrong, with what made it so."""
        caches = [*self._live.values(), *self._shadow.values()]
        cause = _AROUND
        if replay is not None:
            cause = Diagnosis(self.lane, self._backend, replay, caches).cause()
        return VerificationError(
            f"lane {self.lane.name!r}: {what}; {cause.text}",
            hint=cause.hint,
            lane=self.lane.name,
            shape=None if replay is None else replay.shape,
            field=cause.field,
            suspects=cause.suspects,
            largest_difference=largest_difference,
        )


_AROUND = Cause(
    "no hook prepared a replay for it, and the lane counted no eager run",
    "a runner replays through Lane.replay(), where hooks, pact and verification are",
)


def _what(replay: Replay | None) -> str:
    return "a run around Lane.replay()" if replay is None else str(replay.shape)


def _copy_of(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch with tensors of its own."""
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in batch.tensors().items()}
    return replace(batch, **copies)
