"""The words of findings: what a plugin raised, names of memory, rules and lanes, and the vocabulary."""

import json
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import pytest
import torch

from conformance_reports import drawn, finding, plugin, report, result
from graphpact import ForwardBatch, GraphShape
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy
from graphpact.errors import UsageError
from graphpact_cli import main
from graphpact_conformance import suite, vocabulary
from graphpact_conformance.draws.cases import CASES, DRAFTS, EMBEDS, SEGMENTS
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.draws.chosen_batches import of_size
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.experiments.comparison import same_step
from graphpact_conformance.experiments.real_ranks import RealRanks
from graphpact_conformance.experiments.uneven_ranks import differ_in_variant
from graphpact_conformance.lane.holders import holder_of, storages_of
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.lane.rig import StepRecord
from graphpact_conformance.report import rows, to_html
from graphpact_conformance.report.digest import to_fix, why_first
from graphpact_conformance.results import INVARIANT, Finding, Outcome, Result
from graphpact_conformance.rules import RULES, Evidence, causes_first, find_rule
from graphpact_conformance.suite import PlannedLane
from graphpact_conformance.targets import Options, Target
from support import ListedCatalog

QUICK = Options(size="quick", examples=1, shrink=False)
DECODE = next(c for c in configs_of(ReferenceBackend.capabilities) if str(c) == "decode-page16-gqa-float32")
LONG = next(c for c in configs_of(ReferenceBackend.capabilities) if str(c) == "extend-page16-gqa-float32")
CATALOG = ListedCatalog(mine=ReferenceBackend)


def found_in(lane: LaneUnderTest, *names: str, options: Options = QUICK) -> list[Result]:
    """Return the failures of some experiments in a lane; of all by default."""
    chosen = [e for e in EXPERIMENTS if not names or e.name in names]
    results = suite.examine_lane(PlannedLane(lane, is_full=True), options, experiments=chosen)
    return [each for each in results if each.outcome is not Outcome.PASS]


# -- what a plugin raises --------------------------------------------------------------------------


class PopulateRaises(ReferenceRunner):
    """A runner whose populate raises for a batch of one request."""

    def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
        """Raise for one request."""
        if batch.batch_size == 1:
            raise KeyError("no such request")
        super().populate(registry, batch, shape)


