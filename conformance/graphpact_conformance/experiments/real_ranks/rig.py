"""`RankRig`: a strict lane of one rank, whose model communicates, and whose steps are agreed with the others.

Does not: choose batches, or judge a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from graphpact.parallel import get_parallel
from graphpact.ranks import RankExchange, RankLayout, RankObserver, RankWatch, agreed
from graphpact.shapes import EagerReason, GraphShape
from graphpact.step import RegionContext
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.real_ranks.model import RankModel, padded_rows, right_columns
from graphpact_conformance.experiments.real_ranks.scenes import Scene
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.oracle import Answer, answer
from graphpact_conformance.records.steps import Ready, StepRecord
from graphpact_tape.tape import TapeDriver


@dataclass(frozen=True)
class Ranks:
    """All ranks, on one of them.

    Args:
        rank: This rank.
        group: All ranks.
        exchange: Of all ranks.
        watch: Of all ranks.
    """

    rank: int
    group: dist.ProcessGroup
    exchange: RankExchange
    watch: RankWatch

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()


class RankRig(Rig):
    """The strict lane of this rank.

    Args:
        lane: The lane under test.
        ranks: All ranks.
        layout: How they share requests. The context of `graphpact.parallel` has the same place.

    Attributes:
        layout: The argument.
        refused: The last reason of the runner, asked before the exchange, for a batch that a shape holds.
    """

    net: RankModel

    def __init__(self, lane: LaneUnderTest, ranks: Ranks, layout: RankLayout) -> None:
        self.layout = layout
        self.refused: EagerReason | None = None
        self._ranks = ranks
        super().__init__(
            lane.config,
            backend=lane.backend,
            runner=lane.runner,
            driver=partial(TapeDriver, strict=True),
            strict=True,
            provider=lane.provider,
            device=lane.device,
            pact="always",
            capture=False,
            watch=lane.watch,
            observers=[RankObserver(ranks.exchange, ranks.watch, strict=True)],
            model=partial(RankModel, group=ranks.group, layout=layout),
        )
        self.lane.composing = self._composing
        self._alone: dict[int, tuple[Problem, Answer]] = {}

    def _composing(self, context: RegionContext) -> None:
        self.net.is_eager = context.is_eager

    def step_together(self, scene: Scene, ready: Ready | None = None) -> StepRecord:
        """Agree with the other ranks on a step, and run this rank's batch of a scene; raise its error.

        Every rank asks its runner once for a shape, with or without requests.

        Args:
            scene: The batches of all ranks.
            ready: See `Rig.step`.

        Raises:
            RankError: The ranks do different things, or another rank did not come.
        """
        problem = scene.problems[self.layout.attention_group]
        batch = self.batch_of(problem)
        fit = self.fit(batch)
        if scene.fits and batch.batch_size and isinstance(fit, EagerReason) and fit not in self.declines:
            self.refused = fit
        steps = self._ranks.exchange.tell(
            f"a step with {scene.about}",
            tokens=batch.num_tokens,
            requests=batch.batch_size,
            wants_graph=isinstance(fit, GraphShape) or not batch.batch_size,
        )
        together = agreed(batch, steps, self.layout, gathers=True)
        record = self.step(problem, batch=together, ready=ready, may_decline=True)
        if record.error is not None:
            raise record.error
        return record

    def right(self, scene: Scene, record: StepRecord) -> Answer:
        """Return the right results of this rank's batch of a scene, from the batches of all ranks."""
        alone = [self._answer_alone(problem) for problem in scene.problems]
        own = alone[self.layout.attention_group]
        tokens = [len(problem.tokens) for problem in scene.problems]
        rows = padded_rows(self.layout, tokens) if record.shape is None else record.shape.num_tokens
        columns = right_columns([each.rows["rows"] for each in alone], rows, self._ranks.size)
        mine = own.rows["rows"]
        whole = torch.cat([mine, columns.to(mine.dtype).expand(len(mine), -1)], dim=1)
        return replace(own, rows={"rows": whole})

    @torch.inference_mode()
    def _answer_alone(self, problem: Problem) -> Answer:
        """Return the oracle's answer without the layer that communicates, computed once."""
        known = self._alone.get(id(problem))
        if known is None:
            self.load(problem)
            self.net.is_alone = True
            with get_parallel().override(attn_tp_rank=0, attn_tp_size=1):
                context = replace(self.backend.context, kv_cache=self.cache.copy())
                found = answer(problem, self.batch_of(problem), self.net, context, oracle=self.oracle)
            self.net.is_alone = False
            known = self._alone[id(problem)] = problem, found
        return known[1]


def layouts(rank: int, size: int) -> Sequence[tuple[str, RankLayout]]:
    """Return the ways in which ranks share requests, each with a description."""
    found = [
        ("each rank has its own requests", RankLayout(rank, size, attention_data=size)),
        ("all ranks share the requests", RankLayout(rank, size)),
    ]
    if size > 2 and size % 2 == 0:
        halves = RankLayout(rank, size, attention_data=2)
        found.append(("each half of the ranks has its own requests", halves))
    return found
