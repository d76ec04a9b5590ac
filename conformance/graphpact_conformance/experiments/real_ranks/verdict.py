"""`findings_of`: what the ranks report, as findings that name a rule and ranks.

    GP05  all ranks count other tokens than the contract
    GP06  padding tokens of a rank change results
    GP11  a capture counts other tokens than a replay would
    GP17  ranks differ, one is missing, or results are wrong on some ranks and right in one process
    GP18  the same step has other results

Does not: start ranks, or compare their results.
"""

from collections.abc import Iterator, Sequence

from graphpact.errors import GraphpactError
from graphpact.parallel import ranks_named
from graphpact_conformance.experiments.comparison import differences
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.real_ranks.messages import (
    LostRank,
    RankReport,
    Stop,
    Symptom,
    Wrong,
)
from graphpact_conformance.experiments.real_ranks.scenes import scenes
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.results import Finding
from graphpact_conformance.targets import TIMEOUT_VARIABLE

EXAMINES = ("GP05", "GP06", "GP11", "GP17", "GP18")
"""The rules that findings about real ranks may have."""

_TOGETHER = "all ranks capture, replay and call the same, and every rank answers"
_DIFFER_HELP = (
    "derive shape, eager runs and captures from what all ranks know: global_num_tokens_cpu,"
    " global_batch_sizes_cpu and can_run_graph of the batch; call the same collectives, in the same order and"
    " groups, on every rank"
)
_COUNT_HELP = (
    "fill num_token_non_padded with graphpact.parallel.local_num_token_non_padded(count, padded tokens), at"
    " capture and at replay, on every rank; global_num_tokens_gpu with the padded count"
)
_HELP: dict[Symptom, str] = {
    "capture count": _COUNT_HELP,
    "count": _COUNT_HELP,
    "gathered": _COUNT_HELP,
    "padding": "mask the padding rows of every rank in work across rows: num_token_non_padded counts the live"
    " tokens among a rank's rows of the padded shape, also on a rank without requests",
    "repeat": "reset in the graph whatever a replay changes",
    "shared rows": "let every rank give the live tokens among its rows of the padded shape, and no others",
    "rows": "let nothing of a step depend on the rank, except which tokens it has",
}


def findings_of(lane: LaneUnderTest, answers: Sequence[RankReport | LostRank]) -> Findings:
    """Yield the findings of a lane on all ranks.

    Args:
        lane: The lane, in this process.
        answers: The answer of each rank.

    Raises:
        GraphpactError: The suite itself has a fault on a rank.
    """
    reports = [each for each in answers if isinstance(each, RankReport)]
    for report in reports:
        if report.fault is not None:
            raise GraphpactError(f"rank {report.rank}: {report.fault}")
    lost = [each for each in answers if isinstance(each, LostRank)]
    stops = [(report.rank, report.stop) for report in reports if report.stop is not None]
    yield from _of_stops(lane, stops, lost)
    yield from _of_values(lane, len(answers), [wrong for report in reports for wrong in report.wrong])
    refusing = [report for report in reports if report.refused is not None]
    is_whole = not lost and all(report.is_whole for report in reports)
    if is_whole and refusing and not any(report.replays for report in reports):
        yield lane.finding(
            "GP17",
            field=ranks_named([report.rank for report in refusing]),
            expected="a graph for batches that a captured shape holds, as in one process",
            actual=f"all ranks run every batch eagerly: {refusing[0].refused}",
            help="let fit() depend on the batch, and not on the process",
        )


def _of_stops(lane: LaneUnderTest, stops: Sequence[tuple[int, Stop]], lost: Sequence[LostRank]) -> Findings:
    """Yield a finding for each error and each lost rank; of ranks that only waited, if there is no other."""
    raised = [(rank, stop) for rank, stop in stops if not stop.is_waiting]
    waited = [(rank, stop) for rank, stop in stops if stop.is_waiting]
    for each in lost:
        yield _of_lost(lane, each, [*raised, *waited])
    for ranks, stop in _grouped(raised):
        found = stop.finding
        is_of_ranks = found.rule is not None or stop.in_capture or _is_right_alone(lane)
        yield _finding(found, found.rule or ("GP17" if is_of_ranks else None), ranks_named(ranks), stop)
    if not raised and not lost:
        for _, stop in waited[:1]:
            yield _finding(stop.finding, "GP17", ranks_named([rank for rank, _ in waited]), stop)