class ReplayRaises(ReferenceBackend):
    """A backend whose replay hook raises."""

    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Raise."""
        raise KeyError("no such request")


OF_NO_MODULE = type("OfNoModule", (ReplayRaises,), {"__module__": "made.at.run.time"})
"""A class without any information about its file."""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("lane", "hook"),
    [
        (LaneUnderTest(DECODE, runner=PopulateRaises, kind="runner"), "populate"),
        (LaneUnderTest(DECODE, ReplayRaises), "init_metadata_replay"),
        (LaneUnderTest(DECODE, OF_NO_MODULE), "init_metadata_replay"),
    ],
)
def test_an_error_of_a_hook_is_reported_with_its_line_and_nothing_else_is(
    lane: LaneUnderTest, hook: str
) -> None:
    """Every finding of a lane whose hook raises is that error, without a rule, with line, method and hook."""
    failures = found_in(
        lane,
        *("answers_replayed", "unwritten_and_stale", "replay_against_capture", "padding", "strict_replays"),
        *("interleaved", "repeated", "dummies"),
    )
    findings = [each for failed in failures for each in failed.findings]
    assert findings
    assert {f.rule for f in findings} == {None}
    assert {f.hook for f in findings} == {hook}
    assert {f.actual for f in findings} == {"KeyError: 'no such request'"}
    for each in findings:
        assert each.raised_at is not None
        place, _, method = each.raised_at.partition(" in ")
        assert place.startswith("tests/test_words.py:")
        assert method == f"{'PopulateRaises' if hook == 'populate' else 'ReplayRaises'}.{hook}"


def test_what_a_plugin_raised_comes_first() -> None:
    """An error that no rule describes comes before effects, with its result before others of its row."""
    raised = finding(None, raised_at="my/backend.py:3 in Mine.populate", hook=None, field=None)
    results = [
        result("fail", "GP01", findings=[finding("GP01", hook=None, field="a replay: token 0")]),
        result("fail", None, lane="a", findings=[finding(None)]),
        result("fail", None, lane="b", findings=[raised]),
    ]
    first, second = to_fix(rows(plugin(results)))
    assert (first.key, second.key) == ("general", "GP01")
    assert [each.lane for each in first.failures] == ["b", "a"]
    assert why_first([first, second]) == "the plugin raised an error at my/backend.py:3 in Mine.populate"
    assert "raised at" in drawn(report(plugin(results)))
    of_hook = result("fail", "GP01", findings=[finding("GP01", field=None)])
    assert [row.key for row in to_fix(rows(plugin([of_hook, *results[1:]])))] == ["GP01", "general"]


def test_an_error_that_a_rule_describes_comes_under_the_rule() -> None:
    """An error without a rule comes after the rule of a finding with the same line."""
    place = "my/backend.py:3 in Mine.populate"
    results = [
        result("fail", "GP13", findings=[finding("GP13", raised_at=place)]),
        result("fail", None, findings=[finding(None, raised_at=place)]),
    ]
    assert [row.key for row in to_fix(rows(plugin(results)))] == ["GP13", "general"]


def test_two_errors_are_the_same_only_by_type_message_and_line() -> None:
    """Two failed steps are the same step only if type, message and line of their errors are equal."""

    def failed(error: Exception, line: int = 0) -> StepRecord:
        problem = Problem(DECODE.case, [], 0)
        try:
            if line:
                raise error  # noqa: TRY301  another line
            raise error  # noqa: TRY301
        except Exception as caught:  # noqa: BLE001  any
            return StepRecord(problem, error=caught)

    same = partial(same_step, first_slot=0)
    assert same(failed(ValueError("a")), failed(ValueError("a")))
    assert not same(failed(ValueError("a")), failed(ValueError("b")))
    assert not same(failed(ValueError("a")), failed(TypeError("a")))
    assert not same(failed(ValueError("a")), failed(ValueError("a"), line=1))
    assert not same(failed(ValueError("a")), StepRecord(Problem(DECODE.case, [], 0)))


class HostileError(Exception):
    """An error whose message cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


def test_an_error_without_a_readable_message_is_reported() -> None:
    """A finding about an error whose ``__str__`` raises says its type."""
    told = LaneUnderTest(DECODE).of_error(HostileError(), expected="x").actual
    assert told.startswith("HostileError: its message cannot be read")


# -- stale rows through memory that is filled once -------------------------------------------------


class ThroughAnAttribute(ReferenceRunner):
    """A runner that copies live rows into memory of its own, and from there live and padding rows."""

    def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
        """Fill the slots, then seq_lens through memory that keeps rows of earlier batches."""
        super().populate(registry, batch, shape)
        self.copy_through(self.__dict__.setdefault("_held", self.lengths(registry).clone()), registry, batch)

    def lengths(self, registry: CudaGraphBufferRegistry) -> torch.Tensor:
        """Return the whole slot of lengths."""
        buffer = registry.get_slot("seq_lens").buffer
        assert buffer is not None
        return buffer

    def copy_through(
        self, held: torch.Tensor, registry: CudaGraphBufferRegistry, batch: ForwardBatch
    ) -> None:
        """Copy live rows into ``held``, and all of it into the slot."""
        held[: batch.batch_size].copy_(batch.seq_lens)
        self.lengths(registry).copy_(held)


class ThroughASlot(ThroughAnAttribute):
    """A runner that does the same through a slot with FILL_ONCE."""

    def slots(self) -> list[GraphSlot]:
        """Return the usual slots and one that is filled once."""
        once = {"axis": "bs", "padding_policy": PaddingPolicy.FILL_ONCE, "pad_value": 2, "owner": "test"}
        held = GraphSlot("test.held", lambda bs, _: (bs,), torch.int64, copy_from_fb=False, **once)
        return [*super().slots(), held]

    def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
        """Fill the slots, then seq_lens through the slot that is filled once."""
        ReferenceRunner.populate(self, registry, batch, shape)
        held = registry.get_slot("test.held").buffer
        assert held is not None
        self.copy_through(held, registry, batch)


