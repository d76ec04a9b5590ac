"""Layers without new keys and values, which read the KV cache of another layer: GP02 to GP10, GP15.

Models share the cache of one layer with others, which call attention with ``k`` and ``v`` None. Such a call
reads what the first layer has written in the same step, and writes nothing.

A decode is also run on a frozen cache, where no layer has new keys and each request has several equal rows.

Does not: run the region of a runner with `GraphRunner.frozen_kv`; its own lanes do.
"""

from dataclasses import replace

from graphpact.batch import ForwardMode
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.experiments.comparison import wrong_results
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.parity import compare_with_capture
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.steps import StepRecord

FROZEN = Case(ForwardMode.DECODE, topk=2, frozen=True)
"""A decode on a cache to which no layer writes."""
RULES = ("GP02", "GP03", "GP04", "GP05", "GP07", "GP08", "GP09", "GP10", "GP15")
"""The rules that a wrong replay of such a layer can break."""


def without_new_keys(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Run a second layer with `k` and `v` None on the cache of the first, eagerly and in replays."""
    shared = lane.like(replace(lane.config, reads=True, capture_shapes=(lane.config.shapes[-1],)))
    found = [*_replayed(shared, steps)]
    yield from found
    if not found and lane.config.case == Case(ForwardMode.DECODE):
        frozen = lane.like(replace(lane.config, case=FROZEN, capture_shapes=()))
        yield from _replayed(frozen, frozen.drawn(1, 0)[0])


def _replayed(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Run batches eagerly and in replays, until one is wrong."""
    rig = lane.rig()
    found = [*_judged(lane, rig, rig.step(steps.padded, eagerly=True), eagerly=True)]
    yield from found
    if found or not rig.captured:
        return
    for problem in (steps.exact, steps.padded):
        found = [*_judged(lane, rig, rig.step(problem), eagerly=False)]
        yield from found
        if found:
            return


def _judged(lane: LaneUnderTest, rig: Rig, step: StepRecord, *, eagerly: bool) -> Findings:
    """Yield findings about a step that raised an error, or does not agree with the oracle."""
    if step.error is not None:
        expected = "a layer without new keys and values reads the cache of another layer"
        yield lane.of_error(step.error, expected=expected, step=step)
        return
    what = "an eager run" if eagerly else "a replay"
    wrong = [*wrong_results(lane, rig, step, what=f"{what} of a layer without new keys", help=_HELP)]
    if wrong and not eagerly:
        named = compare_with_capture(lane, rig, "graph", step.problem)
        yield from (found for found in named if lane.listed is None or found.rule in lane.listed)
    yield from wrong


_HELP = (
    "with k and v None attention writes nothing, and reads the cache of layer.cache_layer with the keys that"
    " another layer has written in this step: use the same lengths and tables as layers with new keys"
)
