"""`Verifier`: runs a share of a lane's replays again, eagerly, on a copy of the KV cache.

The copy matters: an eager run on the live cache would write the right keys over what a wrong replay
wrote, and so hide it. After both runs the logits of the real rows must agree, and so must the whole
KV cache outside the scratch page: a replay that writes to another slot is found there. The page table
must be as it was before the replay.

Where a driver's replays run the kernels of eager runs, as the tape's do, a replay is held to the bit to an
eager run of the same padded rows first; other kernels round otherwise, and have a tolerance.

It is an observer of the lane's hooks and of its steps: it sees the view and the metadata that a replay was
prepared with, from which `graphpact_engine.diagnosis` names what differs first. Observers that may change
what they see come after it in the lane's list, so that it sees what the lane gets.

Does not: repair anything, or look at batches that ran eagerly anyway.
"""

import math
import random
from collections.abc import Callable, Generator
from typing import Any

import torch

from graphpact.attention import AttentionBackend, KVBuffers, kv_tensors
from graphpact.batch import ForwardBatch
from graphpact.errors import EngineError, ReplayError
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane
from graphpact.shapes import GraphShape
from graphpact.step import StepOutputs
from graphpact.tensors import same, tolerance_of
from graphpact_engine.diagnosis import Cause, Diagnosis, Replay
from graphpact_engine.errors import VerificationError

_Around = Generator[None, Any, Any]
_ROWS = {"bs": "request", "tokens": "token", "none": "row"}


class Verifier:
    """Holds a share of a lane's replays to an eager run: ``Lane(..., observers=[verifier])``.

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
        """The lane whose replays are verified.

        Raises:
            EngineError: It has run no step yet.
        """
        if self._lane is None:
            raise EngineError(
                "the verifier has seen no step of a lane",
                hint="give it to the lane: Lane(..., observers=[verifier]), and run the lane",
            )
        return self._lane

    # -- the hooks -------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def prepare_replay(self, batch: ForwardBatch, shape: GraphShape) -> _Around:
        """See the view of a verified step."""
        view = yield
        if self._looking is not None:
            given, kept = self._looking
            seen = kept if batch is given else batch
            self._replay = Replay(seen, shape, view, _copy_of(view))
        return view

    @hookimpl(wrapper=True)
    def init_metadata_replay(self) -> _Around:
        """See the metadata of a verified step."""
        metadata = yield
        if self._replay is not None:
            self._replay.metadata = metadata
        return metadata

    # -- the step: in the order of the observers, inside a guard that poisons unowned memory first ---

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> _Around:
        """Compare the outputs of a replay with those of an eager run.

        Raises:
            VerificationError: Names the request row or the KV slot that differs most, by how much, and
                the first field of view or metadata that differs; or the entry of the page table that
                the replay changed.
            EngineError: It observes another lane already.
        """
        if self._lane not in (None, lane):
            raise EngineError(
                f"the verifier of lane {self.lane.name!r} cannot be that of {lane.name!r} too",
                hint="build one verifier for each lane",
            )
        self._lane = lane
        if self._random.random() >= self.share:
            return (yield)
        torch._foreach_copy_([*self._shadow.values()], [*self._live.values()])
        table = lane.backend.context.req_to_token
        table_before = table.clone()
        kept = _copy_of(batch)  # should a hook write into the batch
        eager_runs = lane.stats.eager.total()
        self._looking = batch, kept
        try:
            outputs: StepOutputs = yield
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
            return outputs
        self._compare_table(table_before, table, replay)
        if replay is not None and lane.driver.repeats_eager_kernels:
            # The same kernels on the same rows: other work of the graph shows down to the last bit,
            # which no tolerance for other kernels could tell from their rounding.
            padded = lane.forward_eager(replay.view_before, self._backend)
            padded = padded.rows(batch.batch_size, batch.num_tokens)
            if _shapes(padded) == _shapes(outputs):
                self._compare_all(outputs, padded, replay, exactly=True)
        expected = lane.forward_eager(kept, self._backend)
        self.verified += 1
        if _shapes(outputs) != _shapes(expected):
            raise VerificationError(
                f"lane {lane.name!r}: {batch.batch_size} requests came back with {_say(outputs)}, an eager"
                f" run gives {_say(expected)}",
                hint="a step returns the rows of the batch's requests, and no padded ones",
                lane=lane.name,
                shape=None if replay is None else replay.shape,
            )
        self._compare_all(outputs, expected, replay)
        return outputs

    def _compare_all(
        self,
        outputs: StepOutputs,
        expected: StepOutputs,
        replay: Replay | None,
        *,
        exactly: bool = False,
    ) -> None:
        """Compare every output, and both KV caches outside the scratch page."""
        how: dict[str, Any] = {"replay": replay, "exactly": exactly}
        for name, output in outputs.items():
            what = f"{name} of {_ROWS[outputs.axes[name]]}"
            self._compare(what, output, expected[name], first=0, **how)
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
        # Poison that neither run touched agrees.
        off = torch.where(same(a, b), 0.0, (a - b).abs()).flatten(1).amax(dim=1)
        off = off.nan_to_num(nan=float("inf"), posinf=float("inf"))
        scale = b.abs().nan_to_num(nan=0.0, posinf=0.0).amax().item()
        worst = off.amax().item()
        if not exactly:
            self.largest_difference = max(self.largest_difference, worst)
        tolerance = tolerance_of(eager.dtype) * max(1.0, scale)
        if worst <= (0.0 if exactly else tolerance):
            return
        rows_of = "an eager run of the same padded rows" if exactly else "eager run"
        raise self._error(
            f"replay and {rows_of} differ: {_what(replay)}: {what} {int(rows[off.argmax()])} by {worst:.3g}"
            f" (values up to {scale:.3g})",
            replay,
            largest_difference=worst,
        )

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
    "an observer of run_step returns what it was given, and runs nothing in its place",
)


def _what(replay: Replay | None) -> str:
    return "a step without a replay" if replay is None else str(replay.shape)


def _shapes(outputs: StepOutputs) -> dict[str, torch.Size]:
    return {name: output.shape for name, output in outputs.items()}


def _say(outputs: StepOutputs) -> str:
    return ", ".join(f"{name} {tuple(output.shape)}" for name, output in outputs.items())


def _copy_of(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch with tensors of its own."""
    return batch.with_tensors({name: tensor.clone() for name, tensor in batch.tensors().items()})