def _of_lost(lane: LaneUnderTest, lost: LostRank, others: Sequence[tuple[int, Stop]]) -> Finding:
    """Return the finding about a rank that is lost, with what the first of the others says."""
    lines, place = [f"rank {lost.rank} {lost.how}", *lost.said], None
    for rank, stop in others[:1]:
        lines.append(f"rank {rank}: {stop.finding.actual}")
        place = stop.place
    found = lane.finding(
        "GP17",
        field=f"rank {lost.rank}" + (f", {place}" if place else ""),
        expected=_TOGETHER,
        actual="\n".join(lines),
        help="look at what this rank does that others do not: a rank that ends or waits leaves the others"
        f" without a peer; if the machine is only slow, set {TIMEOUT_VARIABLE}=SECONDS",
    )
    return found.model_copy(update={"batch": place.batch, "shape": place.shape}) if place else found


def _grouped(raised: Sequence[tuple[int, Stop]]) -> Iterator[tuple[list[int], Stop]]:
    """Yield each error once, with the ranks that raised it."""
    of_text: dict[str, tuple[list[int], Stop]] = {}
    for rank, stop in raised:
        of_text.setdefault(stop.finding.actual, ([], stop))[0].append(rank)
    yield from of_text.values()


def _finding(found: Finding, rule: str | None, ranks: str, stop: Stop) -> Finding:
    """Return the finding about an error, with ranks and place."""
    field = f"{ranks}, {stop.place}"
    return found.model_copy(
        update={
            "rule": rule,
            "field": field,
            "expected": _TOGETHER,
            "batch": stop.place.batch,
            "shape": stop.place.shape,
            "help": found.help or _DIFFER_HELP,
        }
    )


def _of_values(lane: LaneUnderTest, size: int, wrong: Sequence[Wrong]) -> Findings:
    """Yield a finding for each kind of wrong value and each rank at fault."""
    first: dict[tuple[Symptom, int], Wrong] = {}
    for each in wrong:
        first.setdefault((each.symptom, each.culprit), each)
    has_wrong_counts = any(symptom in ("count", "gathered") for symptom, _ in first)
    for (symptom, rank), each in first.items():
        if symptom == "shared rows" and has_wrong_counts:
            continue  # the wrong count explains them
        rule: str | None = {"capture count": "GP11", "padding": "GP06", "repeat": "GP18"}.get(symptom, "GP17")
        if symptom in ("count", "gathered"):
            of_ranks = [wrong for (kind, _), wrong in first.items() if kind == symptom]
            seen = {(wrong.place, wrong.actual if symptom == "gathered" else "") for wrong in of_ranks}
            is_everywhere = len(seen) == 1 and len(of_ranks) == size
            rule = "GP05" if is_everywhere else "GP17"
        elif symptom == "rows" and not _is_right_alone(lane):
            rule = None
        found = lane.finding(
            rule,
            hook="populate" if symptom in ("capture count", "count", "gathered") else None,
            field=_field_of(rank, each),
            expected=each.expected,
            actual=each.actual,
            help=_HELP[symptom],
        )
        yield found.model_copy(update={"batch": each.place.batch, "shape": each.place.shape})


def _field_of(rank: int, wrong: Wrong) -> str:
    if wrong.symptom == "padding":
        return f"other padding tokens on rank {rank} change {wrong.field} ({wrong.place})"
    return f"rank {rank}: {wrong.field} ({wrong.place})"


def _is_right_alone(lane: LaneUnderTest) -> bool:
    """Return whether the lane is right in this process, with batches like those of ranks."""
    rig = lane.rig(strict=True)
    problems = [problem for scene in scenes(lane.config, 2) for problem in scene.problems]
    for problem in problems:
        step = rig.step(problem, may_decline=True)
        if step.error is not None or differences(rig, step, lane.answer(rig, problem)):
            return False
    return True
