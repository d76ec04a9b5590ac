"""Batches that are shaped like another kind of step: they are drawn, and no lane replays them as its own."""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphpact import ForwardMode
from graphpact.batch import ForwardBatch
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane
from graphpact.runners import GraphRunner
from graphpact_conformance.draws.choice import configs_of, scaled_up
from graphpact_conformance.draws.chosen_batches import edges
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.asked_batches import lies_within, of_other_kinds
from graphpact_conformance.experiments.graph_choice import graph_choice
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.suite import planned_lanes
from graphpact_conformance.targets import Options
from graphpact_cuda_graph import CudaGraphRunner

CAN = ReferenceBackend.capabilities
CPU = torch.device("cpu")


def ragged() -> list[Config]:
    """Return ragged lanes, with plain and with unusual values of scale."""
    plain = [c for c in configs_of(CAN) if c.case.mode.is_ragged and c.dtype is torch.float32]
    return [*plain, *(scaled_up(config, CAN, CPU) for config in plain)]


def shape_of(problem: Problem) -> tuple[set[int], int]:
    """Return the numbers of new tokens of requests, and how many requests have no cached keys."""
    return {len(r.tokens) for r in problem.requests}, sum(not r.cached for r in problem.requests)


def test_ragged_lanes_have_prompts_of_a_verifys_width_and_of_one_token() -> None:
    """Such prompts are there alone, without others, and beside chunks; every batch fits the largest shape."""
    for config in ragged():
        shape, batches = config.shapes[-1], edges(config)
        for width in (1, 4):
            uniform = [(*shape_of(p), len(p.requests)) for p in batches if shape_of(p)[0] == {width}]
            assert any(fresh == count > 1 for _, fresh, count in uniform), str(config)
            assert any(0 < fresh < count for _, fresh, count in uniform), str(config)
        assert any(shape_of(p) == ({4}, 1) and len(p.requests) == 1 for p in batches), str(config)
        assert all(p.batch_size <= shape.batch_size and len(p.tokens) <= shape.num_tokens for p in batches)


def test_fit_is_asked_for_chunks_and_prompts_of_the_lanes_width() -> None:
    """Of each ragged mode there are chunks and prompts with the tokens of the lane's requests."""
    config = next(c for c in configs_of(CAN) if c.case.mode is ForwardMode.TARGET_VERIFY)
    wide = replace(config, case=config.case.sized("wide"))
    asked = [p for _, p in of_other_kinds(wide) if p.case.mode is ForwardMode.EXTEND]
    assert {(6,), (1,)} <= {tuple({len(r.tokens) for r in p.requests}) for p in asked}
    assert {0, 1} == {len(r.cached) for p in asked for r in p.requests}


def as_decode(batch: ForwardBatch) -> ForwardBatch:
    """Return a ragged batch of one-token requests as a decode."""
    return replace(batch, forward_mode=ForwardMode.DECODE, extend_seq_lens=None, extend_seq_lens_cpu=None)


class RunsChunksAsDecodes(CudaGraphRunner):
    """A runner whose wrapper of ``run_step`` replays chunks of one token."""

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> Generator[None, Any, Any]:
        """Return the outputs of a decode."""
        outputs = yield
        if batch.forward_mode is ForwardMode.EXTEND and batch.num_tokens == batch.batch_size:
            return lane.launch(lane.prepare(as_decode(batch)))
        return outputs


@pytest.mark.parametrize(("runner", "count"), [(CudaGraphRunner, 0), (RunsChunksAsDecodes, 1)])
@torch.inference_mode()
def test_a_lane_replays_no_batch_of_another_kind(runner: type[GraphRunner], count: int) -> None:
    """A replay of chunks of one token in a decode lane is GP12, although fit() returns a reason for them."""
    options = Options(size="quick", lanes=("decode-page16-gqa-float32",))
    (plan,) = planned_lanes(ReferenceBackend, runner, options, kind="runner")
    (steps,) = plan.lane.drawn(1, 0)
    found = [*graph_choice(plan.lane, steps)]
    assert [each.rule for each in found] == ["GP12"] * count
    assert all("extend batch with 1 new tokens" in each.expected for each in found)


def test_batches_of_other_lanes_are_run_only_within_the_memory() -> None:
    """A batch whose request rows or KV slots lie beyond those of a lane is not within it."""
    config = next(c for c in configs_of(CAN) if c.case.mode is ForwardMode.DECODE)
    (_, problem), *_ = of_other_kinds(config)
    assert lies_within(config, problem)
    (request, *_) = problem.requests
    assert not lies_within(config, replace(problem, requests=[replace(request, row=config.num_rows)]))
    beyond = [config.num_pages * config.page_size]
    assert not lies_within(config, replace(problem, requests=[replace(request, table=beyond)]))
