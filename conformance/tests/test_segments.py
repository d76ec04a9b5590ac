"""Graphs that attention leaves: backends are checked alone below them, runners with fields of images too."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.attention import AttentionBackend
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import GraphSlot
from graphpact.shapes import CaptureSizes, GraphShape
from graphpact_conformance import suite
from graphpact_conformance.draws.batches import draw, sequences
from graphpact_conformance.draws.cases import EMBEDS, SEGMENTS, Case
from graphpact_conformance.draws.choice import configs_of, plainest
from graphpact_conformance.draws.chosen_batches import of_size
from graphpact_conformance.draws.lanes import CONTEXT, VOCAB, Config
from graphpact_conformance.experiments.comparison import differences
from graphpact_conformance.lane.reference_backend import PaddedReferenceBackend, ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner, SegmentsRunner
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.suite import planned_lanes
from graphpact_conformance.suite.target import unsupported
from graphpact_conformance.targets import Options, Target
from graphpact_cuda_graph import pieces
from graphpact_cuda_graph.breakable import BreakableCudaGraphRunner
from graphpact_cuda_graph.piecewise import PiecewiseCudaGraphRunner
from graphpact_fa3 import FA3Backend
from graphpact_flashinfer import FlashInferBackend
from graphpact_trtllm_mla import TRTLLMMLABackend
from support import ListedCatalog

QUICK = Options(size="quick", examples=1, shrink=False)
BACKENDS = (ReferenceBackend, PaddedReferenceBackend, FA3Backend, FlashInferBackend, TRTLLMMLABackend)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as lanes do."""
    with torch.inference_mode():
        yield


def plain(case: Case, backend: type[AttentionBackend] = ReferenceBackend) -> Config:
    """Return the plain lane of a kind of step."""
    return plainest(configs_of(backend.capabilities, cases=(case,)))[0]


# -- backends below eager attention ------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_alone_is_checked_in_full_graphs_and_in_segments(backend: type[AttentionBackend]) -> None:
    """A backend of prefill has a lane of segments beside its full graphs, whatever its graph support."""
    plans = suite.lanes_of(Target("attention_backend", "mine"), QUICK, ListedCatalog(mine=backend))
    runners = {plan.lane.config.case: plan.lane.runner for plan in plans}
    assert runners[SEGMENTS] is SegmentsRunner
    assert runners[Case(ForwardMode.EXTEND)] is ReferenceRunner
    lane = next(plan.lane for plan in plans if plan.lane.config.case == SEGMENTS)
    assert lane.no_graphs_declared is None
    rig = lane.rig()
    assert {c.graph.num_segments for c in rig.lane.captured.values()} == {len(rig.layers) + 1}


@settings(derandomize=True, max_examples=4, deadline=None)
@given(data=st.data(), backend=st.sampled_from(BACKENDS))
def test_metadata_of_eager_calls_is_that_of_the_declared_rows(
    data: st.DataObject, backend: type[AttentionBackend]
) -> None:
    """Replays in segments agree with the oracle; metadata has the live tokens, or all where it is padded."""
    config = plain(SEGMENTS, backend)
    rig = Rig(config, backend=backend, runner=SegmentsRunner)
    for problem in data.draw(sequences(config)):
        step = rig.step(problem)
        assert step.error is None, step.error
        assert step.replays == 1
        assert step.shape is not None
        assert not differences(rig, step, rig.answer(problem))
        is_padded = backend.capabilities.eager_rows == "padded"
        tokens = step.shape.num_tokens if is_padded else len(problem.tokens)
        assert len(step.leaves["metadata.out_cache_loc"].value) == tokens
        if backend is FlashInferBackend:
            assert int(step.leaves["metadata.qo_indptr"].value[-1]) == step.shape.num_tokens


# -- runners whose attention leaves the graphs -------------------------------------------------------


def test_a_runner_is_checked_below_live_and_padded_metadata() -> None:
    """A runner whose attention leaves the graphs meets backends of both kinds of rows."""
    catalog = ListedCatalog(fast=BreakableCudaGraphRunner)
    plans = suite.lanes_of(Target("runner", "fast"), QUICK, catalog)
    assert {plan.lane.backend.capabilities.eager_rows for plan in plans} == {"live", "padded"}


