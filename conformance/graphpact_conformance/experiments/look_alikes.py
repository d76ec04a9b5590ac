"""Live requests that look like padding rows: GP04.

A kernel or a runner may recognise padding rows by a number: the length that the backend declares for them,
position 0, token 0. But live requests can have these numbers too. Only the number of live rows separates live
rows from padding rows.

Does not: draw batches; it changes a request of a drawn batch.
"""

from dataclasses import replace

from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.chosen_batches import shortened
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.layout import least_prefix
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import faults, is_right, wrong_results
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.parity import compare_with_capture
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig


def takes_live_rows_for_padding(
    lane: LaneUnderTest, rig: Rig, steps: Drawn, *, are_special: bool = True
) -> Findings:
    """Replay batches whose last live request looks like padding, with and without padding rows.

    The look is the cause only if these batches are special: all others are right.
    """
    expected = "a live request that has the numbers of a padding row is still treated as live"
    for origin in (steps.padded, steps.exact):
        for problem in look_alikes(lane.config, origin, rig.padded_seq_len):
            step = rig.step(problem, may_decline=True)
            found = faults(lane, rig, step, rule="GP04", expected=expected, help=_HELP)
            if not found or not is_right(lane, rig, origin, may_decline=True):
                continue  # the numbers are not the cause
            if step.error is None and is_right(lane, lane.build(), problem, may_decline=True):
                named = [*compare_with_capture(lane, rig, "graph", problem)]
                found = [each for each in named if lane.listed is None or each.rule in lane.listed]
                what = "a replay after others"
                found = found or [*wrong_results(lane, rig, step, what=what, help=_AFTER_OTHERS)]
            yield from found if are_special else (f for f in found if f.rule not in ("GP04", None))
            return


_HELP = (
    "recognise padding rows by the number of live rows, never by a length, a position or a token: a live"
    " request may have any of these numbers"
)
_AFTER_OTHERS = (
    "as the first batch in a new lane it is right: look for state that earlier batches leave, such as cached"
    " plans"
)


def look_alikes(config: Config, problem: Problem, length: int) -> list[Problem]:
    """Return copies of a batch whose last request looks like padding: one by its length, one by its position.

    The list is empty for a batch without requests.

    Args:
        config: The configuration of the lane.
        problem: The batch.
        length: The length of a padding row.
    """
    if not problem.requests:
        return []
    made = [with_look_alike(config, problem, each) for each in (length, 0)]
    return [*{each.words: each for each in made}.values()]


def with_look_alike(config: Config, problem: Problem, length: int) -> Problem:
    """Return a copy of the batch whose last request has token 0 and, if possible, ``length`` tokens.

    The last request is the one with the fewest new tokens, moved to the end. It is shorter than ``length`` if
    it has fewer tokens. The number of requests and tokens is that of ``problem``, so the copy takes the same
    graph.
    """
    at = min(
        range(len(problem.requests)),
        key=lambda i: (len(problem.requests[i].tokens), -len(problem.requests[i].cached)),
    )
    chosen = problem.requests[at]
    rest = [r for i, r in enumerate(problem.requests) if i != at]
    now = int(problem.batch().seq_lens_cpu[at * problem.case.rows_per_request])
    cached = len(chosen.cached) + length - now
    least = least_prefix(config.case, len(chosen.tokens))
    chosen = shortened(chosen, min(max(cached, least), len(chosen.cached)))
    tokens = [replace(token, token_id=0) for token in chosen.tokens]
    return Problem(problem.case, [*rest, replace(chosen, tokens=tokens)], problem.seed)
