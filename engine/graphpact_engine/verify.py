"""`Verifier`: runs a share of a lane's replays again, eagerly, on a copy of the KV cache.

The copy is needed: an eager run on the live cache would overwrite wrong keys of the replay with right ones.
After both runs the outputs of the live rows must agree, and so must the whole KV cache outside the scratch
page, which also detects writes to a wrong slot. The page table must not have changed.

If the replays of a driver run the same kernels as eager runs (the tape's do), a replay is first compared with
an eager run of the same padded rows: bit for bit if both ran the same operations on the same extents, since
other kernels, and other extents, round differently. Everything else is compared within a tolerance.

The verifier is an observer of the hooks and steps of a lane: it keeps the view and the metadata of a replay,
from which `graphpact_engine.diagnosis` names the first difference. Observers that change the results of hooks
must come after it in the lane's list, so that it receives what the lane receives.

Does not: repair anything, or verify batches that ran eagerly.
"""

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Generator
from typing import Any

import torch

from graphpact.attention import AttentionBackend, KVBuffers, kv_tensors
from graphpact.batch import ForwardBatch
from graphpact.errors import CaptureError, EngineError, ReplayError
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane
from graphpact.shapes import GraphShape
from graphpact.step import StepOutputs
from graphpact.tensors import model_tolerance, same
from graphpact_engine.diagnosis import Cause, Diagnosis, Replay
from graphpact_engine.errors import VerificationError
from graphpact_tape.tape import TapeDriver
from graphpact_tape.trace import TracedCall, first_difference

_Around = Generator[None, Any, Any]
_ROWS = {"bs": "request", "tokens": "token", "none": "row"}