@pytest.mark.few(1)
@pytest.mark.parametrize("runner", [ThroughAnAttribute, ThroughASlot])
def test_a_stale_tail_through_memory_filled_once_is_a_stale_tail(runner: type[ReferenceRunner]) -> None:
    """GP03 names the field; any other finding about the values is a bad padding value."""
    lane = LaneUnderTest(DECODE, runner=runner, kind="runner")
    names = ("unwritten_and_stale", "replay_against_capture", "padding")
    found = {failed.rule: failed.findings[0] for failed in found_in(lane, *names)}
    assert set(found) <= {"GP03", "GP04"}
    assert (found["GP03"].field or "").startswith("view.seq_lens")


def test_what_is_wrong_without_ranks_too_is_not_of_ranks() -> None:
    """A stale tail makes rows wrong with one rank and with several, so GP17 is not reported."""
    lane = LaneUnderTest(DECODE, runner=ThroughAnAttribute, kind="runner")
    assert "GP17" not in {failed.rule for failed in found_in(lane, "ranks_agree")}


# -- the rule to begin with ------------------------------------------------------------------------


def test_evidence_that_names_hook_and_field_comes_first() -> None:
    """Level beats the order of causes; of contents, the view beats metadata; a stale row beats both."""
    (weak, at_metadata, at_view) = (Evidence(1), Evidence(0, 1), Evidence(0, 0))
    assert causes_first(["GP01", "GP06"]) == ["GP01", "GP06"]
    assert causes_first(["GP01", "GP06"], {"GP01": weak, "GP06": at_metadata}) == ["GP06", "GP01"]
    assert causes_first(["GP07", "GP02"], {"GP07": at_metadata, "GP02": at_view}) == ["GP02", "GP07"]
    assert causes_first(["GP04", "GP03"], {"GP03": at_metadata, "GP04": at_view}) == ["GP03", "GP04"]


@pytest.mark.parametrize(
    ("changes", "evidence"),
    [
        ({"hook": "populate", "field": "view.seq_lens[1]"}, Evidence(0, 0)),
        ({"hook": "init_metadata_replay", "field": "metadata.table"}, Evidence(0, 1)),
        ({"hook": "compose", "field": "the eager calls"}, Evidence(0, 0)),
        ({"hook": "init_metadata_capture", "field": "operation 3"}, Evidence(0, 2)),
        ({"hook": "init_metadata_capture", "field": "chunks fit", "expected": INVARIANT}, Evidence(1, 2)),
        ({"hook": None, "field": "slot 'fa3.page_table' of fa3"}, Evidence(1, 2)),
        ({"hook": "populate", "field": None}, Evidence(1, 2)),
        ({"hook": None, "field": "a replay: token 0 of the batch"}, Evidence(2, 2)),
    ],
)
def test_the_evidence_of_a_finding_is_its_hook_and_field(changes: dict[str, Any], evidence: Evidence) -> None:
    """A finding is judged by whether it names hook and field, and by where the field lies."""
    assert finding("GP02", **changes).evidence == evidence


def test_a_batch_that_overruns_begins_with_its_buffer() -> None:
    """GP13 comes before GP06 for equal evidence: rows that leak follow from a buffer that is too small."""
    assert causes_first(["GP06", "GP13"]) == ["GP13", "GP06"]


def test_a_long_batch_is_shown_by_its_first_requests_and_tokens() -> None:
    """A finding shows four requests and eight tokens of each, and how many more there are."""
    problem = of_size(replace(LONG, extra_requests=40), 40, 20)
    told = LaneUnderTest(LONG).finding("GP02", expected="", actual="", problem=problem).batch
    assert str(told).startswith(f"{LONG.case}, 40 requests; row ")
    assert "; and 36 more requests; seed " in str(told)
    assert " and 12 more" in str(told)
    assert len(str(told)) < 1000
    few = of_size(LONG, 2, 3)
    assert few.brief == few.words


def test_ranks_whose_variants_differ_are_told_of_the_variant() -> None:
    """The help of GP17 speaks of the variant only if the shapes of ranks differ in nothing else."""
    shape = GraphShape(DECODE.case.mode, 4, 4)
    assert differ_in_variant([shape, replace(shape, variant="long")])
    assert not differ_in_variant([shape, GraphShape(DECODE.case.mode, 8, 8)])
    assert not differ_in_variant([shape, None])


