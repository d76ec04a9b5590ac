"""`builder_lane`: makes a lane whose backend calls builders of another engine. `outputs_with`: runs reads.

Does not: run experiments; see `graphpact_adapters.experiments`.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.graphs import GraphDriver
from graphpact.runners import GraphRunner
from graphpact_adapters.backend import BuilderBackend, Built
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import differences
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.lane.tested_code import ForeignCode
from graphpact_conformance.oracle import OracleBackend
from graphpact_conformance.records.kv_memory import KvMemory
from graphpact_conformance.records.raised import CannotCaptureError, need_of
from graphpact_conformance.records.steps import StepRecord, copies
from graphpact_tape import two_memories
from graphpact_tape.tape import TapeDriver

ROOM = 8
"""Factor on the numbers of requests and tokens that builders get, to find buffers that are too small."""


class TaskTape(TapeDriver):
    """A fast tape that checks updates of tasks as a strict one does."""

    def __init__(self, device: torch.device, *, strict: bool = False) -> None:
        super().__init__(device, strict=strict, traced=True, strict_tasks=True)


def builder_lane(
    config: Config,
    backend: type[BuilderBackend],
    *,
    runner: type[GraphRunner] = ReferenceRunner,
    driver: type[GraphDriver] | None = None,
    most_tokens: int | None = None,
    kv_memory: type[KvMemory] = KvMemory,
    oracle: type[OracleBackend] = OracleBackend,
    without_graphs: str | None = None,
) -> LaneUnderTest:
    """Return a lane whose attention metadata comes from builders of another engine.

    Args:
        config: The configuration of the lane.
        backend: The backend that calls the builders. Findings name its hooks by the methods that these call.
        runner: The runner.
        driver: Graph driver; None for the tape.
        most_tokens: The most new tokens of a request in its batches; None for no additional bound.
        kv_memory: The class of its KV cache.
        oracle: The class that computes the right attention.
        without_graphs: Why the lane has no graphs, if it has none, in the engine's terms.
    """
    code = ForeignCode(
        classes=_classes_of,
        whose=_is_authors,
        hooks={
            "init_metadata_capture": backend.calls["capture"],
            "init_metadata_replay": backend.calls["replay"],
        },
        without_graphs=without_graphs,
        most_tokens=most_tokens,
        kv_memory=kv_memory,
        oracle=oracle,
    )
    return LaneUnderTest(config, backend, runner, driver=driver, foreign=code)


def _classes_of(backend: type[Any]) -> Iterator[type[Any]]:
    """Yield the classes of the builders that a backend class made, with their bases."""
    for cls in backend.types:
        yield from cls.__mro__


def _is_authors(frame: FrameType) -> bool | None:
    """Return whether a frame is in the author's code; None for code between the author's call and torch.

    The author's code is all code outside graphpact, torch and the standard library, because a factory may
    import any package.
    """
    module = frame.f_globals.get("__name__", "")
    package = module.partition(".")[0]
    if module == two_memories.__module__ or package == "torch" or package in sys.stdlib_module_names:
        return None
    return not package.startswith("graphpact")


def backend_of(rig: Rig) -> BuilderBackend:
    """Return the backend of a rig of a lane of builders."""
    backend = rig.backend
    assert isinstance(backend, BuilderBackend)  # noqa: S101  lanes of builders have no other
    return backend


def backend_class_of(lane: LaneUnderTest) -> type[BuilderBackend]:
    """Return the backend class of a lane of builders."""
    backend = lane.backend
    assert issubclass(backend, BuilderBackend)  # noqa: S101  lanes of builders have no other
    return backend


def outputs_with(rig: Rig, problem: Problem, view: ForwardBatch, built: Built) -> StepRecord:
    """Run the model eagerly on a padded batch, with given reads for its kernels, and return the record."""
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


def is_captured_with_room(lane: LaneUnderTest) -> bool:
    """Return whether captures succeed when builders get larger numbers of requests and tokens."""
    roomy = type(lane.backend.__name__, (lane.backend,), {"room": ROOM})
    try:
        replace(lane, backend=roomy).rig()
    except CannotCaptureError:
        return False
    return True


def replays_with_room(lane: LaneUnderTest, problem: Problem) -> bool:
    """Return whether a batch is replayed correctly when builders get larger sizes."""
    roomy = type(lane.backend.__name__, (lane.backend,), {"room": ROOM})
    try:
        rig = replace(lane, backend=roomy).rig()
    except CannotCaptureError:
        return False
    return ended_right(lane, rig, rig.step(problem))


def ended_right(lane: LaneUnderTest, rig: Rig, step: StepRecord) -> bool:
    """Return whether a step ended without an error and agrees with the oracle."""
    return step.error is None and not differences(rig, step, lane.answer(rig, step.problem))