class Verifier:
    """An observer that compares a share of replays with eager runs: ``Lane(..., observers=[verifier])``.

    Args:
        make_backend: ``(kv_cache) -> backend``: builds a backend like the lane's on another cache.
        kv_cache: The live cache.
        shadow: A cache of the same shape; overwritten in each verified step.
        share: Share of the replays to verify, 0 to 1.
        page_size: KV slots per page; page 0 is scratch and not compared.
        seed: Seed of the choice of steps.

    Attributes:
        verified: Number of verified replays.
        equal_to_the_bit: Number of verified replays that were bit-identical to an eager run of the same
            padded rows.
        largest_difference: Largest difference of the logits, keys and values compared so far.
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
        self.equal_to_the_bit = 0
        self.largest_difference = 0.0
        self._live = kv_tensors(kv_cache)
        self._shadow = kv_tensors(shadow)
        self._backend = make_backend(shadow)
        self._page_size = page_size
        self._random = random.Random(seed)  # noqa: S311  not for cryptography
        self._lane: Lane | None = None
        self._verifying: tuple[ForwardBatch, ForwardBatch] | None = None  # the batch and its copy
        self._replay: Replay | None = None

    @property
    def lane(self) -> Lane:
        """The lane whose replays are verified.

        Raises:
            EngineError: The lane has run no step yet.
        """
        if self._lane is None:
            raise EngineError(
                "the verifier has observed no step of a lane",
                hint="pass it to the lane, Lane(..., observers=[verifier]), and run the lane",
            )
        return self._lane

    # -- the hooks -------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def prepare_replay(self, batch: ForwardBatch, shape: GraphShape) -> _Around:
        """Keep the view of a verified step."""
        view = yield
        if self._verifying is not None:
            given, kept = self._verifying
            seen = kept if batch is given else batch
            self._replay = Replay(seen, shape, view, _copy_of(view))
        return view

    @hookimpl(wrapper=True)
    def init_metadata_replay(self, view: ForwardBatch) -> _Around:
        """Keep the metadata of a verified step, and the batch that it was made from."""
        metadata = yield
        if self._replay is not None:
            self._replay.rows, self._replay.metadata = view, metadata
        return metadata

    # -- the step: inside the observer of a strict lane, which poisons unowned memory first -----------

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> _Around:
        """Compare the outputs of a replay with those of an eager run.

        Raises:
            VerificationError: The replay differs. Names the request row or KV slot with the largest
                difference, and the first field of view or metadata that differs; or the entry of the
                page table that the replay changed.
            EngineError: The verifier already observes another lane.
        """
        if self._lane not in (None, lane):
            raise EngineError(
                f"the verifier of lane {self.lane.name!r} cannot also verify lane {lane.name!r}",
                hint="build one verifier for each lane",
            )
        self._lane = lane
        if self._random.random() >= self.share:
            return (yield)
        torch._foreach_copy_([*self._shadow.values()], [*self._live.values()])
        table = lane.backend.context.req_to_token
        table_before = table.clone()
        kept = _copy_of(batch)  # a hook may write into the batch
        eager_runs = lane.stats.eager.total()
        self._verifying = batch, kept
        try:
            outputs: StepOutputs = yield
        except (RuntimeError, IndexError, ReplayError) as error:
            # An error raised by a kernel does not name the field.
            if self._replay is None or self._replay.metadata is None:
                raise
            reason = error.message if isinstance(error, ReplayError) else f"{error!r}"
            found = self._error(f"the replay of {self._replay.shape} failed: {reason}", self._replay)
            if found.field is None and not found.suspects and isinstance(error, ReplayError):
                found.hint = error.hint or found.hint
            raise found from error
        finally:
            replay, self._replay, self._verifying = self._replay, None, None
        if replay is None and lane.stats.eager.total() > eager_runs:
            return outputs
        self._compare_table(table_before, table, replay)
        is_equal = False
        if replay is not None and lane.driver.repeats_eager_kernels:
            # The same kernels on the same rows give the same bits. So a difference too small for the
            # tolerance, which allows for rounding of other kernels, is detected here.
            padded = lane.forward_eager(replay.view_before, self._backend, live=kept)
            padded = padded.rows(batch.batch_size, batch.num_tokens)
            if _shapes(padded) == _shapes(outputs):
                is_equal = self._compare_all(outputs, padded, replay, as_padded=True)
        expected = lane.forward_eager(kept, self._backend)
        self.verified += 1
        self.equal_to_the_bit += is_equal
        if _shapes(outputs) != _shapes(expected):
            raise VerificationError(
                f"lane {lane.name!r}: a replay of {batch.batch_size} requests returned {_list(outputs)}, an"
                f" eager run returned {_list(expected)}",
                hint="a step must return the live rows of the batch, without padding rows",
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
        as_padded: bool = False,
    ) -> bool:
        """Compare every output, and the KV caches outside the scratch page; return whether all bits agree."""
        # Recording takes an extra run, so it is done at most once for all outputs and caches.
        repeated = (
            functools.cache(functools.partial(self._is_repeated, replay))
            if as_padded and replay is not None
            else None
        )
        options: dict[str, Any] = {"replay": replay, "repeated": repeated}
        pairs = [
            (f"{name} of {_ROWS[outputs.axes[name]]}", output, expected[name], 0)
            for name, output in outputs.items()
        ]
        pairs += [
            (f"{name.removeprefix('the ')} in KV slot", live, self._shadow[name], self._page_size)
            for name, live in self._live.items()
        ]
        equal = [self._compare(label, a, b, first=first, **options) for label, a, b, first in pairs]
        return all(equal)

    def _compare_table(self, before: torch.Tensor, after: torch.Tensor, replay: Replay | None) -> None:
        if torch.equal(before, after):
            return
        row, position = (before != after).nonzero()[0].tolist()
        was, is_now = int(before[row, position]), int(after[row, position])
        raise VerificationError(
            f"lane {self.lane.name!r}: replay changed the page table: {_shape_of(replay)}:"
            f" req_to_token[{row}, {position}] was {was} and is {is_now}",
            hint="only the engine writes req_to_token; recorded work and metadata hooks must only read it",
            lane=self.lane.name,
            shape=None if replay is None else replay.shape,
            field="req_to_token",
        )

    def _compare(
        self,
        label: str,
        replayed: torch.Tensor,
        eager: torch.Tensor,
        *,
        first: int,
        replay: Replay | None,
        repeated: Callable[[], bool] | None,
    ) -> bool:
        """Compare the rows from ``first`` on; return whether all their bits agree.

        Args:
            label: What a row is, for messages.
            replayed: The rows of the replay.
            eager: Those of the eager run.
            first: The first row to compare.
            replay: The replay.
            repeated: For an eager run of the same padded rows: returns `_is_repeated`; None for live rows.
        """
        # Most rows of a cache are equal bit for bit; only the others are compared in float64.
        unequal = (replayed[first:] != eager[first:]).flatten(1).any(dim=1)
        rows = unequal.nonzero().squeeze(1) + first
        if not len(rows):
            return True
        a, b = replayed[rows].double(), eager[rows].double()
        # A difference to NaN is NaN, which a maximum may miss: it becomes inf below.
        # Poison that neither run overwrote counts as equal.
        off = torch.where(same(a, b), 0.0, (a - b).abs()).flatten(1).amax(dim=1)
        off = off.nan_to_num(nan=float("inf"), posinf=float("inf"))
        scale = b.abs().nan_to_num(nan=0.0, posinf=0.0).amax().item()
        worst = off.amax().item()
        if not worst:
            return True
        self.largest_difference = max(self.largest_difference, worst)
        if worst <= model_tolerance(eager.dtype) * max(1.0, scale) and not (repeated and repeated()):
            return False
        other = "eager run" if repeated is None else "an eager run of the same padded rows"
        raise self._error(
            f"replay and {other} differ: {_shape_of(replay)}: {label} {int(rows[off.argmax()])} by"
            f" {worst:.3g} (values up to {scale:.3g})",
            replay,
            largest_difference=worst,
        )

    def _is_repeated(self, replay: Replay) -> bool:
        """Return whether an eager run of the same padded rows runs the operations of the graph.

        It records such a run, on the copy of the cache. Eager calls between segments are not recorded, so a
        graph with such calls does not count as repeated, unless they only attend. Without a trace, the
        declaration of the driver is trusted.
        """
        lane, view = self.lane, replay.view_before
        graph = lane.captured[replay.shape].graph
        recorded: list[TracedCall] | None = getattr(graph, "trace", None)
        if recorded is None or (graph.num_segments > 1 and not lane.runner.eager_attention):
            return recorded is None
        host = [*lane.driver.memory.host, *view.host_tensors()]
        driver = TapeDriver(lane.driver.device, traced=True)
        driver.declare(dataclasses.replace(lane.driver.memory, host=host))
        try:
            tape = driver.capture(
                lane.region_of(view, self._backend, live=replay.batch, driver=driver), warmup=0
            )
        except CaptureError:
            return False  # work that no graph can hold
        trace = getattr(tape, "trace", None) or []
        tape.release()
        # A graph that makes metadata does so in its first operations.
        return first_difference(recorded[len(recorded) - len(trace) :], trace) is None

    def _error(
        self, fault: str, replay: Replay | None, *, largest_difference: float = math.inf
    ) -> VerificationError:
        """Return the error for ``fault``, with the diagnosis of its cause."""
        caches = [*self._live.values(), *self._shadow.values()]
        cause = _NO_REPLAY
        if replay is not None:
            cause = Diagnosis(self.lane, self._backend, replay, caches).cause()
        return VerificationError(
            f"lane {self.lane.name!r}: {fault}; {cause.text}",
            hint=cause.hint,
            lane=self.lane.name,
            shape=None if replay is None else replay.shape,
            field=cause.field,
            suspects=cause.suspects,
            largest_difference=largest_difference,
        )


_NO_REPLAY = Cause(
    "no hook prepared a replay for this step, and the lane counted no eager run",
    "an observer of run_step must return the outputs of the step, and must not run other work instead",
)


def _shape_of(replay: Replay | None) -> str:
    return "a step without a replay" if replay is None else str(replay.shape)


def _shapes(outputs: StepOutputs) -> dict[str, torch.Size]:
    return {name: output.shape for name, output in outputs.items()}


def _list(outputs: StepOutputs) -> str:
    return ", ".join(f"{name} {tuple(output.shape)}" for name, output in outputs.items())


def _copy_of(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch with cloned tensors."""
    return batch.with_tensors({name: tensor.clone() for name, tensor in batch.tensors().items()})
