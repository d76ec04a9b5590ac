"""Python beside the graph: state that the region changes on the host, which a replay therefore skips: GP10.

A counter that chooses one of two buffers is right in eager steps and right in replays, and wrong where an odd
number of eager steps lies between replays. So replays come after one eager step, after a second, and after
three more of other batches.

A wrong replay is compared with the host state at the capture of its shape. What an eager run of the region
changes and a replay does not is put back. If the replay is right then, the attributes that had to be put back
are named. An attribute that changes no result, such as a count of calls, is no finding.

Does not: find state in closures or in other processes; see `graphpact_conformance.lane.host_state`.
"""

import contextlib
from collections.abc import Mapping, Sequence

import torch

from graphpact.attention import AttentionBackend
from graphpact.runners import GraphRunner
from graphpact.shapes import GraphShape
from graphpact.step import RegionContext
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import differences, is_right, wrong_results
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.lane.host_state import (
    Kept,
    changed,
    host_state,
    lines_of_writes,
    restore,
    shown,
)
from graphpact_conformance.lane.lane_under_test import LaneUnderTest

State = Mapping[str, Kept]
"""Host values by name."""


def python_state(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Replay after one, two and five eager steps, whose regions run Python that a replay skips."""
    rig = lane.rig()
    first, other = steps.padded, steps.small
    for problem in (first, other):
        if not is_right(lane, rig, problem, may_decline=True):
            yield from _explained(lane, problem, [])  # if host state is the cause; others report it anyway
            return
    ran: list[Problem] = []
    for eager, replayed in (
        ([first], [other, first]),
        ([other], [first]),
        ([other, steps.exact, first], [other, first]),
    ):
        for problem in eager:
            rig.step(problem, eagerly=True)
            ran.append(problem)
        for problem in replayed:
            if not is_right(lane, rig, problem, may_decline=True):
                yield from _explained(lane, problem, ran)
                return


class _Scene:
    """A new lane with the host state at its captures, in which some batches ran eagerly.

    Args:
        lane: The lane.
        eager: The batches.

    Attributes:
        rig: The rig.
        captured: The host state with which the region of each shape was composed.
        by_region: The values of attributes before and after an eager run of the region that changed them, and
            the line that set them, by name.
    """

    def __init__(self, lane: LaneUnderTest, eager: Sequence[Problem]) -> None:
        self.rig = rig = lane.build(capture=False)
        self.captured: dict[GraphShape, State] = {}
        self.by_region: dict[str, tuple[str, str, str]] = {}
        rig.lane.composing = self._note
        rig.capture()
        rig.lane.composing = None
        for problem in eager:
            self._run_eagerly(problem)

    @torch.inference_mode()
    def _run_eagerly(self, problem: Problem) -> None:
        """Run a batch without a graph, and note what its region changes."""
        self.rig.load(problem)
        with contextlib.suppress(Exception, SystemExit), lines_of_writes(*self.plugins) as lines:
            region = self.rig.lane.region_of(self.rig.batch_of(problem))
            before = self.state()
            region()
            after = self.state()
            for name in changed(before, after):
                line = f" at {lines[name]}" if name in lines else ""
                self.by_region.setdefault(name, (shown(before.get(name)), shown(after.get(name)), line))

    @torch.inference_mode()
    def by_replay(self, problem: Problem) -> list[str]:
        """Return the attributes that change between preparation and end of a replay."""
        self.rig.load(problem)
        with contextlib.suppress(Exception, SystemExit):
            prepared = self.rig.lane.prepare(self.rig.batch_of(problem))
            before = self.state()
            self.rig.lane.launch(prepared)
            return changed(before, self.state())
        return []

    def _note(self, context: RegionContext) -> None:
        if context.registry is not None:
            self.captured[context.shape] = self.state()

    @property
    def plugins(self) -> tuple[AttentionBackend, GraphRunner]:
        """Backend and runner."""
        return self.rig.lane.backend, self.rig.lane.runner

    def state(self) -> State:
        """Return the host state now."""
        return host_state(*self.plugins)


def _explained(lane: LaneUnderTest, problem: Problem, eager: Sequence[Problem]) -> Findings:
    """Yield a finding for each attribute that makes a replay wrong; without any, one about its results."""
    scene = _Scene(lane, eager)
    now = scene.state()
    step = scene.rig.step(problem, may_decline=True)
    if step.error is None and not differences(scene.rig, step, lane.answer(scene.rig, problem)):
        return  # earlier replays are a part of the cause: other experiments report it
    then = {} if step.shape is None else scene.captured[step.shape]
    trial = _Scene(lane, eager or [problem])
    by_replay, skipped = trial.by_replay(problem), trial.by_region
    names = [name for name in changed(then, now) if name in skipped and name not in by_replay]
    needed = _needed(lane, problem, eager, names)
    for name in needed:
        before, after, line = skipped[name]
        yield lane.finding(
            "GP10",
            hook="forward" if name.startswith(type(scene.plugins[0]).__name__) else "compose",
            field=name,
            expected=f"{shown(then.get(name))}, as at the capture of the graph: what the region changes in"
            " Python affects no result of a replay",
            actual=f"{shown(now.get(name))} {_after(eager)}; an eager run of the region changes it, for"
            f" example from {before} to {after}{line}, and a replay skips that",
            step=step,
            help=_HELP,
        )
    if eager and not needed and step.error is None:
        what = f"a replay {_after(eager)}"
        yield from wrong_results(lane, scene.rig, step, what=what, help=_OTHER_HELP)


def _after(eager: Sequence[Problem]) -> str:
    if not eager:
        return "at this replay"
    return f"after {len(eager)} eager step{'s' if len(eager) > 1 else ''}"


_HELP = (
    "a replay runs no Python of the region. Change such state in a hook, which runs for replays and for eager"
    " steps, keep it in a tensor that the graph itself writes, or let a graph always use the buffer of its"
    " capture"
)
_OTHER_HELP = (
    "before the eager steps it is right: look for memory or state that eager steps change and replays use"
)


def _needed(
    lane: LaneUnderTest, problem: Problem, eager: Sequence[Problem], names: Sequence[str]
) -> Sequence[str]:
    """Return the attributes that must be as at the capture for a right replay; empty if these are not all."""

    def is_right_with(some: Sequence[str]) -> bool:
        scene = _Scene(lane, eager)
        shape, now = scene.rig.fit(scene.rig.batch_of(problem)), scene.state()
        for name in some:
            restore(name, scene.captured[shape] if isinstance(shape, GraphShape) else {}, now)
        return is_right(lane, scene.rig, problem)

    needed = [*names]
    if not needed or not is_right_with(needed):
        return []
    for name in names:
        fewer = [each for each in needed if each != name]
        if fewer and is_right_with(fewer):
            needed = fewer
    return needed
