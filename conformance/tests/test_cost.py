"""What a check costs, counted in captures, steps and recorded calls, since times depend on the machine."""

from collections import Counter

import pytest
import torch

from graphpact.batch import ForwardMode
from graphpact.errors import CaptureError
from graphpact.plugins import PluginCatalog
from graphpact_conformance.draws.batches import draw
from graphpact_conformance.draws.chosen_batches import assorted
from graphpact_conformance.draws.problems import Case
from graphpact_conformance.experiments import refresh
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.suite import planned_lanes
from graphpact_conformance.targets import Options
from graphpact_tape.host_guard import HostReadGuard
from graphpact_tape.host_tensors import HostMemory
from graphpact_tape.recorder import Recorder
from graphpact_tape.tape import TapeDriver


def lane() -> LaneUnderTest:
    """Return a decode lane of flashinfer, which records metadata and writes a part of its slots in a step."""
    backend = PluginCatalog.scan().select("attention_backend", "flashinfer")
    lanes = [plan.lane for plan in planned_lanes(backend, ReferenceRunner, Options(size="quick"))]
    return next(each for each in lanes if each.config.case == Case(ForwardMode.DECODE))


def test_ways_are_found_once_for_all_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experiments of one lane find the producers of metadata once; nothing is captured for it again."""
    asked = Counter[str]()
    right = LaneUnderTest._hook_writes

    def counted(self: LaneUnderTest) -> bool:
        asked["hook"] += 1
        return right(self)

    monkeypatch.setattr(LaneUnderTest, "_hook_writes", counted)
    planned = lane()
    assert planned.anew().ways == planned.anew().ways == ("graph", "hook")
    assert asked["hook"] == 1


@torch.inference_mode()
def test_what_nothing_reads_is_poisoned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that no step writes, and that nothing reads, cost two steps, however many tensors have them."""
    steps = Counter[bool]()
    right = Rig.step

    def counted(self: Rig, *args: object, **options: object) -> object:
        steps["ready" in options] += 1
        return right(self, *args, **options)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(Rig, "step", counted)
    tested = lane()
    exact, small, *_ = draw(tested.config, 1, 0)[0]
    found = [*refresh.after_two_histories(tested, "graph", small, [assorted(tested.config)], [exact])]
    assert not found
    assert steps[True] == 2


def test_a_tape_records_no_views() -> None:
    """A recorder for replays keeps the calls that a replay repeats, and no views; others keep all calls."""
    value = torch.arange(12.0)

    def region() -> torch.Tensor:
        return value.view(3, 4).transpose(0, 1)[1:].add(1).unsqueeze(0)

    numbers = {}
    for work_only in (True, False):
        guard = HostReadGuard(HostMemory(), "while it is recorded", CaptureError)
        recorder = Recorder(guard, work_only=work_only)
        with torch.inference_mode():
            recording = recorder.record(TapeDriver(torch.device("cpu")), region)
        (segment,) = recording.segments
        numbers[work_only] = len(segment.calls), recording.num_nodes
    assert numbers[True] == (1, 1)
    assert numbers[False][0] > numbers[False][1] == 1
