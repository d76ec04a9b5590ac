"""Test bugs that the suite once missed because no batch or lane of a run showed them.

The museum has the bugs of public threads. The bugs here depend on a class of inputs, and each is planted in
one lane: a capture that fails in some lanes only, ranks of prefill, eager steps after replays, one shape
captured again, drafts of one step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphpact import ForwardBatch, ForwardMode, GraphShape, hookimpl
from graphpact.attention import AttentionBackend, each_step
from graphpact.errors import EngineError
from graphpact.runners import GraphRunner
from graphpact.step import StepOutputs
from graphpact.tensors import same
from graphpact_conformance.draws.batches import Drawn, draw
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.draws.choice import CPU, can_be_high, of_another_model
from graphpact_conformance.draws.chosen_batches import corner, edges, of_mixed_tiers, steady, tier_ends
from graphpact_conformance.draws.lanes import TILES, Config
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.experiments.look_alikes import takes_live_rows_for_padding
from graphpact_conformance.lane.reference_backend import ReferenceBackend, ReferenceMetadata
from graphpact_conformance.lane.reference_runner import ReferenceRunner, ReferenceSizes
from graphpact_conformance.results import Finding, Outcome, Result
from graphpact_conformance.suite import PlannedLane, examine_lane, experiments_of, planned_lanes
from graphpact_conformance.targets import Options

OPTIONS = Options(size="quick", examples=1, shrink=False)


def lanes(
    backend: type[AttentionBackend] = ReferenceBackend,
    runner: type[GraphRunner] = ReferenceRunner,
    *,
    case: str,
    values: Sequence[str] = (),
) -> list[PlannedLane]:
    """Return the lanes of a kind of step with unusual values, in which all experiments run."""
    kind: Any = "attention_backend" if runner is ReferenceRunner else "runner"
    plans = planned_lanes(backend, runner, OPTIONS, kind=kind, values=values)
    return [plan for plan in plans if str(plan.lane.config.case.plain) == case]


def results(plan: PlannedLane, *names: str) -> list[Result]:
    """Return the results of some experiments in a lane; of all if none is named."""
    chosen = [e for e in EXPERIMENTS if e.name in names]
    assert len(chosen) == len(names)
    return [*examine_lane(plan, OPTIONS, experiments=chosen or EXPERIMENTS)]


def findings(found: Iterable[Result]) -> dict[str | None, Finding]:
    """Return the first finding of each rule."""
    return {result.rule: result.findings[0] for result in found if result.findings}


# -- lanes that cannot be captured --------------------------------------------------------------------


class _NoPagesOfOne(ReferenceBackend):
    """Cannot be captured with pages of one slot, which it declares."""

    def allocate_metadata(self, view: Any, shape: Any, buffers: Any) -> Any:
        if self.context.limits.page_size == 1:
            raise RuntimeError("a table of pages of one slot is too wide")
        return super().allocate_metadata(view, shape, buffers)


def test_a_lane_that_cannot_be_captured_fails_although_few_experiments_run_in_it() -> None:
    """A capture that fails in a light lane is a finding about the declared support, not a rule that waits."""
    (plan,) = lanes(_NoPagesOfOne, case="decode", values=["page1"])
    found = findings(examine_lane(replace(plan, is_full=False), OPTIONS))
    assert "too wide" in found["GP12"].actual
    assert found["GP12"].experiment == "captures"


class _FewPages(ReferenceBackend):
    """Refuses caches whose page numbers do not fit into 16 bits."""

    error: type[Exception] = EngineError

    def __init__(self, context: Any) -> None:
        if len(context.kv_cache.k[0]) // context.limits.page_size > 2**15:
            raise self.error("too many pages for a table of 16 bits")
        super().__init__(context)


@pytest.mark.skipif(not can_be_high(CPU), reason="the system has no sparse memory")
@pytest.mark.parametrize("error", [EngineError, ValueError])
def test_a_plugin_may_refuse_a_very_large_cache_by_an_engine_error(error: type[Exception]) -> None:
    """The lane is unsupported, with the plugin's words; any other error there is a failure."""
    backend = type("Refuses", (_FewPages,), {"error": error})
    (plan,) = lanes(backend, case="decode", values=["high"])
    every = [*examine_lane(plan, OPTIONS)]
    if error is EngineError:
        assert {result.outcome for result in every} == {Outcome.UNSUPPORTED}
        assert all("too many pages for a table" in (result.reason or "") for result in every)
    else:
        assert "too many pages" in findings(every)["GP12"].actual