def test_a_runner_is_named_with_its_kind_in_commands() -> None:
    """The command that reproduces a finding has `runner:NAME`, as the documentation has."""
    assert Target("runner", "cuda_graph").names == "runner:cuda_graph"
    assert Target("attention_backend", "fa3", "cuda_graph").names == "fa3 runner:cuda_graph"


# -- names of memory -------------------------------------------------------------------------------


@dataclass
class Box:
    """Plain data."""

    inside: torch.Tensor


IN_A_MODULE = {"rows": [torch.zeros(11)]}


@cache
def in_a_cache(rows: int) -> torch.Tensor:
    """Return memory that lives as long as the module."""
    return torch.zeros(rows)


@lru_cache(maxsize=2)
def in_a_small_cache(rows: int) -> torch.Tensor:
    """Return memory that is freed after two other requests."""
    return torch.zeros(rows)


class Slotted:
    """An object without a dictionary, as those of msgspec are."""

    __slots__ = ("buffer", "later")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer


class OneSlot(Slotted):
    """An object with a single slot, and the slots of its base."""

    __slots__ = "mask"  # noqa: PLC0205  Python allows it


def test_a_tensor_in_a_slot_is_named() -> None:
    """Objects without a dictionary hold tensors in their slots and those of their bases, if these are set."""
    plain, single = Slotted(torch.zeros(1)), OneSlot(torch.zeros(2))
    single.mask = torch.zeros(3)
    holder = Box([plain, single])
    held = [plain.buffer, single.buffer, single.mask]
    assert [(holder_of(each, holder) or ("nothing",))[0] for each in held] == [
        "Box.inside[0].buffer",
        "Box.inside[1].buffer",
        "Box.inside[1].mask",
    ]


def test_a_tensor_is_named_by_what_holds_it() -> None:
    """Tensors in attributes, containers, objects, classes, closures, caches and modules are found."""
    t = [torch.zeros(n + 1) for n in range(6)]

    def closed(tensor: torch.Tensor) -> Any:
        return lambda _: tensor

    class Holds:
        """A plugin with tensors in many places."""

        of_class = t[3]
        method = closed(t[4])

        def __init__(self) -> None:
            self.plain, self.box = t[0], Box(t[1])
            self.nested = [None, {"q": (t[2],)}]
            self.later = partial(torch.add, t[5][1:])
            self.me = self

    holder = Holds()
    all_held = [*t, IN_A_MODULE["rows"][0], in_a_cache(12), in_a_small_cache(13)]
    names = [(holder_of(each, holder) or ("nothing",))[0] for each in all_held]
    assert names == [
        "Holds.plain",
        "Holds.box.inside",
        "Holds.nested[1]['q'][0]",
        "Holds.of_class",
        "'tensor' in the closure of Holds.method",
        "Holds.later['args'][0]",
        f"{__name__}.IN_A_MODULE['rows'][0]",
        f"the cache of {__name__}.in_a_cache[12]",
        f"the cache of {__name__}.in_a_small_cache",
    ]
    assert holder_of(torch.zeros(1), holder) is None
    assert len(storages_of(holder)) == 4


class CountsInADict(ReferenceBackend):
    """A backend whose graph counts its replays in a tensor that a dictionary holds."""

    def fill_request(self, view: ForwardBatch, request: torch.Tensor) -> None:
        """Derive the requests, and count."""
        super().fill_request(view, request)
        held = self.__dict__.setdefault("_kept", {})
        if "count" not in held:
            held["count"] = torch.zeros(1, dtype=torch.int64)
        held["count"].add_(1)


def test_state_in_a_dictionary_has_a_name() -> None:
    """The finding names the attribute and the key of memory that differs after each replay."""
    failures = found_in(LaneUnderTest(DECODE, CountsInADict), "repeated")
    assert {each.field for failed in failures for each in failed.findings} == {"CountsInADict._kept['count']"}


