"""Tests of the driver contract, the same for every driver.

The tape runs everywhere, inductor needs a compiler, and CUDA graphs need a GPU.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiling import compiler  # noqa: F401  a fixture
from graphpact.errors import EngineError
from graphpact.graphs import EagerCall, Graph, GraphDriver
from graphpact_conformance.driver_contract import CHECKS, DriverCheck, driver_contract
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_cuda_graph.driver import CudaDriver, DeviceGraph
from graphpact_cuda_graph.externals import ExternalsWatch
from graphpact_tape.tape import TapeDriver

_CUDA = torch.device("cuda", 0)
_NO_CUDA = CudaDriver.unavailable(_CUDA)
_DRIVERS = [
    pytest.param((TapeDriver, torch.device("cpu")), id="tape"),
    pytest.param((functools.partial(TapeDriver, strict=True), torch.device("cpu")), id="tape-strict"),
    pytest.param((InductorDriver, torch.device("cpu")), id="inductor"),
    pytest.param(
        (CudaDriver, _CUDA),
        id="cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(bool(_NO_CUDA), reason=str(_NO_CUDA))],
    ),
    pytest.param(
        (TapeDriver, _CUDA),
        id="tape-on-cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(bool(_NO_CUDA), reason=str(_NO_CUDA))],
    ),
]


def _cases() -> list[Any]:
    """Return every driver with every check; most checks that compile are marked as sweeps."""
    found = []
    for driver, (at, name) in itertools.product(_DRIVERS, enumerate(CHECKS)):
        marks = [*driver.marks, *([pytest.mark.sweep] if driver.id == "inductor" and at % 5 else [])]
        found.append(pytest.param(*driver.values, name, id=f"{driver.id}-{name}", marks=marks))
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "name"), _cases())
def test_every_driver_keeps_the_contract(
    kind: tuple[type[GraphDriver], torch.device], name: str, request: pytest.FixtureRequest
) -> None:
    """A driver keeps one promise of `graphpact.graphs.driver`."""
    make, device = kind
    if make is InductorDriver:
        request.getfixturevalue("compiler")
    DriverCheck(name, make, device)()


def test_a_driver_that_breaks_a_promise_fails_with_it() -> None:
    """A driver whose replay runs the region's Python again fails with the text of the promise."""

    class Again(TapeDriver):
        def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
            graph = super().capture(fn, warmup=warmup)
            replay = graph.replay
            graph.replay = lambda: (replay(), fn(), None)[2]  # type: ignore[method-assign]
            return graph

    check = DriverCheck("replay_runs_no_python", Again, torch.device("cpu"))
    with pytest.raises(AssertionError, match=r"(?s)runs once per warm-up.*expected 3, got 6"):
        check()


class CannotBeMade(TapeDriver):
    """A driver whose constructor raises."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        raise OSError("no such library")


class CapturesNothing(TapeDriver):
    """A driver whose `capture` returns None."""

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Any:
        """Record, and return None."""
        super().capture(fn, warmup=warmup)


class RefusesNothing(TapeDriver):
    """A driver that hides every error of a capture; its replays refuse nothing and run nothing."""

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Record what can be recorded."""
        try:
            graph = super().capture(fn, warmup=warmup)
        except Exception:  # noqa: BLE001  the bug
            graph = super().capture(lambda: torch.zeros(1))
        graph.replay = lambda: None  # type: ignore[method-assign]
        return graph


class LosesOutputs(TapeDriver):
    """A driver whose graphs read a missing attribute."""

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Record, and lose the outputs."""
        graph = super().capture(fn, warmup=warmup)
        del graph.outputs
        return graph


class ReplaysReleased(TapeDriver):
    """A driver whose released graphs accept a replay and do nothing."""

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Record, and refuse no replay after the release."""
        graph = super().capture(fn, warmup=warmup)
        release = graph.release

        def forgets() -> None:
            release()
            graph.replay = lambda: None  # type: ignore[method-assign]

        graph.release = forgets  # type: ignore[method-assign]
        return graph


@pytest.mark.parametrize(
    ("make", "broken"),
    [
        (CannotBeMade, {*CHECKS}),
        (CapturesNothing, {"outputs_stay_where_they_are"}),
        (RefusesNothing, {"an_eager_call_may_not_change_its_form", "captures_do_not_nest"}),
        (LosesOutputs, {"outputs_stay_where_they_are"}),
        (ReplaysReleased, {"a_released_graph_is_not_replayed"}),
    ],
)
def test_every_failure_begins_with_the_promise(make: type[TapeDriver], broken: set[str]) -> None:
    """However a driver breaks a promise, the check fails with the text of the promise and the cause."""
    failed = set()
    for name, promise in CHECKS.items():
        try:
            DriverCheck(name, make, torch.device("cpu"))()
        except AssertionError as error:
            text, _, cause = str(error).partition("\n")
            assert text == promise.sentence
            assert cause
            failed.add(name)
    assert broken <= failed


@driver_contract(TapeDriver)
def test_the_decorator_makes_a_test_for_each_promise(check: DriverCheck) -> None:
    """`driver_contract` parametrizes a test with all checks."""
    assert CHECKS[check.name].sentence
    check()


def test_cuda_says_why_it_is_unavailable() -> None:
    """The CUDA driver is unavailable on a CPU, with a reason that names the device."""
    reason = CudaDriver.unavailable(torch.device("cpu"))
    assert reason is not None
    assert "cpu" in reason


@pytest.mark.parametrize("watches_inputs", [False, True])
def test_a_released_cuda_graph_refuses_its_replay(*, watches_inputs: bool) -> None:
    """Without a GPU too: released CUDA graphs raise `EngineError` and make no eager call."""
    calls: list[int] = []
    call = EagerCall(calls.append, (1,), None)
    for steps in ([call], [call, call]):
        watch = ExternalsWatch(torch.device("cpu"))
        graph = DeviceGraph([*steps], None, 0, watch, watches_inputs=watches_inputs)
        graph.release()
        with pytest.raises(EngineError, match="a released graph was replayed"):
            graph.replay()
    assert calls == []


@pytest.mark.skipif(not _NO_CUDA, reason="this machine has a GPU")
def test_without_a_gpu_cuda_says_so() -> None:
    """Without a GPU, the CUDA driver says that torch sees no CUDA device."""
    assert _NO_CUDA == "torch sees no CUDA device"
