"""State of the process: each change is charged to the call in which it happens, undone, and breaks GP19."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from graphpact import ForwardMode
from graphpact.errors import CaptureError
from graphpact_conformance.draws.chosen_batches import corner
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.records.global_state import DRAWS, Call, SettingChange, StateWatch
from graphpact_conformance.records.raised import CannotCaptureError
from graphpact_conformance.results import Outcome
from graphpact_conformance.suite import PlannedLane, examine_lane, planned_lanes
from graphpact_conformance.targets import Options

CHANGES: dict[str, Callable[[], Any]] = {
    "torch.set_grad_enabled": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "torch.set_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch.set_default_device": lambda: torch.set_default_device("meta"),
    "modes of torch.overrides": lambda: TorchFunctionMode().__enter__(),
    "torch.set_num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch.use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(mode=True),
    "torch.set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "torch.set_flush_denormal": lambda: torch.set_flush_denormal(True),
    "torch.autograd.set_detect_anomaly": lambda: torch.autograd.set_detect_anomaly(mode=True),
    "torch.set_autocast_enabled('cpu', ...)": lambda: torch.set_autocast_enabled("cpu", True),  # noqa: FBT003
    "torch.manual_seed": lambda: torch.manual_seed(torch.initial_seed() + 1),
    DRAWS: lambda: torch.rand(()),
    "torch.backends.cuda.matmul.fp32_precision": lambda: setattr(
        torch.backends.cuda.matmul, "fp32_precision", "tf32"
    ),
    "torch.backends.cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "torch.backends.cuda.enable_flash_sdp": lambda: torch.backends.cuda.enable_flash_sdp(enabled=False),
    "os.chdir": lambda: os.chdir("/"),
    "the handler of SIGTERM": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "Python's random": random.random,
    "numpy.random": np.random.rand,
}


@pytest.fixture(autouse=True)
def _same_process() -> Iterator[None]:
    """Hold the state of the test's process: a planted bug of the watch must not reach other tests."""
    with StateWatch().during(Call("a test")), torch.random.fork_rng():
        yield


@pytest.mark.parametrize("name", CHANGES)
def test_each_setting_is_named_and_restored(name: str) -> None:
    """What a call changes is a change with the setting's name, and the next call begins as the first did."""
    watch = StateWatch()
    for _ in range(2):
        with watch.during(Call("outer")), watch.during(Call("inner")):
            CHANGES[name]()
    told = [change for change in watch.changes.values() if name in change.names]
    assert told
    assert {change.call.where for change in told} <= {"inner", "outer"}
    after = StateWatch()
    with watch.during(Call("again")), after.during(Call("nothing")):
        pass
    assert not after.changes
    assert not [change for change in watch.changes.values() if change.call.where == "again"]


def test_a_change_is_charged_to_the_innermost_call() -> None:
    """A call is charged with what happens in it, before and after calls within it, and with nothing else."""
    watch = StateWatch()
    with watch.during(Call("outer")):
        torch.rand(())
        with watch.during(Call("silent")):
            pass
        with watch.during(Call("inner")):
            torch.set_default_dtype(torch.float64)
        assert torch.get_default_dtype() is torch.float32
        torch.set_grad_enabled(False)
    told = {(change.call.where, change.names) for change in watch.changes.values()}
    assert told == {
        ("outer", (DRAWS,)),
        ("inner", ("torch.set_default_dtype",)),
        ("outer", ("torch.set_grad_enabled",)),
    }


# -- in a lane -----------------------------------------------------------------------------------


def changing(base: type[Any], method: str, change: Callable[[], Any]) -> type[Any]:
    """Return a class that makes ``change`` in each call of ``method``."""
    right = getattr(base, method)

    @wraps(right)
    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        change()
        return right(self, *args, **kwargs)

    return type("Changes", (base,), {method: around})


HOOKS = ("populate", "prepare_replay", "init_metadata_capture", "init_metadata_replay")
RUNNER_HOOKS = HOOKS[:2]


