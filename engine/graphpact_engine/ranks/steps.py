"""`RankSteps`: what the ranks of a replica run next, decided together.

    schedule   each attention group schedules its own requests. One exchange decides whether this step is a
               prefill or a decode for all; a group that planned the other one, or has no requests, is idle.
    agree      the batch gets the counts of all ranks, so that all take one shape, or all run eagerly

Prefill comes first, but two prefills never follow each other while a group wants to decode. Later lanes of a
step, those of drafts, exchange on their own.

Does not: choose requests (the scheduler does), or shapes (`Lane.fit` does).
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.errors import RankError
from graphpact.lane import Lane
from graphpact.ranks import RankStep, agreed
from graphpact.runners import RunnerContext
from graphpact.shapes import GraphShape
from graphpact_engine.ranks.processes import EngineRanks
from graphpact_engine.scheduled import ScheduledBatch
from graphpact_engine.scheduler import Scheduler

_NOTHING, _DECODE, _PREFILL = range(3)


class RankSteps:
    """The steps of one replica, on one of its ranks.

    Args:
        ranks: The ranks.
        lanes: The lanes of each mode, in their order.
        device: The device of the batches.

    Attributes:
        is_done: Whether no rank had a request at the last exchange.
    """

    def __init__(self, ranks: EngineRanks, lanes: Mapping[str, Sequence[Lane]], device: torch.device) -> None:
        self.is_done = True
        self._ranks = ranks
        self._lanes = lanes
        self._device = device
        self._was_prefill = False
        self._of_target: dict[str, list[RankStep]] = {}  # the exchange for the next batch, by lane mode

    def schedule(self, scheduler: Scheduler) -> ScheduledBatch | None:
        """Return what this rank runs, perhaps an idle batch; None if no rank has requests.

        Raises:
            RankError: Ranks with the same requests planned different batches.
        """
        watch = self._ranks.watch
        watch.step += 1
        watch.doing = "the exchange before a step"
        planned = scheduler.schedule()
        batch = None if planned is None else planned.batch
        phase = _NOTHING if batch is None else _DECODE if batch.forward_mode.is_decode else _PREFILL
        wants = batch is None or self._wants_graph(self._lanes.get(target_mode(batch), ()), batch)
        steps = self._ranks.exchange.tell(
            "a step of the engine",
            tokens=0 if batch is None else batch.num_tokens,
            requests=0 if batch is None else batch.batch_size,
            mode=phase,
            wants_graph=wants,
            digest=0 if planned is None else _digest(planned),
        )
        self._require_same_requests(steps)
        proposed = {step.mode for step in steps} - {_NOTHING}
        self.is_done = not proposed
        if self.is_done:
            return None
        chosen = max(proposed)
        if len(proposed) > 1 and self._was_prefill:
            chosen = _DECODE
        self._was_prefill = chosen == _PREFILL
        is_decode = chosen == _DECODE
        self._of_target = {
            "decode" if is_decode else "prefill": [
                s if s.mode == chosen else s._replace(tokens=0, requests=0, wants_graph=1) for s in steps
            ]
        }
        if planned is not None and phase == chosen:
            return planned
        scheduler.forget()
        return self._idle(scheduler, is_decode=is_decode)

    def _idle(self, scheduler: Scheduler, *, is_decode: bool) -> ScheduledBatch:
        """Return a step without requests."""
        prefill = ForwardMode.MIXED if scheduler.mixed else ForwardMode.EXTEND
        batch = idle_batch(ForwardMode.DECODE if is_decode else prefill, self._device)
        slots = batch.out_cache_loc.view(0, 1).expand(0, scheduler.num_reserved) if is_decode else None
        return ScheduledBatch(batch, [], [], 0, slots, None if is_decode else [])

    def agree(self, role: str, lanes: Sequence[Lane], batch: ForwardBatch) -> ForwardBatch:
        """Return a batch of a lane of ``role`` with what all ranks decided; see `graphpact.ranks.agreed`.

        Raises:
            RankError: Another rank runs a lane of another role.
        """
        steps = self._of_target.pop(role, None)
        if steps is None:
            steps = self._ranks.exchange.tell(
                f"a step of the lane {role!r}",
                tokens=batch.num_tokens,
                requests=batch.batch_size,
                wants_graph=self._wants_graph(lanes, batch),
            )
        gathers = lanes[0].runner.context.require_gathered_buffer
        batch = agreed(batch, steps, self._ranks.layout, gathers=gathers)
        is_idle = not batch.batch_size and any(isinstance(lane.fit(batch), GraphShape) for lane in lanes)
        return replace(batch, forward_mode=ForwardMode.IDLE) if is_idle else batch

    @staticmethod
    def _wants_graph(lanes: Sequence[Lane], batch: ForwardBatch) -> bool:
        """Return whether a lane has a graph for a batch; a rank without requests takes any."""
        return not batch.batch_size or any(isinstance(lane.fit(batch), GraphShape) for lane in lanes)

    def _require_same_requests(self, steps: Sequence[RankStep]) -> None:
        """Refuse ranks with the same requests and different batches: their schedulers have diverged."""
        for first, *others in self._ranks.layout.sharing:
            for other in others:
                if steps[other][:-1] != steps[first][:-1]:
                    self._refuse(steps, first, other)

    def _refuse(self, steps: Sequence[RankStep], first: int, other: int) -> NoReturn:
        names = self._ranks.exchange.ranks
        one, two = (
            f"rank {names[at]} has {steps[at].requests} requests, {steps[at].tokens} tokens, checksum"
            f" {steps[at].digest:08x}"
            for at in (first, other)
        )
        raise RankError(
            f"ranks of one attention group planned different batches in step {self._ranks.watch.step}: {one};"
            f" {two}",
            hint="they get the same requests and sample the same tokens: look for a rank-local decision,"
            " such as a time, a random number, or free memory",
            rule="GP17",
        )


def _digest(planned: ScheduledBatch) -> int:
    """Return a checksum of the requests of a step and of their newest tokens."""
    newest = ((r.request_id, len(r.output_token_ids), r.output_token_ids[-1:]) for r in planned.requests)
    return zlib.crc32(str([*newest]).encode())


def target_mode(batch: ForwardBatch) -> str:
    """Return the mode of the lanes that run a decode, extend or mixed batch of the target model."""
    return "decode" if batch.forward_mode.is_decode else "prefill"


def scratch_batch(idle: ForwardBatch, context: RunnerContext) -> ForwardBatch:
    """Return the batch that a rank without requests runs in an eager step: one request, on scratch memory.

    Models and kernels need not support batches without rows. None of its tokens counts as real.

    Args:
        idle: A batch without requests, of the step's mode and with its fields.
        context: That of the lane's runner.
    """
    width = context.tokens_per_request or 1
    of_requests = ("req_pool_indices", "seq_lens", "extend_seq_lens", "num_correct_drafts")
    fields = {
        name: tensor.new_zeros(1 if name.removesuffix("_cpu") in of_requests else width, *tensor.shape[1:])
        for name, tensor in idle.tensors().items()
    }
    for name in fields.keys() & {"seq_lens", "seq_lens_cpu"}:
        fields[name].fill_(max(context.padded_seq_len, width))
    for name in fields.keys() & {"extend_seq_lens", "extend_seq_lens_cpu", "tree_mask"}:
        fields[name].fill_(1)
    return replace(idle.with_tensors(fields), batch_size=1, num_token_non_padded_cpu=0)


def idle_batch(mode: ForwardMode, device: torch.device) -> ForwardBatch:
    """Return a batch of ``mode`` without requests."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    host = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=0,
        input_ids=none,
        positions=none,
        out_cache_loc=none,
        req_pool_indices=none,
        seq_lens=none,
        seq_lens_cpu=host,
        extend_seq_lens=none if mode.is_ragged else None,
        extend_seq_lens_cpu=host if mode.is_ragged else None,
    )
