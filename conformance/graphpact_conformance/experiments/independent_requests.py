"""Requests whose results do not depend on their neighbours: GP05.

A region that a runner composes also computes the oracle's results. A row that it takes from another request
is wrong on both sides. So each request of a batch also runs alone, and the batch in another order, on the
same memory. All outputs of a request are equal, those of every pass too.

The column of pooling is left out, because it depends on the whole batch. An integer may be the index of a
request or a token in the batch, counted from 0.

Does not: report a step that disagrees with the oracle; see `graphpact_conformance.experiments.outputs`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from graphpact.batch import ForwardMode
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import differences, excess, tolerance_in
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.model import ROWS_OF_PASS
from graphpact_conformance.records.steps import StepRecord
from graphpact_conformance.results import Finding

_MOST = 4
"""Requests of a batch that run alone: the first ones, and the last."""


def independent_requests(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Run each request of a batch alone, and the batch in another order: each has the same outputs."""
    rig = lane.rig()
    for whole, eagerly in ((steps.padded, False), (steps.exact, False), (steps.exact, True)):
        found = _of_batch(lane, rig, whole, eagerly=eagerly)
        if found is not None:
            yield found
            return


def _of_batch(lane: LaneUnderTest, rig: Rig, whole: Problem, *, eagerly: bool) -> Finding | None:
    """Return a finding about the first output of a request that depends on the other requests, or None."""
    if len(whole.requests) < 2:
        return None
    among = rig.step(whole, eagerly=eagerly, may_decline=True)
    for what, part in _parts(whole):
        step = rig.step(part, eagerly=eagerly, whole=whole, may_decline=True)
        if among.rows is None or step.rows is None:
            return None  # `answers_replayed` and `answers_eagerly` report errors
        off = _first_other(rig, among, step)
        if off is None:
            continue
        is_wrong = differences(rig, among, lane.answer(rig, whole))
        if is_wrong or differences(rig, step, rig.answer(part, whole)):
            return None  # the step itself is wrong, so the region is not the cause
        name, request, column, alone, here = off
        how = "an eager run" if eagerly else "a replay"
        return lane.finding(
            # Of a replay, offsets and rows disagree; no rule is about steps without a graph.
            None if eagerly else "GP05",
            hook="compose",
            field=f"{how}: request {request} of the batch, {rig.where(name, column)}",
            expected=f"{alone:.6g}, its result {what}: no output of a request depends on other requests",
            actual=f"{here:.6g} in the batch",
            step=among,
            help=_HELP,
        )
    return None


_HELP = (
    "the region is wrong in eager steps too: look in compose() for an index of a request's row without the"
    " first row of the request (request * tokens_per_request), and for a topk, softmax or gather over the"
    " rows of several requests"
)


def _parts(whole: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield each request alone, and all in reverse, with words; mixed batches say by order who decodes."""
    last = len(whole.requests) - 1
    for at in sorted({*range(min(_MOST - 1, last)), last}):
        yield "alone", replace(whole, requests=[whole.requests[at]])
    if whole.mode is not ForwardMode.MIXED:
        yield "with the requests in reverse", replace(whole, requests=whole.requests[::-1])


def _first_other(rig: Rig, among: StepRecord, step: StepRecord) -> tuple[str, int, int, float, float] | None:
    """Return the first output that differs, and its request, column, and values in ``step`` and ``among``.

    Args:
        rig: The rig.
        among: The step of the whole batch.
        step: The step of some of its requests.
    """
    assert among.rows is not None and step.rows is not None  # noqa: S101, PT018  both ended
    rows = among.problem.rows_of(step.problem.requests)
    for name in sorted(among.rows, key=lambda n: (n != "rows", not n.startswith(ROWS_OF_PASS))):
        axis = among.axes[name]
        if axis == "none" or name not in step.rows:
            continue
        here, alone = (_own(rig, name, each) for each in (among.rows[name][rows[axis]], step.rows[name]))
        if here.shape != alone.shape:
            continue  # the oracle's comparison reports it
        if not here.dtype.is_floating_point and _are_indices(among.problem, step.problem, axis, here, alone):
            continue
        off = excess(here, alone, tolerance_in(rig, name))
        if off.numel() and float(off.max()) > 1:
            at = int(off.argmax())
            row, column = divmod(at, off[0].numel())
            request = _request_at(among.problem, axis, rows[axis][row])
            return name, request, column, float(alone.flatten()[at]), float(here.flatten()[at])
    return None


def _are_indices(whole: Problem, part: Problem, axis: str, here: torch.Tensor, alone: torch.Tensor) -> bool:
    """Return whether all integers are equal, or differ as the first row or token of their request does."""
    same = here == alone
    for start in ("bs", "tokens"):
        shifts = []
        for request in part.requests:
            shift = whole.rows_of([request])[start][0] - part.rows_of([request])[start][0]
            shifts += [shift] * len(part.rows_of([request])[axis])
        by_row = torch.tensor(shifts).view(-1, *[1] * (here.dim() - 1))
        same |= here.long() - alone.long() == by_row
    return bool(same.all())


def _own(rig: Rig, name: str, rows: torch.Tensor) -> torch.Tensor:
    """Return rows without the column of pooling over the batch, which is the last."""
    pools = rig.net.counts and (name == "rows" or name.startswith(ROWS_OF_PASS))
    return rows[..., :-1] if pools else rows


def _request_at(problem: Problem, axis: str, row: int) -> int:
    """Return the index of the request of a row of an axis."""
    return next(at for at, request in enumerate(problem.requests) if row in problem.rows_of([request])[axis])
