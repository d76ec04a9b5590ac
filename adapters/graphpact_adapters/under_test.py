"""`BuilderUnderTest`: the builders of an engine in one configuration; its subjects are rigs.

Does not: draw batches, or run experiments.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact_adapters.backend import BuilderBackend, Built
from graphpact_conformance.experiments.base import differences
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.results import Finding
from graphpact_conformance.subject.records import StepRecord, copies
from graphpact_conformance.subject.under_test import CannotCaptureError
from graphpact_conformance.world.problems import Problem

ROOM = 8
"""How many times as many requests and tokens builders are told, to see whether a buffer is too small."""


@dataclass
class BuilderUnderTest(LaneUnderTest):
    """A lane whose attention metadata comes from builders of another engine."""

    def checked_classes(self) -> Iterator[type[Any]]:
        """Yield the classes of the builders: their code is checked, not the adapter's."""
        for rig in [*self._rigs.values()] or [self.build(capture=False)]:
            for builder in backend_of(rig).builders:
                yield from type(builder).__mro__

    def finding(self, rule: str | None, *, hook: str | None = None, **about: Any) -> Finding:
        """Return a finding; a hook is named by the builder's method that it calls."""
        assert issubclass(self.backend, BuilderBackend)  # noqa: S101  lanes of builders have no other
        calls = self.backend.calls
        named = {"init_metadata_capture": calls["capture"], "init_metadata_replay": calls["replay"]}
        return super().finding(rule, hook=named.get(hook, hook) if hook else None, **about)

    def outputs_with(self, rig: Rig, problem: Problem, view: ForwardBatch, built: Built) -> StepRecord:
        """Run the model eagerly on a padded batch, with given reads of its kernels, and return the record."""
        rig.load(problem)
        step = StepRecord(problem)
        try:
            with torch.inference_mode():
                outputs = rig.net(view, built, rig.backend.forward)
        except Exception as error:  # noqa: BLE001  kernels refuse what they cannot read
            step.error = error
            return step
        live = outputs.rows(problem.batch_size, len(problem.tokens))
        step.rows, step.axes, step.stage = copies(live), outputs.axes, "done"
        step.caches = rig.cache.contents()
        return step

    def is_captured_with_room(self) -> bool:
        """Return whether the lane is captured when builders are told more requests and tokens."""
        roomy = type(self.backend.__name__, (self.backend,), {"room": ROOM})
        try:
            replace(self, backend=roomy).rig()
        except CannotCaptureError:
            return False
        return True

    def is_right(self, rig: Rig, step: StepRecord) -> bool:
        """Return whether a step ended without an error, and agrees with the oracle."""
        return step.error is None and not differences(rig, step, self.answer(rig, step.problem))


def backend_of(rig: Rig) -> BuilderBackend:
    """Return the backend of a rig."""
    backend = rig.backend
    assert isinstance(backend, BuilderBackend)  # noqa: S101  lanes of builders have no other
    return backend
