"""The KV slots that a row of outputs attends: those of a draft against its path, those of a padding row.

Slots are tried: other numbers in a slot change the row only if the row attends the slot, or if an earlier
pass of the row does. The path of a row has the cached keys of its request, and the keys that the passes up to
its own wrote for the request.

Does not: see that a row misses a key which the step itself writes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from graphpact.batch import ForwardMode
from graphpact.tensors import equal
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.steps import StepRecord


@dataclass(frozen=True)
class DraftRow:
    """A wrong row of a draft.

    Args:
        output: Name of its output.
        row: Its index among live rows.
        columns: Its columns of one pass: first, and one after the last.
        step: The number of the pass.
    """

    output: str
    row: int
    columns: tuple[int, int]
    step: int


def attended_slots(rig: Rig, step: StepRecord, wrong: DraftRow) -> str | None:
    """Return in words the first KV slot that a row attends and should not, or misses; None if none is found.

    Args:
        rig: The rig of the step.
        step: A wrong step, which is repeated.
        wrong: A row of it.
    """
    problem = step.problem
    if problem.mode is not ForwardMode.DRAFT_DECODE or not problem.tokens:
        return None
    width = len(problem.tokens) // len(problem.requests)
    request = problem.requests[min(wrong.row // max(width, 1), len(problem.requests) - 1)]
    drafted = [slot for token in request.tokens for slot in token.slots[: wrong.step + 1]]
    path = [*request.cached, *drafted]
    scratch = range(rig.config.page_size)

    def row_with_others_in(slots: Sequence[int]) -> torch.Tensor | None:
        again = rig.step(problem, eagerly=step.shape is None, after_load=other_numbers_in(rig, slots))
        return None if again.rows is None else again.rows[wrong.output][wrong.row, slice(*wrong.columns)]

    was = row_with_others_in(())
    if was is None:
        return None

    def changes(slots: Sequence[int]) -> bool:
        now = row_with_others_in(slots)
        return now is not None and not equal(was, now)

    of_path = f"its path: cached {_listed(request.cached)}, then drafts {_listed(drafted)}"
    others = [slot for slot in rig.cache.slots.tolist() if slot not in {*path, *scratch}]
    if (slot := first_slot(others, changes)) is not None:
        return f"it attends KV slot {slot}, which is not of {of_path}"
    missing = next((slot for slot in request.cached if not changes([slot])), None)
    if missing is not None:
        return f"it does not attend KV slot {missing}, position {request.cached.index(missing)} of {of_path}"
    return None


def other_numbers_in(rig: Rig, slots: Collection[int]) -> Callable[[], None]:
    """Return a function that writes other numbers into KV slots, for `Rig.step` after memory is loaded."""
    left = {*slots}
    keep = [slot for slot in rig.cache.slots.tolist() if slot not in left]
    return lambda: rig.cache.fill(2.0, keep=keep)


def owner_of(slot: int, problem: Problem) -> str:
    """Return in words to which request of a batch a KV slot belongs."""
    for request in problem.requests:
        if slot in request.cached:
            return f"key {request.cached.index(slot)} of the request in row {request.row}"
        if slot in request.table:
            return f"of the request in row {request.row}"
    return "of no request of this batch"


def first_slot(slots: Sequence[int], changes: Callable[[Sequence[int]], bool]) -> int | None:
    """Return a slot whose contents change a row, by halving; None if none does.

    Args:
        slots: KV slots.
        changes: Returns whether other contents of these slots change the row.
    """
    if not slots or not changes(slots):
        return None
    while len(slots) > 1:
        half = len(slots) // 2
        slots = slots[:half] if changes(slots[:half]) else slots[half:]
    return slots[0]


def _listed(slots: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, slots[:most]))
    return f"{shown} and {len(slots) - most} more" if len(slots) > most else shown or "none"