class PlansOnce(ReferenceBackend):
    """A backend whose kernel reads a plan in an attribute, which the first replay after capture makes."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.scale_of_plan = torch.ones(1)
        self._is_planned = False

    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Refresh the metadata, and plan once."""
        if not self._is_planned:
            self.scale_of_plan.fill_(1 + float(view.seq_lens_cpu.sum()))
            self._is_planned = True
        return super().init_metadata_replay(view, shape, captured)

    def forward(self, q: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        """Attend with queries that the plan scales."""
        return super().forward(q * self.scale_of_plan, *args, **more)


def test_a_plan_that_is_not_renewed_names_its_attribute() -> None:
    """The finding of a stale plan has hook and the attribute of the plan."""
    failures = {each.rule: each for each in found_in(LaneUnderTest(DECODE, PlansOnce), "interleaved")}
    stale = failures["GP09"].findings[0]
    assert (stale.hook, stale.field) == ("init_metadata_replay", "PlansOnce.scale_of_plan")


class Rebinds(ReferenceBackend):
    """A backend whose hooks make the plan in a new tensor in a dictionary: a graph reads the old one."""

    def plan(self, view: ForwardBatch) -> None:
        """Make a new plan."""
        self._plans = {"scale": torch.full((1,), 1 + float(view.seq_lens_cpu.sum()))}

    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Plan, and refresh the metadata."""
        self.plan(view)
        return super().init_metadata_replay(view, shape, captured)

    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
        """Plan, and bind the metadata."""
        self.plan(view)
        return super().init_metadata_capture(view, shape)

    def forward(self, q: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        """Attend with queries that the plan scales."""
        return super().forward(q * self._plans["scale"], *args, **more)


def test_memory_that_nothing_holds_is_named_by_the_line_that_uses_it() -> None:
    """The finding of a rebound tensor has the line of the region that reads the old one."""
    failures = {
        each.rule: each for each in found_in(LaneUnderTest(DECODE, Rebinds), "replay_against_capture")
    }
    fields = [each.field or "" for each in failures["GP01"].findings]
    assert any("that no attribute holds now, used at" in field for field in fields), fields
    assert any("self._plans" in field for field in fields), fields


# -- all findings ----------------------------------------------------------------------------------


def test_all_findings_are_kept_and_printed_on_request() -> None:
    """By default 8 findings of a rule are kept and one of a lane is printed; on request all are."""

    def many(lane: LaneUnderTest, _: Any) -> Any:
        """Yield twelve findings, of which two are equal."""
        for number in (*range(11), 10):
            yield lane.finding("GP02", field=f"metadata.f{number}", expected="1", actual="2")

    one = replace(EXPERIMENTS[0], name="many", examines=("GP02",), run=many)
    plan = PlannedLane(LaneUnderTest(DECODE), is_full=True)

    def kept(options: Options) -> Result:
        results = suite.examine_lane(plan, options, experiments=[one])
        return next(each for each in results if each.rule == "GP02")

    few, every = kept(QUICK), kept(replace(QUICK, all_findings=True))
    assert (len(few.findings), len(every.findings)) == (8, 11)
    assert {each.experiment for each in every.findings} == {"many"}
    text = drawn(report(plugin([every]), options={"all_findings": True}))
    assert all(f"metadata.f{number}" in text for number in range(11))
    short = drawn(report(plugin([every])))
    assert "and 10 more findings in this lane (check --all-findings prints them)" in short


# -- rules and lanes by name -----------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES.values(), ids=str)
def test_a_rule_is_found_by_any_spelling(rule: Any) -> None:
    """Id, number and name name a rule, in any case, with hyphens, underscores or spaces."""
    number = int(rule.id.removeprefix("GP"))
    spellings = [rule.id, f"gp{number}", f"GP{number:03}", str(number), f"{number:02}", f"gp-{number}"]
    spellings += [rule.name, rule.name.upper(), rule.name.replace("-", "_"), str(rule), f" {rule.name} "]
    assert {find_rule(text) for text in spellings} == {rule}


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("stale-pad", "GP03 stale-pad-tail"),
        ("stale-pad-tial", "GP03 stale-pad-tail"),
        ("padleak", "GP06 pad-leak"),
        ("stale", "GP03 stale-pad-tail or GP09 stale-plan"),
    ],
)
def test_a_near_miss_of_a_rule_is_answered_with_the_rule(text: str, near: str) -> None:
    """The hint has id and name of the rules that are meant."""
    with pytest.raises(UsageError, match="unknown rule") as refused:
        find_rule(text)
    assert f"did you mean {near}?" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("decode-page16-gqa-float23", "'decode-page16-gqa-float32'"),
        ("target", "'target_verify-"),
        ("decod-*", "'decode-"),
        ("Decode-page16-gqa-float32", "'decode-page16-gqa-float32'"),
    ],
)
def test_a_pattern_without_a_lane_is_answered_with_the_nearest(pattern: str, near: str) -> None:
    """Each pattern has to match a lane; the hint begins with the nearest names."""
    options = replace(QUICK, lanes=("decode-*", pattern))
    with pytest.raises(UsageError, match=r"no lane of mine matches") as refused:
        suite.require_lanes([Target("attention_backend", "mine")], options, CATALOG)
    assert (refused.value.hint or "").startswith(f"the nearest: {near}")


def test_a_lane_that_is_not_there_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """``--lane`` without a match ends with status 2, before anything runs."""
    assert main(["check", "fa3", "--list", "--lane", "decode-page16-gqa"]) == 2
    assert "the nearest: 'decode-page16-gqa-" in capsys.readouterr().err


# -- the vocabulary ------------------------------------------------------------------------------------


def test_every_part_of_the_name_of_a_lane_has_a_meaning() -> None:
    """Every kind of step, page size, layout of heads and dtype in the name of a lane is explained."""
    cases = [case.sized(drafts) for case in (*CASES, EMBEDS, SEGMENTS) for drafts in DRAFTS]
    configs = [*configs_of(ReferenceBackend.capabilities, cases=cases)]
    unusual = replace(DECODE, counts=True, scale="middle", mixed_dim=16, high=True)
    names = {*map(str, (*configs, unusual)), f"{DECODE}-cuda", f"{DECODE}-inductor", "decode_frozen_tree"}
    for name in sorted(names):
        parts = vocabulary.parts_of_lane(name)
        assert parts, name
        assert not [part for part, meaning in parts if not meaning], name
    assert vocabulary.parts_of_lane("stale-pad-tail") is None


def test_every_experiment_says_what_it_does() -> None:
    """The vocabulary has one sentence for each experiment, the first of its docstring."""
    told = vocabulary.experiments()
    assert list(told) == [*(each.name for each in EXPERIMENTS), RealRanks.name]
    assert all(text.rstrip().endswith((".", ":")) or len(text) > 40 for text in told.values())


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("batches", "row 3 of req_to_token"),
        ("lanes", "KIND-pageN-HEADS-DTYPE"),
        ("answers_replayed", "Replay a sequence of batches"),
        ("experiments", "Replay a sequence of batches"),
        ("decode-page16-gqa-float32", "16 KV slots per page"),
        ("target_verify_tree", "top-k > 1"),
        ("gp3", "GP03 stale-pad-tail"),
    ],
)
def test_words_of_reports_are_explained(word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``explain`` takes topics, experiments, lanes and kinds of steps, in words and as JSON."""
    assert main(["explain", word]) == 0
    assert says in capsys.readouterr().out
    assert main(["explain", word, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_an_unknown_word_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt experiment or topic is a usage error that names it."""
    assert main(["explain", "answers_replay"]) == 2
    assert "did you mean answers_replayed?" in capsys.readouterr().err
    assert main(["explain", "batchs"]) == 2
    assert "did you mean batches?" in capsys.readouterr().err


def test_a_report_with_findings_has_a_legend() -> None:
    """The terminal and the page explain batches, lanes and the experiments with findings, and no others."""
    seen: Finding = finding("GP03", experiment="answers_replayed")
    experiments = {"answers_replayed": "Replay batches.", "padding": "Spoil padding."}
    made = report(plugin([result("fail", findings=[seen])]), experiments=experiments)
    text, page = drawn(made), to_html(made)
    for shown in (text, page):
        assert "Replay batches." in shown
        assert "Spoil padding." not in shown
    assert "`graphpact explain batches`" in text
    assert "row 3 of req_to_token" in page
    assert "how to read this" not in drawn(report(plugin([result()]), experiments=experiments))
