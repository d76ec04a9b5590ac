"""`LaneOnRank`: the work of one rank in one lane: captures, steps together with the other ranks, comparisons.

All ranks make the same calls in the same order. So nothing that only this rank has found may change its way.

    captures   the count of live tokens, as at a replay
    steps      the counts of live and gathered tokens; the results, against attention in float64
    repeats    the same step several times: the same bits
    padding    the same step with other padding tokens: the same bits; if not, whose padding is at fault

Does not: decide which rule a wrong value breaks; `graphpact_conformance.experiments.real_ranks.verdict` does.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from graphpact.batch import ForwardBatch
from graphpact.errors import RankError
from graphpact.parallel import get_parallel, local_num_token_non_padded
from graphpact.plugin_calls import place_of
from graphpact.ranks import RankLayout
from graphpact.tensors import same
from graphpact_conformance.draws.fields import COUNT, GATHERED
from graphpact_conformance.experiments.comparison import altered, differences
from graphpact_conformance.experiments.padding import other_tokens
from graphpact_conformance.experiments.real_ranks.messages import Place, RankReport, Stop, Symptom, Wrong
from graphpact_conformance.experiments.real_ranks.model import WIDTH
from graphpact_conformance.experiments.real_ranks.rig import RankRig, Ranks, layouts
from graphpact_conformance.experiments.real_ranks.scenes import Scene, scenes
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.records.raised import message_of
from graphpact_conformance.records.steps import StepRecord

_PORT = re.compile(r"\]:\d+")
"""Ports in messages of gloo, which differ from run to run."""


class LaneOnRank:
    """One lane on one rank.

    Args:
        lane: The lane.
        ranks: All ranks.

    Attributes:
        report: What was found so far.
    """

    def __init__(self, lane: LaneUnderTest, ranks: Ranks) -> None:
        self._lane, self._ranks = lane, ranks
        self._place = Place("", "building the lane")
        self._in_capture = True
        self.report = RankReport(ranks.rank)

    def run(self) -> RankReport:
        """Do all work, and return the report; the last error of this rank is in it."""
        try:
            with self._ranks.watch.explaining():
                for words, layout in layouts(self._ranks.rank, self._ranks.size):
                    self._run_with(words, layout)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
            self._note_error(error)
        return self.report

    def _note_error(self, error: BaseException) -> None:
        if isinstance(error, _SuiteFaultError):
            self.report.fault = f"{message_of(error.cause)}, at {place_of(error.cause)}, {self._place}"
            return
        is_of_ranks = isinstance(error, RankError)
        finding = self._lane.of_error(error, expected="")
        # The message of `RankError` has the lines of all ranks; others begin with the rank, which may differ.
        actual = _PORT.sub("]:…", message_of(error)) if is_of_ranks else finding.actual
        finding = finding.model_copy(update={"actual": actual.removeprefix(f"rank {self._ranks.rank}: ")})
        is_waiting = is_of_ranks and error.__cause__ is not None
        self.report.stop = Stop(finding, self._place, is_waiting, self._in_capture)

    def _run_with(self, words: str, layout: RankLayout) -> None:
        """Capture the lane, and step all scenes, with one way to share requests."""
        watch = self._ranks.watch
        self._place, self._in_capture = Place(words, "capturing the lane"), True
        watch.doing = f"building the lane ({words})"
        with get_parallel().override(
            attn_tp_rank=layout.attention_rank, attn_tp_size=layout.attention_tensor
        ):
            rig = RankRig(self._lane, self._ranks, layout)
            self._capture(rig)
            self._in_capture = False
            with _own_work():
                plan = scenes(self._lane.config, layout.attention_data)
            for scene in plan:
                watch.step += 1
                self._place = Place(words, scene.about, scene.words)
                self._play(rig, scene)
            rig.close()

    def _capture(self, rig: RankRig) -> None:
        """Capture all shapes, and compare the dummies' counts of live tokens with those of replays."""
        counts: list[int | None] = []

        def see(view: ForwardBatch, _: object) -> None:
            count = view.num_token_non_padded
            counts.append(None if count is None else int(count))

        with torch.inference_mode():
            rig.capture(ready=see)
        for shape, count in zip(rig.captured, counts, strict=False):
            rows = shape.num_tokens // rig.layout.attention_tensor
            if count is not None and count != rows:
                self._note(
                    "capture count",
                    f"view.{COUNT} at the capture of {shape}",
                    f"{rows}, as at a replay: all tokens of a dummy are live, and {rows} are of this rank",
                    str(count),
                )

    def _play(self, rig: RankRig, scene: Scene) -> None:
        """Step a scene, then with repeats and with other padding on each rank."""
        base = rig.step_together(scene)
        shape = base.shape
        self.report.refused = None if rig.refused is None else str(rig.refused)
        if base.declined is not None:
            self.report.declined = str(base.declined)
        if shape is not None:
            self.report.replays += 1
            self._place = replace(self._place, shape=str(shape))
        with _own_work():
            if shape is not None:
                self._compare_counts(rig, scene, base)
            self._compare_results(rig, scene, base)
        for _ in range(scene.repeats - 1):
            again = rig.step_together(scene)
            self._note_moved(rig, base, again, "repeat", self._ranks.rank)
        if shape is not None:
            self._play_with_other_padding(rig, scene, base)

    def _play_with_other_padding(self, rig: RankRig, scene: Scene, base: StepRecord) -> None:
        """Step a scene with other padding on all ranks; if that changes anything, on one after the other."""
        changes = other_tokens(base)
        ready = altered(changes) if changes else None
        moved = _moved(base, rig.step_together(scene, ready)) is not None
        told = self._ranks.exchange.tell("compare a step with other padding", mode=int(moved))
        if not any(step.mode for step in told):
            return
        for rank in range(self._ranks.size):
            other = rig.step_together(scene, ready if rank == self._ranks.rank else None)
            self._note_moved(rig, base, other, "padding", rank)

    def _compare_counts(self, rig: RankRig, scene: Scene, step: StepRecord) -> None:
        """Compare the counts of live and of gathered tokens of a replay with those of the contract."""
        assert step.shape is not None  # noqa: S101  it was replayed
        tokens, padded = len(scene.problems[rig.layout.attention_group].tokens), step.shape.num_tokens
        live = local_num_token_non_padded(tokens, padded)
        rows = padded // rig.layout.attention_tensor
        all_gather = f"{padded}: every rank gathers the padded tokens of {step.shape}"
        asked: dict[str, tuple[int, Symptom, str]] = {
            COUNT: (live, "count", f"{live}: the live tokens among its {rows} rows of {step.shape}"),
            **dict.fromkeys(GATHERED, (padded, "gathered", all_gather)),
        }
        for name, (right, symptom, expected) in asked.items():
            leaf = step.leaves.get(f"view.{name}")
            counts = [] if leaf is None else leaf.value.tolist()
            if any(count != right for count in counts) or (name == COUNT and not counts):
                actual = "the view has no such field" if leaf is None else ", ".join(map(str, counts))
                self._note(symptom, f"view.{name}", expected, actual)

    def _compare_results(self, rig: RankRig, scene: Scene, step: StepRecord) -> None:
        """Compare the results of a step with attention in float64 and the layer on all ranks' tokens."""
        right = rig.right(scene, step)
        wrong = differences(rig, step, right)
        if not wrong:
            return
        first = wrong[0]
        symptom: Symptom = "rows"
        if first.kind == "rows" and len(wrong) == 1 and step.rows is not None:
            attended = {"rows": step.rows["rows"][:, :-WIDTH]}
            alone = replace(right, rows={"rows": right.rows["rows"][:, :-WIDTH]})
            if not differences(rig, replace(step, rows=attended), alone):
                symptom = "shared rows"
        self._note(symptom, first.what, first.expected, first.actual)

    def _note_moved(
        self, rig: RankRig, base: StepRecord, step: StepRecord, symptom: Symptom, culprit: int
    ) -> None:
        """Note the first bit in which the live rows of two steps of one scene differ."""
        found = _moved(base, step)
        if found is None:
            return
        name, was, now, at = found
        row, column = divmod(at, was[0].numel())
        unit = "request" if base.axes.get(name) == "bs" else "token"
        self._note(
            symptom,
            f"{unit} {row} of the batch of rank {self._ranks.rank}, {rig.where(name, column)}",
            f"the same bits: {was.flatten()[at].item():.9g}",
            f"{now.flatten()[at].item():.9g}",
            culprit,
        )

    def _note(
        self, symptom: Symptom, field: str, expected: str, actual: str, culprit: int | None = None
    ) -> None:
        """Note a wrong value, unless the layout has one of its kind."""
        whose = self._ranks.rank if culprit is None else culprit
        known = {(w.symptom, w.culprit, w.place.layout) for w in self.report.wrong}
        if (symptom, whose, self._place.layout) not in known:
            self.report.wrong.append(Wrong(symptom, whose, field, expected, actual, self._place))


def _moved(base: StepRecord, step: StepRecord) -> tuple[str, torch.Tensor, torch.Tensor, int] | None:
    """Return the first output whose live rows differ in two steps: its name, both values, and the index."""
    assert base.rows is not None  # noqa: S101  both steps ended
    assert step.rows is not None  # noqa: S101
    for name, was in base.rows.items():
        differs = ~same(was, step.rows[name])
        if bool(differs.any()):
            return name, was, step.rows[name], int(differs.flatten().nonzero()[0])
    return None


class _SuiteFaultError(Exception):
    """An error of the suite itself."""

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


@contextmanager
def _own_work() -> Iterator[None]:
    """Mark errors that are raised inside as those of the suite: no code of a plugin runs there."""
    try:
        yield
    except Exception as error:
        raise _SuiteFaultError(error) from error
