"""`unlike_eager`: what a graph has and an eager run has not, where only the eager run is right.

Capture and replay are wrong alike, so a comparison of the two shows nothing. Tried are the dtypes of slots
(GP07), their sizes (GP13), and memory that the results of several layers share (GP15).

Does not: compare a replay with a capture; see `graphpact_conformance.experiments.parity`.
"""

from collections.abc import Iterator

import torch

from graphpact.pact import walk
from graphpact.tensors import equal, same
from graphpact_conformance.experiments.comparison import is_right, spell, values_at
from graphpact_conformance.experiments.refresh import hook_of
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.steps import Leaf, StepRecord
from graphpact_conformance.results import Finding


def unlike_eager(lane: LaneUnderTest, rig: Rig, step: StepRecord) -> Finding | None:
    """Return a finding about a replay that is as wrong as a capture, or None if no cause is found.

    Args:
        lane: The lane.
        rig: The rig of the step.
        step: The replay. An eager run of its batch is right.
    """
    eager = dict(_eager_metadata(lane, step))
    for path, leaf in step.leaves.items():
        right = eager.get(path)
        if right is None or right.dim() != leaf.value.dim():
            continue
        found = _narrower(lane, step, leaf, right) or _smaller(lane, step, leaf, right)
        if found is not None:
            return found
    if rig.num_steps > 1 or not is_right_with_copies(lane, step):
        return None
    return lane.finding(
        "GP15",
        field="the results of the layers of one graph",
        expected="the result of a layer stays as it is until the graph has run",
        actual="a later layer overwrites it: if each result is copied, the replay is right",
        step=step,
        help="return memory from forward() that no other layer writes: a graph reads the result of a layer"
        " after the next layers have run",
    )


def is_right_with_copies(lane: LaneUnderTest, step: StepRecord) -> bool:
    """Return whether the batch of a wrong replay is replayed right if each result of attention is copied."""
    return is_right(lane, lane.build(copies_attention=True), step.problem, may_decline=True)


@torch.inference_mode()
def _eager_metadata(lane: LaneUnderTest, step: StepRecord) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the metadata of an eager run, by path; none if it raises."""
    rig = lane.build(capture=False)
    rig.load(step.problem)
    try:
        metadata = rig.backend.init_metadata_eager(rig.batch_of(step.problem))
    except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
        return
    for path, value in walk({"metadata": metadata}):
        if isinstance(value, torch.Tensor):
            yield path, value.cpu()


def _narrower(lane: LaneUnderTest, step: StepRecord, leaf: Leaf, right: torch.Tensor) -> Finding | None:
    """Return a finding about a tensor of a smaller dtype, which changes the values of an eager run."""
    mine, theirs = _both(leaf.value, right)
    if leaf.value.dtype == right.dtype or not equal(theirs.to(mine.dtype), mine):
        return None
    differs = ~same(mine.to(theirs.dtype), theirs)
    if not bool(differs.any()):
        return None
    return lane.finding(
        "GP07",
        hook=hook_of(leaf),
        field=leaf.name + spell(differs),
        expected=f"{right.dtype}, as in an eager run: {values_at(theirs, differs)}",
        actual=f"{leaf.value.dtype}: {values_at(mine, differs)}",
        step=step,
        help="declare the slot with a dtype that holds every value, as the metadata of eager runs does",
    )


def _smaller(lane: LaneUnderTest, step: StepRecord, leaf: Leaf, right: torch.Tensor) -> Finding | None:
    """Return a finding about a tensor that is too small for the values of an eager run."""
    mine, theirs = _both(leaf.value, right)
    has_more = any(m < r for m, r in zip(leaf.value.shape, right.shape, strict=True))
    if (
        not has_more
        or not equal(theirs.to(mine.dtype), mine)
        or int(right.count_nonzero()) == int(theirs.count_nonzero())
    ):
        return None
    return lane.finding(
        "GP13",
        hook=hook_of(leaf),
        field=leaf.name,
        expected=f"room for {tuple(right.shape)}, the shape in an eager run of this batch",
        actual=f"shape {tuple(leaf.value.shape)}: the rest is cut off",
        step=step,
        help="size the slot by Limits, for the largest batch of the shape, drafts included",
    )


def _both(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries that both tensors have."""
    region = tuple(slice(min(pair)) for pair in zip(mine.shape, theirs.shape, strict=True))
    return mine[region], theirs[region]