@pytest.mark.few(1)
@pytest.mark.parametrize("counts", [False, True])
def test_the_model_of_the_suite_is_traced_once_for_all_shapes(
    *, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piecewise runner traces the suite's model once, whatever it captured before: a trace takes long."""
    splits, backend = [], pieces._backend
    monkeypatch.setattr(pieces, "_backend", lambda *args: splits.append(args) or backend(*args))
    lane = planned_lanes(ReferenceBackend, PiecewiseCudaGraphRunner, QUICK, kind="runner")[0].lane
    lane = lane.like(replace(lane.config, counts=counts))
    assert len(lane.rig().captured) == 2
    assert len(splits) == 1


# -- padding -----------------------------------------------------------------------------------------


def test_no_lane_limits_padding() -> None:
    """Batches of one token are replayed in every shape, however much padding a runner allows by default."""
    (plan, *_) = planned_lanes(ReferenceBackend, BreakableCudaGraphRunner, QUICK, kind="runner")
    lane = plan.lane
    assert lane.declined(of_size(lane.config, 1)) is None
    for steps in draw(lane.config, 8, 0):
        assert not any(map(lane.declined, steps))


# -- fields of images --------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", ["mha", "gqa", "mla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_reads_embeddings_and_their_positions(heads: str, dtype: torch.dtype) -> None:
    """Another embedding, or one of three positions, changes its token's rows; ids and positions do not."""
    config = next(
        c
        for c in configs_of(ReferenceBackend.capabilities, cases=(EMBEDS,))
        if (c.heads.name, c.dtype, c.page_size) == (heads, dtype, 16)
    )
    rig = Rig(config, backend=ReferenceBackend)
    problem = draw(config, 1, 0)[0].padded
    base = rig.step(problem)
    assert base.replays == 1
    assert not differences(rig, base, rig.answer(problem))
    assert base.rows is not None

    def changed(name: str, row: int | None, value: float) -> torch.Tensor:
        """Return for each token whether its rows are others with ``value`` in the first one."""

        def edit(view: ForwardBatch, _: Any) -> None:
            tensor = view.tensors()[name]
            tensor[row].fill_(value) if row is not None else tensor.fill_(value)

        step = rig.step(problem, ready=edit)
        assert step.rows is not None
        assert base.rows is not None
        return (step.rows["rows"] != base.rows["rows"]).any(dim=1)

    assert changed("input_embeds", 0, 0.3)[0]
    for axis in range(3):
        assert changed("mrope_positions", axis, CONTEXT - 1).any()
    assert not changed("input_ids", None, VOCAB - 1).any()
    assert not changed("positions", None, 3).any()


@settings(derandomize=True, max_examples=5, deadline=None)
@given(data=st.data())
def test_the_same_tokens_have_the_same_keys_in_every_shape(data: st.DataObject) -> None:
    """Keys made of embeddings have the same bits in a padded graph and in an eager step."""
    config = plain(EMBEDS)
    rig = Rig(config, backend=ReferenceBackend)
    for problem in data.draw(sequences(config)):
        replayed, eager = rig.step(problem), rig.step(problem, eagerly=True)
        for name, cache in replayed.caches.items():
            first = config.page_size
            assert torch.equal(cache[first:].nan_to_num(), eager.caches[name][first:].nan_to_num())


class OfTextAlone(ReferenceRunner):
    """A runner without slots for embeddings."""

    def slots(self) -> list[GraphSlot]:
        """Return all other slots."""
        return [s for s in super().slots() if s.name not in ("input_embeds", "mrope_positions")]


def test_a_runner_without_slots_for_embeddings_has_no_lane_of_them() -> None:
    """It is no fault to declare none, since lanes refuse such batches; the check says so."""
    catalog, target = ListedCatalog(mine=OfTextAlone), Target("runner", "mine")
    plans = suite.lanes_of(target, QUICK, catalog)
    assert EMBEDS not in {plan.lane.config.case for plan in plans}
    told = {r.lane: r for r in unsupported(target, catalog, plans, "cpu")}
    assert told[str(EMBEDS)].reason == "the runner declares no slots input_embeds and mrope_positions"


class OfThreeTokens(ReferenceRunner):
    """A runner with as many tokens as multimodal positions have axes."""

    def shapes(self) -> tuple[GraphShape, ...]:
        """Return one shape of three tokens."""
        return CaptureSizes.by_pairs(self.context.mode, [(3, 3)]).shapes


def test_the_tail_of_positions_is_along_their_tokens() -> None:
    """Padding rows of ``[3, T]`` are told from its three axes, even where T is 3."""
    config = replace(plain(EMBEDS), capture_shapes=(GraphShape(ForwardMode.EXTEND, 3, 3),))
    rig = Rig(config, backend=ReferenceBackend, runner=OfThreeTokens)
    leaf = rig.step(of_size(config, 2)).leaves["view.mrope_positions"]
    assert leaf.in_tail.tolist() == [[False, False, True]] * 3
