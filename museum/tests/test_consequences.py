"""What findings say of exhibits: which rule is no finding beside its cause, and what the finding names.

Does not: compare whole reports; `test_museum` asks for the rule of each exhibit.
"""

import pytest

from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.results import Finding
from graphpact_conformance.suite import examine_lane
from graphpact_museum.collection import EXHIBITS
from graphpact_museum.gallery import OPTIONS, planted, right_class

BY_NAME = {exhibit.name: exhibit for exhibit in EXHIBITS}


def findings_of(name: str, *experiments: str) -> list[Finding]:
    """Return what some experiments find in an exhibit."""
    exhibit = BY_NAME[name]
    chosen = [each for each in EXPERIMENTS if each.name in experiments]
    assert len(chosen) == len(experiments)
    with planted(exhibit, right_class(exhibit.base)) as plans:
        results = [r for plan in plans for r in examine_lane(plan, OPTIONS, experiments=chosen)]
    return [finding for result in results for finding in result.findings]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "experiments", "cause", "follows"),
    [
        ("cuda-graph-keeps-request-rows", ["unwritten_and_stale", "beside_other_lanes"], "GP03", "GP02"),
        ("extend-runner-pads-a-new-tensor", ["replay_against_capture", "beside_other_lanes"], "GP01", "GP10"),
        ("breakable-cuts-rows-as-in-the-step-before", ["answers_replayed", "rewritten_memory"], None, "GP16"),
        (
            "fa3-padded-tokens-write-the-last-slot",
            ["answers_replayed", "capture_side_effects"],
            "GP04",
            "GP19",
        ),
        ("fa3-workspace-lacks-a-draft-token", ["padding", "largest_step"], "GP13", "GP04"),
        ("trtllm-mla-side-stream-not-forked", ["strict_replays", "survives_eager_activity"], "GP16", "GP14"),
    ],
)
def test_a_rule_that_follows_from_another_is_no_finding(
    name: str, experiments: list[str], cause: str | None, follows: str
) -> None:
    """Effects of stale padding, of a fault of one model, of a race and of little memory are no findings."""
    found = {finding.rule for finding in findings_of(name, *experiments)}
    assert cause in found
    assert follows not in found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "rule", "field"),
    [
        ("fa3-keeps-scales-by-layer-number", "GP10", "EditedFA3Backend.scales"),
        ("flashinfer-second-model-writes-the-scales", "GP15", "EditedFlashInferBackend.scales"),
    ],
)
def test_state_that_models_share_is_named(name: str, rule: str, field: str) -> None:
    """A finding about a second model names the container of the class that mixes the two."""
    (finding,) = findings_of(name, "beside_other_lanes")
    assert (finding.rule, finding.field) == (rule, field)


def test_other_results_of_a_replay_are_named_by_their_output() -> None:
    """A replay that returns the outputs of another graph is told by the first output that differs."""
    finding = findings_of("draft-runner-returns-the-previous-graphs-outputs", "interleaved")[0]
    assert finding.rule == "GP15"
    assert (finding.field or "").startswith("the returned rows of output ")


def test_the_slot_that_a_padding_row_attends_is_named_with_its_request() -> None:
    """A padding row that reads a live request is said with the KV slot and the request that has it."""
    finding = findings_of("flashinfer-padded-branches-repeat-the-first-request", "padding")[0]
    assert finding.rule == "GP04"
    assert finding.actual.startswith("it attends KV slot ")
    assert finding.actual.endswith("of the request in row 3")


def test_an_idle_rank_that_runs_eagerly_is_told_so() -> None:
    """Where only ranks without requests take no graph, the advice is about them, not about the largest."""
    exact = [f for f in findings_of("draft-runner-idle-rank-runs-eagerly", "ranks_agree") if f.rule == "GP17"]
    assert exact[0].help is not None
    assert exact[0].help.startswith("a rank without requests replays the graph of the others")


def test_a_refused_dummy_is_told_with_the_length_of_its_rows() -> None:
    """A kernel that refuses padding rows is reported with the length that the backend declares for them."""
    (finding,) = findings_of("flashinfer-fill-length-0", "captures")
    assert finding.rule == "GP04"
    assert "a length of 0, which the backend declares" in (finding.help or "")
