"""`LaneSet`: the lanes of an engine, one of which runs each batch.

Does not: build a lane, or schedule batches.
"""

import contextlib
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.errors import ConfigError
from graphpact.lane import Lane
from graphpact.shapes import GraphShape
from graphpact.step import StepOutputs
from graphpact_engine.errors import ModelCaptureError
from graphpact_engine.logs import log_event
from graphpact_engine.ranks.stages import PipelineStage
from graphpact_engine.ranks.steps import RankSteps, scratch_batch, target_mode

_log = logging.getLogger(__name__)


class LaneSet:
    """The lanes of an engine by their mode in the configuration, such as ``decode``.

    Of several lanes of one mode, the first with a shape that fits a batch runs it. If none fits, the first
    lane of the mode runs it eagerly.

    Args:
        lanes: The lanes of each mode, in their order.
        ranks: Decides with other ranks about every step; None for one process.
        stage: Gets hidden states from the stage before, and passes them on; None for a whole model.

    Raises:
        ConfigError: A lane never runs, because an earlier lane of its mode takes all its batches.
    """

    def __init__(
        self,
        lanes: Mapping[str, Sequence[Lane]],
        ranks: RankSteps | None = None,
        stage: PipelineStage | None = None,
    ) -> None:
        self._of_mode = lanes
        self._ranks = ranks
        self._stage = stage
        self._num_reasons = dict.fromkeys(itertools.chain(*lanes.values()), 0)  # logged reasons of eager runs
        for each in lanes.values():
            _require_each_can_run(each)

    def run(self, mode: str, batch: ForwardBatch) -> StepOutputs:
        """Run a batch in a lane of ``mode``; add the number of its tokens if the lane's graphs read it."""
        if self._ranks is not None:
            batch = self._ranks.agree(mode, self._of_mode[mode], batch)
        if self._stage is not None:
            batch = self._stage.receive(batch)
        lane = self.choose(mode, batch)
        if not batch.batch_size and batch.forward_mode is not ForwardMode.IDLE:  # ranks run eagerly
            outputs = lane.run(scratch_batch(batch, lane.runner.context)).rows(0, 0)
        else:
            is_read = lane.shapes and lane.runner.context.num_token_non_padded
            outputs = lane.run(_counted(batch) if is_read else batch)
        if len(lane.stats.eager) > self._num_reasons[lane]:
            self._log_reason(lane, batch)
        if self._stage is not None:
            self._stage.send(outputs)
        return outputs

    def run_target(self, batch: ForwardBatch) -> StepOutputs:
        """Run a decode, extend or mixed batch of the target model."""
        return self.run(target_mode(batch), batch)

    def choose(self, mode: str, batch: ForwardBatch) -> Lane:
        """Return the lane of ``mode`` that runs a batch."""
        lanes = self._of_mode[mode]
        if len(lanes) == 1:
            return lanes[0]
        return next((lane for lane in lanes if isinstance(lane.fit(batch), GraphShape)), lanes[0])

    def choose_target(self, batch: ForwardBatch) -> Lane:
        """Return the lane that runs a decode, extend or mixed batch of the target model."""
        return self.choose(target_mode(batch), batch)

    def capture(self) -> None:
        """Capture every shape of every lane.

        Raises:
            CaptureError: Capturing a shape failed.
        """
        for lane in self._num_reasons:
            try:
                lane.capture_all()
            except ModelCaptureError as error:
                setting = f"--set lanes.{lane.name}.capture=false"
                error.hint = f"the line is the model's own; run the lane without graphs: {setting}"
                raise

    def close(self) -> None:
        """Release the graphs of every lane.

        Raises:
            EngineError: A driver failed to release a graph; every other graph was released.
        """
        with contextlib.ExitStack() as stack:
            for lane in self._num_reasons:
                stack.callback(lane.close)

    def _log_reason(self, lane: Lane, batch: ForwardBatch) -> None:
        """Log an eager run if it is the first one with its reason in its lane and mode."""
        (mode, reason) = [*lane.stats.eager][-1]
        self._num_reasons[lane] = len(lane.stats.eager)
        log_event(
            _log,
            logging.INFO,
            "eager run",
            lane=lane.name,
            mode=mode.value,
            reason=reason.name,
            why=reason.text,
            batch_size=batch.batch_size,
            num_tokens=batch.num_tokens,
        )


def _counted(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch with the number of its tokens, all of which are real."""
    # The device writes the number itself: no copy from the host.
    count = torch.full((1,), batch.num_tokens, dtype=torch.int32, device=batch.device)
    return replace(batch, num_token_non_padded=count, num_token_non_padded_cpu=batch.num_tokens)


def _require_each_can_run(lanes: Iterable[Lane]) -> None:
    """Refuse a lane that never runs; ``lanes`` are all lanes of one mode, in their order."""
    for earlier, lane in itertools.combinations(lanes, 2):
        shapes, taken = set(lane.runner.shapes()), set(earlier.runner.shapes())
        first = f"lanes.{earlier.name} comes first and captures"
        if not shapes:
            why = "it captures nothing, and of several lanes of one mode only the first runs eagerly"
            hint = "put it first, or remove it"
        elif earlier.runner.declines:  # it leaves batches to the later lane
            continue
        elif shapes == taken:
            why, hint = f"{first} the same shapes", "give it other batch_sizes, or remove it"
        elif shapes < taken:
            why, hint = f"{first} all its shapes", "put it first, or give it other batch_sizes"
        else:
            continue
        raise ConfigError(
            f"lanes.{lane.name}, after lanes.{earlier.name} of the same mode, never runs: {why}",
            hint=hint,
        )