def changes_of(cls: type[Any]) -> list[SettingChange]:
    """Return the changes in a capture, a replay and an eager step of a lane of one plugin."""
    is_backend = issubclass(cls, ReferenceBackend)
    backend, runner = (cls, ReferenceRunner) if is_backend else (ReferenceBackend, cls)
    lane = decode_lane(backend, runner)
    rig = lane.rig()
    for eagerly in (False, True):
        step = rig.step(corner(lane.config), eagerly=eagerly)
        assert step.error is None
    assert [f.rule for f in lane.of_changes()] == ["GP19"] * len(lane.watch.changes)
    return [*lane.watch.changes.values()]


def decode_lane(backend: type[Any], runner: type[Any]) -> LaneUnderTest:
    """Return the lane of a quick run that decodes."""
    kind: Any = "attention_backend" if runner is ReferenceRunner else "runner"
    options = Options(size="quick", lanes=(f"{ForwardMode.DECODE.value}-*",))
    plan = planned_lanes(backend, runner, options, kind=kind)[0]  # the plain one
    return plan.lane


@pytest.mark.few(2)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", ["torch.set_default_dtype", DRAWS])
def test_a_hook_that_changes_state_is_named(hook: str, name: str) -> None:
    """A setting that a hook changes, and a draw in a hook, is a finding that names the hook, and no other."""
    base = ReferenceRunner if hook in RUNNER_HOOKS else ReferenceBackend
    told = changes_of(changing(base, hook, CHANGES[name]))
    assert {(change.call.hook, change.names) for change in told} == {(hook, (name,))}


def test_a_constructor_that_changes_state_is_named() -> None:
    """A setting that a constructor changes is a finding that names the class."""
    change = CHANGES["torch.set_float32_matmul_precision"]
    told = changes_of(changing(ReferenceBackend, "__init__", change))
    assert {change.call.where for change in told} == {"the constructor of Changes"}
    assert all("torch.set_float32_matmul_precision" in change.names for change in told)


def test_a_backend_does_not_draw_and_the_region_of_a_runner_may() -> None:
    """Draws in `forward` of a backend are a finding; those in the region of a runner are none."""
    told = changes_of(changing(ReferenceBackend, "forward", CHANGES[DRAWS]))
    assert {change.names for change in told} == {(DRAWS,)}
    assert {change.call.where for change in told} == {"a capture", "a step", "an eager step"}

    class Samples(ReferenceRunner):
        """A runner that draws in its region."""

        def compose(self, forward: Any, step: Any) -> Any:
            """Draw, and run the model."""
            region = super().compose(forward, step)

            def drawing() -> Any:
                torch.rand(2)
                return region()

            return drawing

    assert changes_of(Samples) == []


def test_seeding_in_a_region_is_refused() -> None:
    """A seed that is set in the region of a runner is refused by the driver, under GP18."""

    class Seeds(ReferenceRunner):
        """A runner that seeds the generator in its region."""

        def compose(self, forward: Any, step: Any) -> Any:
            """Seed, and run the model."""
            region = super().compose(forward, step)

            def seeding() -> Any:
                CHANGES["torch.manual_seed"]()
                return region()

            return seeding

    with pytest.raises(CannotCaptureError, match="the state of the random generator is changed") as caught:
        changes_of(Seeds)
    assert isinstance(caught.value.error, CaptureError)
    assert caught.value.error.rule == "GP18"


def test_the_suite_reports_the_rule_and_goes_on() -> None:
    """A backend that changes the default dtype fails GP19, and keeps every other rule."""
    cls = changing(ReferenceBackend, "init_metadata_replay", CHANGES["torch.set_default_dtype"])
    plan = PlannedLane(decode_lane(cls, ReferenceRunner), is_full=False)
    options = Options(size="quick", examples=1, shrink=False)
    results = list(examine_lane(plan, options))
    assert [r.rule for r in results if r.outcome is Outcome.FAIL] == ["GP19"]
    (failed,) = [r for r in results if r.outcome is Outcome.FAIL]
    (finding,) = failed.findings
    assert finding.hook == "init_metadata_replay"
    assert finding.actual == "torch.float64"
