"""The blind run of a target: its results where the suite is not imported, judged where the plugin is not.

The worker examines a plugin in one process with the suite. So a plugin could be right only where the suite is
imported, or replace the functions that compare its results. The blind run builds a plain lane of every kind
of step in a process that has neither the suite's name nor its oracle
(`graphpact_conformance.isolation.blind_program`), on other batches than the worker's. Its outputs and KV
caches go as events to the supervisor, which starts another process for the judge. That one computes the right
results from the same problems, and imports no plugin.

Does not: check rules, or start processes (see `graphpact_conformance.isolation.supervise`).
"""

from collections.abc import Iterable
from typing import Any

import torch

from graphpact_conformance.experiments.base import differences
from graphpact_conformance.isolation.blind_wire import (
    batches_of,
    capabilities_from_json,
    plain_lanes,
    shape_from_json,
    tensors_from_json,
    with_shapes,
)
from graphpact_conformance.lane.reference import ReferenceBackend
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.legend import BLIND_LANE
from graphpact_conformance.results import Finding, Outcome, Result
from graphpact_conformance.subject.records import StepRecord
from graphpact_conformance.targets import Options, Target
from graphpact_conformance.world.lanes import CASES
from graphpact_conformance.world.problems import Problem

_HELP = (
    "the worker found no fault: let the results depend on nothing but the arguments of a call, and replace"
    " nothing of the suite"
)


def judge(target: Target, options: Options, events: Iterable[dict[str, Any]]) -> Result | None:
    """Return the result of a blind run; None if there was nothing to compare.

    Args:
        target: The plugin, or the pair.
        options: Options of the run.
        events: What came out, in order. An event ``lost``, with ``work`` and ``text``, is the supervisor's.
    """
    seen = Judge(target, options)
    for event in events:
        seen.hear(event)
    return seen.result()


class Judge:
    """Compares the steps of a blind run with the oracle.

    Args:
        target: The plugin, or the pair.
        options: Options of the run.
    """

    def __init__(self, target: Target, options: Options) -> None:
        self._target, self._options = target, options
        self._steps: dict[str, tuple[Rig, list[Problem]]] = {}
        """Of each lane the rig of the oracle, and the batches that are not judged yet."""
        self._findings: list[Finding] = []
        self._judged = 0

    def hear(self, event: dict[str, Any]) -> None:
        """Take an event of the blind run. Anything can be wrong with it: a plugin may have made it."""
        try:
            match event:
                case {"event": "declares", "capabilities": capabilities, "lanes": lanes}:
                    self._declares(capabilities, lanes)
                case {"event": "stepped", "lane": lane, "rows": rows, "axes": axes, "caches": caches}:
                    self._stepped(lane, rows, axes, caches)
                case {"event": "failed", "lane": lane, "text": text}:
                    self._failed(lane, text)
                case {"event": "lost", "work": work, "text": text}:
                    self._find(work, "the process continues", text)
        except Exception as error:  # noqa: BLE001
            text = f"what it sent cannot be judged: {type(error).__name__}: {error}"
            self._find(BLIND_LANE, "outputs and KV caches", text)

    @torch.inference_mode()
    def _declares(self, capabilities: dict[str, Any], lanes: list[tuple[str, list[Any]]]) -> None:
        """Make the lanes of a blind run here, with the suite's own backend and runner."""
        can, device = capabilities_from_json(capabilities), torch.device(self._options.device)
        configs = {str(config): config for config in plain_lanes(can, CASES, device)}
        for name, shapes in lanes:
            config = with_shapes(configs[name], [shape_from_json(shape) for shape in shapes])
            rig = Rig(config, backend=ReferenceBackend, capture=False)
            self._steps[name] = rig, [*batches_of(config, self._options.seed)]

    @torch.inference_mode()
    def _stepped(self, lane: str, rows: Any, axes: dict[str, str], caches: Any) -> None:
        """Compare the next step of a lane with the oracle."""
        rig, problems = self._steps[lane]
        problem = problems.pop(0)
        step = StepRecord(
            problem, stage="done", rows=tensors_from_json(rows), axes=axes, caches=tensors_from_json(caches)
        )
        self._judged += 1
        for wrong in differences(rig, step, rig.answer(problem)):
            self._find(f"{lane}: {wrong.what}", wrong.expected, wrong.actual, problem)

    def _failed(self, lane: str, text: str) -> None:
        """Note that a lane ended with an exception."""
        problems = self._steps.pop(lane)[1]
        self._find(lane, "a step without an error", text, problems[0] if problems else None)

    def _find(self, field: str, expected: str, actual: str, problem: Problem | None = None) -> None:
        self._findings.append(
            Finding(
                rule=None,
                hook=None,
                field=field,
                expected=f"{expected}, also where the suite is not imported",
                actual=actual,
                batch=None if problem is None else problem.words,
                help=_HELP,
            )
        )

    def result(self) -> Result | None:
        """Return the result of the comparison; None if there was nothing to compare."""
        if not (self._judged or self._findings):
            return None
        return Result(
            rule=None,
            check="blind",
            lane=BLIND_LANE,
            outcome=Outcome.FAIL if self._findings else Outcome.PASS,
            findings=self._findings[:8],
            examples=self._judged,
        )
