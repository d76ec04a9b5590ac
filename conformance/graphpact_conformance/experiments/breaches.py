"""Breaches of the pact as findings: differences of a replay's view or metadata from those of the capture.

Does not: check a pact; see `graphpact.pact`.
"""

import re
from collections.abc import Iterable

from graphpact.errors import Breach
from graphpact_conformance.experiments.comparison import sides_of
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.records.steps import StepRecord
from graphpact_conformance.results import Finding


def of_breaches(lane: LaneUnderTest, step: StepRecord, breaches: Iterable[Breach]) -> list[Finding]:
    """Return a finding for each breach of the pact, but only one for a field that counts live rows.

    A field that is sliced to the live rows breaks several promises at once: it has another shape, and often
    other strides and another address.
    """
    by_path: dict[str, list[Breach]] = {}
    for breach in breaches:
        by_path.setdefault(breach.path, []).append(breach)
    found = []
    for group in by_path.values():
        counted = [breach for breach in group if _counts_real_rows(step, breach)]
        found += [
            _of_breach(lane, step, each, "GP05" if counted else each.broken) for each in counted or group
        ]
    return found


def _of_breach(lane: LaneUnderTest, step: StepRecord, breach: Breach, rule: str) -> Finding:
    hook, help_ = "init_metadata_replay", breach.advice
    if breach.path.startswith("view"):  # `populate` writes only values, which no breach is about
        hook = "prepare_replay"
        help_ = _OF_VIEWS if breach.rule in ("address", "shape", "stride") else help_
    whose = f" ({breach.owner})" if breach.owner else ""
    expected, actual = sides_of(breach)
    return lane.finding(
        rule,
        hook=hook,
        field=f"{breach.path}{whose}",
        expected=expected,
        actual=actual,
        step=step,
        help=help_,
    )


_OF_VIEWS = (
    "return slices of the captured slots from prepare_replay, cut by the counts of the shape, as"
    " `registry.static_inputs(batch, shape)` does, and copy values into them in populate: the graph never"
    " reads a new tensor"
)


def _counts_real_rows(step: StepRecord, breach: Breach) -> bool:
    """Return whether a shape or a number counts only live rows, where the captured one counts all rows."""
    shape = step.shape
    if shape is None or breach.rule not in ("shape", "value"):
        return False
    numbers = [[int(n) for n in re.findall(r"\d+", text)] for text in (breach.captured, breach.replayed)]
    raw = step.problem.batch_size, len(step.problem.tokens)
    padded = shape.batch_size, shape.num_tokens
    if breach.rule == "value":
        return any(numbers == [[p], [r]] for p, r in zip(padded, raw, strict=True) if p != r)
    return any(
        c - n in (padded[0] - raw[0], padded[1] - raw[1]) and c != n for c, n in zip(*numbers, strict=False)
    )
