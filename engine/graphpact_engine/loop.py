"""The three loops that run the steps of an engine; each call of ``step`` returns requests with new tokens.

    plain         schedule; run the batch in a lane; sample; commit
    speculative   the same, but an algorithm drafts and verifies instead of run and sample
    asynchronous  a decode runs while the next one is scheduled and launched from the tokens on the device;
                  then the loop waits for the tokens of the first one, and commits them

If a step fails, nothing of it is committed, and the next call repeats it.

Does not: choose requests (`Scheduler`), lanes (`LaneSet`), or tokens (`Sampler`).
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from graphpact_engine.lanes import LaneSet
from graphpact_engine.phases import EnginePhases
from graphpact_engine.ranks.stages import PipelineStage
from graphpact_engine.ranks.steps import RankSteps
from graphpact_engine.request import Request
from graphpact_engine.request_texts import RequestTexts
from graphpact_engine.sampler import PendingTokens, Sampler
from graphpact_engine.scheduled import ScheduledBatch
from graphpact_engine.scheduler import Scheduler
from graphpact_engine.speculation import Speculator
from graphpact_engine.threads import running_on


class PlainLoop:
    """Runs one batch after another.

    Args:
        scheduler: Chooses the batches, and commits their tokens.
        lanes: Run the batches.
        sampler: Chooses the tokens.
        texts: Find the stop strings.
        num_threads: CPU threads of a step.
        phases: The phases of a step, as observers wrap them.
        ranks: Decides with other ranks what runs; None for one process.
        stage: Shares the tokens of the last stage; None for a whole model.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        lanes: LaneSet,
        sampler: Sampler,
        texts: RequestTexts,
        *,
        num_threads: int,
        phases: EnginePhases,
        ranks: RankSteps | None = None,
        stage: PipelineStage | None = None,
    ) -> None:
        self._lanes = lanes
        self._stage = stage
        self._is_stopped = texts.is_stopped
        self._num_threads = num_threads
        schedule = scheduler.schedule if ranks is None else functools.partial(ranks.schedule, scheduler)
        self._schedule = phases.observed("schedule", schedule)
        self._sample = phases.observed("sample", sampler.sample)
        self._commit = phases.observed("commit", scheduler.commit)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one batch, and return the requests that received a token."""
        scheduled = self._schedule()
        return [] if scheduled is None else self._run(scheduled)

    def _run(self, scheduled: ScheduledBatch) -> list[Request]:
        """Run a scheduled batch and commit its tokens; a rank without requests only runs it."""
        with running_on(self._num_threads):
            tokens = self._tokens(scheduled)
        if not scheduled.requests:
            return []
        return self._commit(scheduled, tokens, self._is_stopped)

    def _tokens(self, scheduled: ScheduledBatch) -> list[list[int]]:
        """Run a scheduled batch and return the tokens of each of its requests."""
        outputs = self._lanes.run_target(scheduled.batch)
        if not scheduled.requests:
            return []

        def sample() -> list[int]:
            logits = outputs.logits if scheduled.all_sample else outputs.logits[scheduled.sampled_indices]
            return self._sample(logits, scheduled.sampled_requests)

        if self._stage is None:
            return scheduled.tokens_of(sample())
        return scheduled.tokens_of(self._stage.tokens(sample, len(scheduled.sampled_requests)))


class SpeculativeLoop(PlainLoop):
    """Runs one batch after another; each decode drafts several tokens and verifies them.

    Args:
        speculator: Runs the lanes, and chooses the tokens.
        others: The arguments of `PlainLoop`.
        more: The keyword arguments of `PlainLoop`.
    """

    def __init__(self, speculator: Speculator, *others: Any, **more: Any) -> None:
        super().__init__(*others, **more)
        self._speculator = speculator

    def _tokens(self, scheduled: ScheduledBatch) -> list[list[int]]:
        """Run a scheduled batch and return the tokens of each of its requests."""
        is_decode = scheduled.batch.forward_mode.is_decode
        return self._speculator.decode(scheduled) if is_decode else self._speculator.extend(scheduled)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A decode step that was launched and not committed.

    Args:
        scheduled: The step.
        tokens: Its tokens.
    """

    scheduled: ScheduledBatch
    tokens: PendingTokens


class AsyncLoop(PlainLoop):
    """Launches a decode before the tokens of the decode before it are read.

    Args:
        scheduler: See `PlainLoop`.
        lanes: See `PlainLoop`.
        sampler: See `PlainLoop`.
        others: The other arguments of `PlainLoop`.
        phases: See `PlainLoop`.
        more: The other keyword arguments of `PlainLoop`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        lanes: LaneSet,
        sampler: Sampler,
        *others: Any,
        phases: EnginePhases,
        **more: Any,
    ) -> None:
        super().__init__(scheduler, lanes, sampler, *others, phases=phases, **more)
        self._scheduler = scheduler
        self._flight: _Flight | None = None
        self._schedule_ahead = phases.observed("schedule", scheduler.schedule_ahead)
        self._start_sampling = phases.observed("sample", sampler.start)
        self._wait = phases.observed("wait", PendingTokens.read)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one batch, or a part of two decodes; return the requests that received a token."""
        flight, self._flight = self._flight, None
        if flight is None or all(request.is_finished for request in flight.scheduled.requests):
            scheduled = self._schedule()
            if scheduled is None:
                return []
            if not scheduled.batch.forward_mode.is_decode:
                return self._run(scheduled)
            flight = self._launch(scheduled)
        try:
            following = self._launch_after(flight)
        except BaseException:  # the step in flight is still valid
            self._scheduler.forget(ahead_only=True)
            self._flight = flight
            raise
        try:
            tokens = [[token] for token in self._wait(flight.tokens)]
            got = self._commit(flight.scheduled, tokens, self._is_stopped)
        except BaseException:
            self._scheduler.forget()
            raise
        self._flight = following
        return got

    def _launch_after(self, flight: _Flight) -> _Flight | None:
        """Launch the decode after the one in flight; return None if it has to wait for their tokens."""
        if not flight.tokens.is_free:
            return None
        scheduled = self._schedule_ahead(flight.tokens.tokens)
        return None if scheduled is None else self._launch(scheduled, ahead=1)

    def _launch(self, scheduled: ScheduledBatch, *, ahead: int = 0) -> _Flight:
        """Run a decode and choose its tokens, without waiting for the device.

        Args:
            scheduled: The decode.
            ahead: The number of decodes in flight before it.
        """
        with running_on(self._num_threads):
            logits = self._lanes.run_target(scheduled.batch).logits
            tokens = self._start_sampling(logits, scheduled.requests, ahead=ahead)
        return _Flight(scheduled, tokens)
