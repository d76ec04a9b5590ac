"""Requests from their prompt on: each step reads the keys that earlier steps wrote: GP02, GP09, GP10.

Other experiments load page table and KV cache before every step. So what a plugin keeps besides them, such as
a second copy of keys or a row for each request, never belongs to the request of the step there. Here nothing
is loaded: `graphpact_conformance.draws.whole_requests` has the batches, a lane of prompts computes the
prompts in the same cache, and the oracle has a copy of the cache that it writes itself.

A wrong step is repeated in a new lane, on the same cache. If it is right there, the plugin keeps something of
earlier steps; what that is, is found by a comparison with the new lane.

Does not: sample tokens, or choose them; or follow trees, frozen caches and several branches.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from graphpact.attention import kv_tensors
from graphpact.tensors import equal
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.draws.whole_requests import Turn, turns_of
from graphpact_conformance.experiments.comparison import Difference, differences
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.parity import compare_with_capture
from graphpact_conformance.experiments.refresh import hook_of, is_plan
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.oracle import Answer
from graphpact_conformance.records.steps import NAN, StepRecord
from graphpact_conformance.results import Finding
from graphpact_tape.writes import write

Caches = dict[str, torch.Tensor]
"""A KV cache by the names of its tensors."""


def whole_requests(lane: LaneUnderTest, _: Drawn) -> Findings:
    """Step requests from their prompt on: they grow over pages, end, and leave row and pages to others."""
    rig = lane.rig()
    for taken in _Followed(lane, rig).run(turns_of(lane.config)):
        if taken.is_wrong:
            yield from _explained(lane, rig, taken)
            return


@dataclass(frozen=True)
class _Taken:
    """A batch that was run.

    Args:
        turn: The batch.
        number: Its index.
        step: The record of the step.
        before: The right KV cache before it.
        answer: The right results.
        wrong: The differences; empty for a step that raised.
    """

    turn: Turn
    number: int
    step: StepRecord
    before: Caches
    answer: Answer
    wrong: Sequence[Difference]

    @property
    def is_wrong(self) -> bool:
        """Whether the step raised, or its results are wrong."""
        return self.step.error is not None or bool(self.wrong)


class _Followed:
    """The requests of one lane, with the cache of the lane and the oracle's.

    Args:
        lane: The lane.
        rig: Its rig, whose cache is emptied.
        eagerly: Whether every step runs without a graph, or none; None as the batches say.
    """

    def __init__(self, lane: LaneUnderTest, rig: Rig, *, eagerly: bool | None = None) -> None:
        self._rig, self._eagerly = rig, eagerly
        rig.load(Problem(lane.config.case, [], 0))
        self._prompts = lane.of_prompts(rig)
        self._right = rig.cache.copy()

    def run(self, turns: Sequence[Turn]) -> "list[_Taken]":
        """Run batches until one is wrong, and return the last one; empty if there are none."""
        last: list[_Taken] = []
        for number, turn in enumerate(turns):
            self._free(turn)
            rig = self._prompts if turn.is_prompt else self._rig
            if rig is None:
                self._receive(turn.problem)
                continue
            last = [self._take(rig, turn, number)]
            if last[0].is_wrong:
                break
        return last

    @torch.inference_mode()
    def _free(self, turn: Turn) -> None:
        """Poison the KV slots of requests that ended."""
        if turn.freed:
            for cache in (*self._rig.cache.tensors().values(), *kv_tensors(self._right).values()):
                cache[[*turn.freed]] = NAN

    @torch.inference_mode()
    def _receive(self, problem: Problem) -> None:
        """Write random keys of a prompt, as an engine does that receives them from another one."""
        slots = [slot for token in problem.tokens for slot in token.slots]
        generator = torch.Generator().manual_seed(problem.seed)
        theirs = kv_tensors(self._right)
        for name, cache in self._rig.cache.tensors().items():
            new = torch.randn(len(slots), *cache.shape[1:], generator=generator)
            for each in (cache, theirs[name]):
                each[slots] = new.to(cache.device, cache.dtype)

    def _take(self, rig: Rig, turn: Turn, number: int) -> _Taken:
        before = {name: cache.clone() for name, cache in kv_tensors(self._right).items()}
        asked = turn.eagerly if self._eagerly is None or turn.is_prompt else self._eagerly
        step = rig.step(turn.problem, eagerly=asked, may_decline=True, keeps_cache=True)
        with torch.inference_mode():
            right = rig.answer(turn.problem, kv=self._right)
        wrong = [] if step.error is not None else differences(rig, step, right)
        if rig.feeds_itself and not wrong:  # rounding of keys must not add up over steps
            _put(rig, self._right)
        return _Taken(turn, number, step, before, right, wrong)


@torch.inference_mode()
def _put(rig: Rig, right: SimpleNamespace) -> None:
    """Write the right KV cache into that of a rig."""
    for name, cache in kv_tensors(right).items():
        rig.cache.tensors()[name].copy_(cache)


# -- why -----------------------------------------------------------------------------------------------

_HELP = (
    "in a new lane the same step on the same KV cache is right: do not keep rows of a request, or a copy of"
    " its keys, unless every step renews them. Row, first page and length do not identify a request: after"
    " its end another one gets them"
)
_ALONE_HELP = (
    "earlier steps are not the cause: in a new lane this batch is wrong too, on the same KV cache, and a"
    " capture of it is wrong alike"
)
_IN_GRAPH_HELP = (
    "if every step of the requests runs eagerly, this one is right: a replay leaves out a write that an eager"
    " step does. Record in the graph all writes that later steps read, and let no branch of `forward` or of"
    " the region depend on whether it is captured"
)


def _explained(lane: LaneUnderTest, rig: Rig, taken: _Taken) -> Findings:
    """Yield findings about a wrong step of requests that were followed."""
    turn = taken.turn
    if turn.is_prompt:
        yield from _results(lane, taken, None, None, "check the kernels and their metadata of prompts")
        return
    fresh, seen = _in_new_lane(lane, taken)
    if seen.error is not None or differences(fresh, seen, taken.answer):
        named = [] if turn.eagerly else [*compare_with_capture(lane, lane.build(), "graph", turn.problem)]
        found = [each for each in named if lane.listed is None or each.rule in lane.listed]
        yield from found or _results(lane, taken, None, None, _ALONE_HELP)
        return
    if _is_by_eager_step(lane, taken):
        yield from _results(lane, taken, None, None, "without the eager steps before it is right")
        return
    if (left := _left(lane, taken, seen)) is not None:
        yield left
        return
    eager = None if turn.eagerly else _right_rig(lane, taken, eagerly=True)
    rule, help_ = ("GP02", _HELP) if eager is None else ("GP10", _IN_GRAPH_HELP)
    yield from _results(lane, taken, rule, _kept(rig, eager or fresh, taken), help_)


def _in_new_lane(lane: LaneUnderTest, taken: _Taken) -> tuple[Rig, StepRecord]:
    """Return a new rig, and the same step there on the right KV cache."""
    fresh = lane.build()
    return fresh, _again(fresh, taken)


def _again(rig: Rig, taken: _Taken, ready: Any = None) -> StepRecord:
    """Run the batch again, on the right KV cache before it."""

    def load() -> None:
        for name, cache in rig.cache.tensors().items():
            cache.copy_(taken.before[name])

    turn = taken.turn
    return rig.step(turn.problem, eagerly=turn.eagerly, after_load=load, ready=ready, may_decline=True)


def _is_by_eager_step(lane: LaneUnderTest, taken: _Taken) -> bool:
    """Return whether a wrong replay is right if eager steps before it are replayed; see `python_state`."""
    earlier = turns_of(lane.config)[: taken.number]
    if taken.turn.eagerly or not any(turn.eagerly and not turn.is_prompt for turn in earlier):
        return False
    return _right_rig(lane, taken, eagerly=False) is not None


def _right_rig(lane: LaneUnderTest, taken: _Taken, *, eagerly: bool) -> Rig | None:
    """Return a rig in which all steps of the requests ran eagerly, or none did; None if this one is wrong."""
    rig = lane.build()
    last = _Followed(lane, rig, eagerly=eagerly).run(turns_of(lane.config)[: taken.number + 1])
    return rig if last[0].number == taken.number and not last[0].is_wrong else None


def _left(lane: LaneUnderTest, taken: _Taken, right: StepRecord) -> Finding | None:
    """Return a finding about the first slot whose contents are not those in a new lane; None if all are."""
    for path, leaf in taken.step.leaves.items():
        other = right.leaves.get(path)
        if not leaf.is_written or other is None or equal(leaf.value, other.value):
            continue
        return lane.finding(
            "GP09" if is_plan(leaf) else "GP02",
            hook=hook_of(leaf),
            field=leaf.name,
            expected="the contents that a new lane has for this batch",
            actual=f"other contents, {_since(taken.turn)}",
            step=taken.step,
            help=_HELP,
        )
    return None


def _kept(rig: Rig, other: Rig, taken: _Taken) -> str | None:
    """Return the names of the memory of the plugin that makes the step wrong; None if it is not found.

    Memory outside the slots that steps write gets the contents that it has in a rig where the step is right,
    and the batch is run again. What need not be renewed for right results is left out.
    """
    if taken.turn.eagerly:
        return None
    mine, others = rig.states(), other.states()
    changed = {
        name: (tensor, tensor.clone(), others[name].clone())
        for name, tensor in mine.items()
        if name in others and tensor.shape == others[name].shape and not equal(tensor, others[name])
    }

    def is_right(renewed: Collection[str]) -> bool:
        def renew(*_: Any) -> None:
            for name, (tensor, now, fresh) in changed.items():
                write(tensor, fresh if name in renewed else now)

        step = _again(rig, taken, renew)
        return step.error is None and not differences(rig, step, taken.answer)

    needed = [*changed]
    if not needed or not is_right(needed):
        return None
    for name in [*needed]:
        fewer = [each for each in needed if each != name]
        if is_right(fewer):
            needed = fewer
    return ", ".join(needed[:_MOST_NAMED]) + (", ..." if len(needed) > _MOST_NAMED else "") or None


_MOST_NAMED = 3


def _since(turn: Turn) -> str:
    """Return what happened before a batch, in words."""
    return "after earlier steps of its requests" + (
        f"; since the last one {turn.after}" if turn.after else ""
    )


def _results(
    lane: LaneUnderTest, taken: _Taken, rule: str | None, culprit: str | None, help_: str
) -> Findings:
    """Yield a finding for the error of a step, or for each of its differences."""
    turn = taken.turn
    kind = "a prompt" if turn.is_prompt else "an eager step" if turn.eagerly else "a replay"
    expected = f"{kind} is right, {_since(turn)}"
    if taken.step.error is not None:
        yield lane.of_error(taken.step.error, expected=expected, step=taken.step, rule=rule, help=help_)
        return
    for wrong in taken.wrong:
        yield lane.finding(
            rule,
            field=f"{kind}: {wrong.what}" if culprit is None else culprit,
            expected=f"{expected}: {wrong.expected}",
            actual=wrong.actual if culprit is None else f"{wrong.what} is {wrong.actual}",
            step=taken.step,
            help=help_,
        )
