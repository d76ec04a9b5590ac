"""`BuilderUnderTest`: the builders of an engine in one configuration.

Does not: run experiments; see `graphpact_adapters.experiments`.
"""

import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.plugin_calls import short_path
from graphpact_adapters.backend import BuilderBackend, Built
from graphpact_conformance.experiments.base import differences
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.results import Finding
from graphpact_conformance.subject.raised import causes, need_of
from graphpact_conformance.subject.records import StepRecord, copies
from graphpact_conformance.subject.under_test import CannotCaptureError
from graphpact_conformance.world.problems import Drawn, Problem
from graphpact_tape import two_memories
from graphpact_tape.tape import TapeDriver

ROOM = 8
"""Factor on the numbers of requests and tokens that builders get, to find buffers that are too small."""


class TaskTape(TapeDriver):
    """A fast tape that checks updates of tasks as a strict one does."""

    def __init__(self, device: torch.device, *, strict: bool = False) -> None:
        super().__init__(device, strict=strict, traced=True, strict_tasks=True)


@dataclass
class BuilderUnderTest(LaneUnderTest):
    """A lane whose attention metadata comes from builders of another engine.

    Args:
        most_tokens: The most new tokens of a request in its batches; None for no additional bound.
    """

    most_tokens: int | None = None

    def within(self, problem: Problem) -> Problem:
        """Return a batch in which each request has at most `most_tokens` new tokens."""
        most = self.most_tokens
        if most is None:
            return problem
        cut = [replace(r, tokens=r.tokens[:most]) for r in problem.requests]
        return replace(problem, requests=cut)

    def drawn(self, count: int, seed: int) -> list[Drawn]:
        """Return ``count`` sequences of batches for the lane."""
        return [Drawn(map(self.within, steps)) for steps in super().drawn(count, seed)]

    def checked_classes(self) -> Iterator[type[Any]]:
        """Yield the classes of the lane's backend and of its builders."""
        yield from super().checked_classes()
        if issubclass(self.backend, BuilderBackend):
            for cls in self.backend.types:
                yield from cls.__mro__

    def raised_at(self, error: BaseException) -> str | None:
        """Return the file, line and function of the author's code that raised an error or its cause.

        The author's code is all code outside graphpact, torch and the standard library, because a factory may
        import any package.
        """
        for each in causes(error):
            last = None
            for frame, line in traceback.walk_tb(each.__traceback__):
                module = frame.f_globals.get("__name__", "")
                package = module.partition(".")[0]
                if module == two_memories.__module__:
                    continue  # frames between the author's call and torch
                if package.startswith("graphpact"):
                    last = None
                elif package != "torch" and package not in sys.stdlib_module_names:
                    last = f"{short_path(frame.f_code.co_filename)}:{line} in {frame.f_code.co_qualname}"
            if last is not None:
                return last
        return None

    def finding(self, rule: str | None, *, hook: str | None = None, **about: Any) -> Finding:
        """Return a finding. Its hook is the name of the builder's method that graphpact's hook calls."""
        assert issubclass(self.backend, BuilderBackend)  # noqa: S101  lanes of builders have no other
        calls = self.backend.calls
        named = {"init_metadata_capture": calls["capture"], "init_metadata_replay": calls["replay"]}
        return super().finding(rule, hook=named.get(hook, hook) if hook else None, **about)

    def outputs_with(self, rig: Rig, problem: Problem, view: ForwardBatch, built: Built) -> StepRecord:
        """Run the model eagerly on a padded batch, whose kernels use the given reads; return the record."""
        rig.load(problem)
        step = StepRecord(problem)
        try:
            with torch.inference_mode():
                outputs = rig.net(view, backend_of(rig).steps_of(view, built), rig.backend.forward)
        except Exception as error:  # kernels refuse what they cannot read
            if need_of(error) is not None:
                raise
            step.error = error
            return step
        live = outputs.rows(problem.batch_size, len(problem.tokens))
        step.rows, step.axes, step.stage = copies(live), outputs.axes, "done"
        step.caches = rig.cache.contents()
        return step

    def is_captured_with_room(self) -> bool:
        """Return whether captures succeed if builders get larger numbers of requests and tokens."""
        roomy = type(self.backend.__name__, (self.backend,), {"room": ROOM})
        try:
            replace(self, backend=roomy).rig()
        except CannotCaptureError:
            return False
        return True

    def is_right(self, rig: Rig, step: StepRecord) -> bool:
        """Return whether a step ended without an error and agrees with the oracle."""
        return step.error is None and not differences(rig, step, self.answer(rig, step.problem))


def backend_of(rig: Rig) -> BuilderBackend:
    """Return the backend of a rig."""
    backend = rig.backend
    assert isinstance(backend, BuilderBackend)  # noqa: S101  lanes of builders have no other
    return backend