# -- ranks --------------------------------------------------------------------------------------------


class _OwnTokens(ReferenceRunner):
    """Fits a batch by its own tokens, whatever the other ranks have."""

    def fit(self, batch: ForwardBatch) -> Any:
        return super().fit(replace(batch, global_num_tokens_cpu=None))


class _FirstTwoRanks(ReferenceRunner):
    """Looks at the tokens of the first two ranks."""

    def fit(self, batch: ForwardBatch) -> Any:
        together = batch.global_num_tokens_cpu
        return super().fit(replace(batch, global_num_tokens_cpu=together and together[:2]))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("runner", "case"),
    [(_OwnTokens, "extend"), (_FirstTwoRanks, "target_verify"), (_FirstTwoRanks, "extend")],
)
def test_unequal_ranks_take_one_graph_in_every_mode(runner: type[GraphRunner], case: str) -> None:
    """Ranks of prefill, and a largest rank that is neither the first nor the second, are stepped too."""
    (plan,) = lanes(runner=runner, case=case)
    found = findings(results(plan, "ranks_agree"))
    assert found["GP17"].experiment == "ranks_agree"
    (right,) = lanes(runner=type("Right", (ReferenceRunner,), {}), case=case)
    assert findings(results(right, "ranks_agree")) == {}


class _CountOfAllRanks(ReferenceRunner):
    """Writes the tokens of all ranks to a count of the view."""

    name = "num_token_non_padded"

    def populate(self, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        super().populate(registry, batch, shape)
        if batch.global_num_tokens_cpu is not None:
            registry.get_slot(self.name).slice_for(0, 0).fill_(sum(batch.global_num_tokens_cpu))


class _OtherRows(ReferenceRunner):
    """Writes other positions if ranks have unequal numbers of tokens."""

    def populate(self, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        super().populate(registry, batch, shape)
        if len({*(batch.global_num_tokens_cpu or ())}) > 1:
            registry.get_slot("positions").slice_for(0, batch.num_tokens).add_(1)


@pytest.mark.parametrize("case", ["decode", "extend"])
@pytest.mark.parametrize(
    ("runner", "members", "field"),
    [
        (_CountOfAllRanks, {}, "view.num_token_non_padded on rank"),
        (_CountOfAllRanks, {"name": "global_num_tokens_gpu"}, "view.global_num_tokens_gpu on rank"),
        (_OtherRows, {}, "tokens on the ranks: token "),
    ],
)
def test_counts_and_results_of_unequal_ranks_are_compared(
    runner: type[GraphRunner], members: dict[str, str], field: str, case: str
) -> None:
    """A count, or a result, that is wrong only if ranks have unequal batches breaks GP17, with the loads."""
    (plan,) = lanes(runner=type("Uneven", (runner,), members), case=case)
    found = findings(results(plan, "ranks_agree"))
    assert found.keys() == {"GP17"}
    assert field in (found["GP17"].field or "")
    assert "tokens on the ranks" in (found["GP17"].field or "")


def test_ranks_whose_requests_are_in_different_tiers_take_one_graph() -> None:
    """A choice of the graph by a rank's own lengths breaks GP17 where ranks gather."""
    (plan,) = lanes(runner=type("Tiers", (_Tiers,), {"gathers_apart": True}), case="decode")
    found = findings(results(plan, "ranks_agree"))
    assert found["GP17"].field == "the replayed shape"
    (right,) = lanes(runner=type("Tiers", (_Tiers,), {}), case="decode")
    assert findings(results(right, "ranks_agree")) == {}


# -- graphs by length ---------------------------------------------------------------------------------

_SHORT = 37
"""The most tokens of a request for which the graphs of short requests are right."""


class _TiersOfLength(ReferenceRunner):
    """Has a second graph of each size, which is wrong for requests of more than `_SHORT` tokens."""

    reach: int = _SHORT
    gathers_apart = False

    def shapes(self) -> Any:
        return tuple(replace(s, variant=v) for s in super().shapes() for v in ("", "short"))

    def fit(self, batch: ForwardBatch) -> Any:
        shapes = [replace(shape, variant="") for shape in self.shapes()]
        found = ReferenceSizes(tuple(dict.fromkeys(shapes))).fit(batch)
        is_short = max(batch.seq_lens_cpu.tolist(), default=0) <= self.reach
        no_ranks = self.gathers_apart or batch.global_num_tokens_cpu is None
        is_graph = isinstance(found, GraphShape)
        return replace(found, variant="short") if is_graph and is_short and no_ranks else found

    def compose(self, forward: Any, step: Any) -> Any:
        if not step.shape.variant:
            return super().compose(forward, step)

        def region() -> Any:
            outputs = forward(step.view, step.metadata, step.backend.forward)
            given = {name: (tensor, outputs.axes[name]) for name, tensor in outputs.items()}
            given["rows"] = outputs["rows"] + (step.view.seq_lens > _SHORT)[:, None], "tokens"
            return StepOutputs(**given)

        return region


@pytest.mark.parametrize("reach", [_SHORT, _SHORT + 1])
def test_requests_end_at_the_lengths_at_which_a_runner_takes_another_graph(reach: int) -> None:
    """A graph for short requests that serves one token too many is found, whatever the length is."""
    runner = type("Tiers", (_TiersOfLength,), {"reach": reach})
    (plan,) = lanes(runner=runner, case="decode")
    found = findings(results(plan, "answers_replayed"))
    assert bool(found) is (reach > _SHORT)


class _Tiers(_TiersOfLength):
    """Captures each tier with a request of its longest length; all graphs are right."""

    longest: Any = staticmethod(max)
    most_of_long = 81

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        batch = super().dummy(shape)
        lens = torch.full_like(batch.seq_lens, _SHORT if shape.variant else self.most_of_long)
        return replace(batch, seq_lens=lens, seq_lens_cpu=lens.clone())

    def fit(self, batch: ForwardBatch) -> Any:
        lens = [type(self).longest(batch.seq_lens_cpu.tolist(), default=0)]
        return super().fit(replace(batch, seq_lens_cpu=torch.tensor(lens)))

    def compose(self, forward: Any, step: Any) -> Any:
        return ReferenceRunner.compose(self, forward, step)


def test_a_batch_longer_than_the_dummy_of_its_graph_breaks_gp12() -> None:
    """A tier that is chosen by the shortest request, and a limit that is off by one, are found by ``fit``."""

    def found(**members: Any) -> dict[str | None, Finding]:
        (plan,) = lanes(runner=type("Tiers", (_Tiers,), members), case="decode")
        return findings(results(plan, "graph_choice"))

    assert found() == {}
    for wrong in ({"longest": staticmethod(min)}, {"reach": _SHORT + 1}):
        assert "short], whose dummy has at most 37 tokens" in found(**wrong)["GP12"].actual
    assert "whose dummy has at most 80 tokens" in found(most_of_long=80)["GP12"].actual


@pytest.mark.parametrize("most", [5, 37, 60])
def test_batches_of_mixed_tiers_have_one_longer_request_in_both_orders(most: int) -> None:
    """Every change of the graph is found, and one request of the upper tier is beside those of the lower."""
    (plan,) = lanes(case="decode", values=["tall"])
    config = plan.lane.config
    ends = tier_ends(config, lambda problem: len(problem.requests[0].cached) > most)
    assert ends == [(most, most + 1)]
    first, last, equal = (
        [len(request.cached) for request in problem.requests] for problem in of_mixed_tiers(config, *ends[0])
    )
    assert first == last[::-1] == [most + 1, *equal[1:]]
    assert equal == [most] * config.most_requests


class _DummiesOfOneTier(_TiersOfLength):
    """Captures every graph with the dummy of the short tier."""


def test_a_finding_about_a_dummy_says_what_fit_returned() -> None:
    """A dummy for which ``fit`` gives another variant breaks GP12, and the finding names the variant."""
    (plan,) = lanes(runner=_DummiesOfOneTier, case="decode")
    found = findings(results(plan, "dummies"))["GP12"]
    assert found.actual == "decode[bs=2, tokens=2, short]"
    assert found.expected.startswith("decode[bs=2, tokens=2] for its own dummy batch")


# -- eager steps after replays ------------------------------------------------------------------------


class _LastGraphs(ReferenceBackend):
    """An eager step reads the metadata of the last graph of its size."""

    last: Any = None

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        self.last = super().init_metadata_replay(view, shape, captured)
        return self.last

    def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> torch.Tensor:
        if isinstance(self.last, ReferenceMetadata) and len(self.last.last) == len(metadata.last):
            metadata = self.last
        return super().forward(q, k, v, layer, metadata)


def test_an_eager_step_after_a_replay_is_compared_with_the_oracle() -> None:
    """State from a replay must not affect an eager step; the finding says that graphs matter."""
    (plan,) = lanes(_LastGraphs, case="decode")
    found = findings(results(plan, "answers_eagerly"))[None]
    assert (found.field or "").startswith("an eager run after a replay")
    assert "without graphs it is right" in (found.help or "")


# -- one shape captured again -------------------------------------------------------------------------


class _TwoRegions(ReferenceBackend):
    """Metadata lies in two regions of the class, which captures take in turn."""

    kept: list[Any]

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.kept = [None, None]
        self.count = 0

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
        metadata = super().init_metadata_capture(view, shape)
        at, self.count = self.count % 2, self.count + 1
        region = self.kept[at]
        if region is None:
            region = self.kept[at] = torch.ones((), dtype=self.context.dtype, device=self.context.device)
        region.fill_(1.0 + shape.batch_size)
        self.scale, self.inverse = region, torch.full_like(region, 1.0 / (1.0 + shape.batch_size))
        return metadata

    def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> torch.Tensor:
        out = super().forward(q, k, v, layer, metadata)
        return out * self.scale * self.inverse if self.count else out


def test_one_shape_captured_again_leaves_the_others_as_they_are() -> None:
    """The suite finds a capture of a single shape that takes the memory of another shape's graph."""
    (plan,) = lanes(_TwoRegions, case="decode")
    found = findings(results(plan, "captured_again"))
    assert "captured again after one shape was captured again" in found["GP10"].expected


# -- orders, and what ran before ----------------------------------------------------------------------


class _LongestEagerStep(ReferenceBackend):
    """Records an operation more if the last eager step had a long request."""

    is_long = False

    def init_metadata_eager(self, view: ForwardBatch) -> Any:
        self.is_long = max(view.seq_lens_cpu.tolist(), default=0) == self.context.limits.max_context_len
        return super().init_metadata_eager(view)

    def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> torch.Tensor:
        out = super().forward(q, k, v, layer, metadata)
        return out * 1 if self.is_long and self.driver is not None and self.driver.is_capturing else out


def test_a_capture_comes_after_the_longest_eager_step() -> None:
    """State from an eager step of the longest requests must not change the recorded work."""
    (plan,) = lanes(_LongestEagerStep, case="decode")
    assert findings(results(plan, "cold_and_warm"))["GP10"].experiment == "cold_and_warm"


class _FirstBatchAlone(ReferenceBackend):
    """Is wrong for a request at position 0, unless it is in the first batch."""

    fill_is_device_only = False
    replays = 0
    always = False

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        self.replays += 1
        fresh = super().init_metadata_replay(view, shape, captured)
        if self.always or self.replays > 1:
            fresh.table[:, 0].masked_fill_(view.seq_lens == 1, 0)
        return fresh


@pytest.mark.parametrize("always", [True, False])
def test_a_look_alike_is_no_cause_where_it_is_right_as_the_first_batch(*, always: bool) -> None:
    """GP04 is for batches that are wrong for their numbers, not for what ran before them."""
    (plan,) = lanes(type("Looks", (_FirstBatchAlone,), {"always": always}), case="decode")
    rig = plan.lane.rig()
    ((exact, *others),) = plan.lane.drawn(1, 0)
    rig.step(exact)
    found = [*takes_live_rows_for_padding(plan.lane, rig, Drawn([exact, *others]))]
    assert found
    assert ("GP04" in {each.rule for each in found}) is always


class _WritesTheBatch(ReferenceRunner):
    """Advances positions in place, in eager steps too, whose view is the engine's batch."""

    def compose(self, forward: Any, step: Any) -> Any:
        region = super().compose(forward, step)

        def advances() -> Any:
            outputs = region()
            step.view.positions.add_(1)
            return outputs

        return advances


def test_an_eager_step_that_writes_the_batch_is_reported_with_the_field() -> None:
    """The finding names the field of the batch, even if all results are right."""
    (plan,) = lanes(runner=_WritesTheBatch, case="decode")
    found = findings(results(plan, "answers_eagerly"))
    assert found[None].field == "an eager run: batch.positions"


# -- what lanes have ----------------------------------------------------------------------------------


def test_quick_runs_are_strict_in_every_kind_of_step() -> None:
    """The plain lane of each kind runs strictly; a lane of a long context has its largest step."""
    plans = planned_lanes(ReferenceBackend, ReferenceRunner, OPTIONS)
    names = {str(plan): {e.name for e in experiments_of(plan, OPTIONS)} for plan in plans}
    plain = [plan for plan in plans if not plan.lane.config.unusual and not plan.lane.config.case.embeds]
    assert {plan.lane.config.case.plain for plan in plain} == {p.lane.config.case.plain for p in plans}
    assert [str(plan) for plan in plain if "strict_replays" not in names[str(plan)]] == []
    long = [plan for plan in plans if plan.lane.config.is_long]
    assert long
    assert [str(plan) for plan in long if "largest_step" not in names[str(plan)]] == []


def test_quick_runs_have_a_size_above_8_that_is_no_multiple_of_8() -> None:
    """Plain decode and prefill have a lane whose largest size is one, and that has a multiple of 8 too."""
    plans = planned_lanes(ReferenceBackend, ReferenceRunner, OPTIONS)
    for case in ("decode", "extend"):
        (config,) = [p.lane.config for p in plans if str(p) == f"{case}-page16-gqa-float32-tall"]
        sizes = [shape.batch_size for shape in config.shapes]
        assert sizes[-1] > 8
        assert sizes[-1] % 8
        assert [size for size in sizes if size > 8 and not size % 8]


def test_verified_trees_of_many_drafts_have_a_lane_in_quick_runs() -> None:
    """A quick run has a lane with trees whose mask has more columns than a word of 64 bits."""
    plans = planned_lanes(ReferenceBackend, ReferenceRunner, OPTIONS)
    widths = [plan.lane.config.case.tokens_per_request or 0 for plan in plans if plan.lane.config.case.tree]
    assert max(widths) > 64


def test_requests_end_at_every_tile_of_keys() -> None:
    """In a long lane some request has as many keys as each tile, with its new token, and one more."""
    (plan,) = lanes(case="decode", values=["long"])
    lengths = {len(r.cached) + 1 for problem in edges(plan.lane.config) for r in problem.requests}
    assert {n for tile in TILES for n in (tile, tile + 1)} <= lengths


class _DraftsOfOneStep(ReferenceBackend):
    """Does not refresh the slots of drafts where a draft has a single step."""

    fill_is_device_only = False

    @hookimpl
    def init_metadata_replay(self, view: Any, shape: GraphShape, captured: Any) -> Any:
        """Refresh, and clear the slots."""
        fresh = super().init_metadata_replay(view, shape, captured)
        for at, part in each_step(view, fresh):
            if self.context.limits.draft.num_steps == 1 and at.draft_step is not None:
                part.drafts.zero_()
        return fresh


@pytest.mark.sweep
def test_drafts_of_a_single_step_have_a_lane() -> None:
    """A bug of drafts of one step is found where lanes have them, and only there."""
    (single,) = lanes(_DraftsOfOneStep, case="draft_decode", values=["single"])
    assert "GP02" in findings(results(single, "answers_replayed", "replay_against_capture"))
    (plain,) = lanes(_DraftsOfOneStep, case="draft_decode")
    assert findings(results(plain, "answers_replayed", "replay_against_capture")) == {}


def test_mixed_layers_differ_in_all_that_a_layer_has() -> None:
    """Some layer has other heads, width, scale and window, and one the cache of another and sinks alone."""
    (plan,) = lanes(case="decode", values=["mixed"])
    first, special, other, shared = plan.lane.config.layers
    for name in ("num_q_heads", "num_kv_heads", "head_dim", "scaling"):
        assert getattr(other, name) != getattr(first, name)
    assert len({layer.sliding_window for layer in (first, special, other)}) == 3
    assert (shared.cache_layer, shared.sliding_window) == (first.layer_id, None)
    assert shared.softcap is not None


def test_another_model_differs_in_layers_of_the_same_numbers() -> None:
    """In every lane the first layers have other heads, widths and scales, and there are more or fewer."""
    can = ReferenceBackend.capabilities
    for values in ((), ("mixed",)):
        for plan in planned_lanes(ReferenceBackend, ReferenceRunner, OPTIONS, values=values):
            config = plan.lane.config
            other = of_another_model(config, can, CPU)
            assert other is not None
            assert len(other.layers) != len(config.layers)
            for mine, theirs in zip(config.layers, other.layers, strict=False):
                assert mine.layer_id == theirs.layer_id
                for name in ("num_q_heads", "scaling", "head_dim"):
                    assert getattr(mine, name) != getattr(theirs, name), (str(plan), name)


def _with_one_beginning(plan: PlannedLane) -> Problem:
    """Return the batch of a lane's edges whose requests all have one first page."""
    size = plan.lane.config.page_size
    pages = [(problem, [r.cached[:size] for r in problem.requests]) for problem in edges(plan.lane.config)]
    (found,) = (
        p for p, first in pages if len(first) > 1 and len(first[0]) == size and first[1:] == first[:-1]
    )
    return found


def test_requests_share_the_pages_of_one_beginning() -> None:
    """In one batch of every lane all requests have the first page in common, and no written slot."""
    (plan,) = lanes(case="decode")
    problem = _with_one_beginning(plan)
    written = [slot for token in problem.tokens for slot in token.slots]
    assert len({*written}) == len(written)
    assert not {*written} & {slot for request in problem.requests for slot in request.cached}


def test_keys_that_requests_share_are_the_same_in_every_run() -> None:
    """A cache is filled with one number for each element, also where several requests have a slot."""
    (plan,) = lanes(case="decode", values=["tall", "mixed"])
    problem, rig = _with_one_beginning(plan), plan.lane.build(capture=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)  # writes to equal indices have no fixed order then
    try:
        runs = []
        for _ in range(4):
            rig.load(problem)
            runs.append(rig.cache.contents())
    finally:
        torch.set_num_threads(threads)
    assert all(bool(same(run[name], first).all()) for run in runs for name, first in runs[0].items())


def test_every_lane_with_optional_fields_looks_for_stale_tails() -> None:
    """The experiment that finds stale padding rows runs in a runner's light lanes with optional fields."""
    (plan,) = lanes(case="target_verify", values=["fields"])
    light = replace(plan, lane=replace(plan.lane, kind="runner"), is_full=False)
    assert "unwritten_and_stale" in {e.name for e in experiments_of(light, OPTIONS)}
    plain = replace(light, lane=light.lane.like(replace(light.lane.config, fields=False)))
    assert "unwritten_and_stale" not in {e.name for e in experiments_of(plain, OPTIONS)}


def test_a_runner_with_optional_fields_has_them_in_every_kind_of_step() -> None:
    """A quick run of a runner has a lane with optional fields of each kind of step that it serves."""
    plans = planned_lanes(ReferenceBackend, ReferenceRunner, OPTIONS, kind="runner")
    kinds = {plan.lane.config.case.plain for plan in plans}
    assert {plan.lane.config.case.plain for plan in plans if plan.lane.config.fields} == kinds
    assert len({str(plan) for plan in plans}) == len(plans)


def test_no_batch_of_a_large_lane_is_longer_than_its_context() -> None:
    """The batches that are made rather than drawn keep the limits in lanes of every size."""

    def longest(config: Config) -> int:
        now, before = steady(config)
        made = [corner(config), *edges(config), now, *before]
        return max((len(r.table) for problem in made for r in problem.requests), default=0)

    options = replace(OPTIONS, size="normal")
    for plan in planned_lanes(ReferenceBackend, ReferenceRunner, options):
        config = plan.lane.config
        if config.case.tokens_per_request is not None:
            assert longest(config) <= config.context, str(plan)


# -- what right plugins do ----------------------------------------------------------------------------


def test_a_shape_may_have_more_requests_than_tokens() -> None:
    """Runners that pad every shape to the most requests get batches of one token or more for each request."""
    (plan,) = lanes(case="extend", values=["tall"])
    shapes = [GraphShape(ForwardMode.EXTEND, 40, tokens) for tokens in (16, 32, 130)]
    config = replace(plan.lane.config, capture_shapes=tuple(shapes))
    for sequence in draw(config, 30, 0):
        for problem, shape in zip(sequence, (shapes[2], shapes[0], None, shapes[2], shapes[1]), strict=True):
            assert min((len(request.tokens) for request in problem.requests), default=1) > 0
            assert shape is None or len(problem.tokens) <= shape.num_tokens


def test_a_case_without_drafts_has_one_size() -> None:
    """Sizes of drafts change only kinds of step that draft or verify."""
    assert Case(ForwardMode.DECODE).sized("deep") == Case(ForwardMode.DECODE)
    assert Case(ForwardMode.DRAFT_DECODE).sized("deep").num_steps > Case(ForwardMode.DRAFT_DECODE).num_steps
