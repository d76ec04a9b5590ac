"""Launches of Triton's interpreter on a tape; ``test_triton.py`` runs these in processes.

Triton chooses its mode when it is imported. ``TRITON_INTERPRET=1`` chooses its interpreter, which all but one
of these tests need.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import GridExecutor

from graphpact.errors import ConfigError
from graphpact_kernels import interpreter
from graphpact_kernels.interpreter import record_launches, require_interpreter
from graphpact_tape import TapeDriver

is_interpreted = os.environ["TRITON_INTERPRET"] == "1"
interpreted = pytest.mark.skipif(not is_interpreted, reason="Triton compiles in this process")
compiled = pytest.mark.skipif(is_interpreted, reason="Triton interprets in this process")


@triton.jit
def scale_kernel(x: Any, out: Any, factor: Any, count: Any, WIDTH: tl.constexpr) -> None:  # noqa: N803  a constant
    """Write ``x * factor`` to ``out``, ``WIDTH`` elements for each program."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + at, tl.load(x + at, mask=at < count) * factor, mask=at < count)


@pytest.fixture(params=[False, True], ids=["fast", "strict"])
def driver(request: pytest.FixtureRequest) -> Iterator[TapeDriver]:
    """A tape on which launches are recorded; the interpreter is as before after the test."""
    made = TapeDriver(torch.device("cpu"), strict=request.param)
    call, run = GridExecutor.__call__, triton.runtime.jit.JITFunction.run
    record_launches(lambda: made.is_capturing)
    yield made
    GridExecutor.__call__, triton.runtime.jit.JITFunction.run = call, run


def _scaling(x: torch.Tensor, out: torch.Tensor, factors: list[float]) -> Callable[[], None]:
    """Return a region that launches the kernel on a grid of two, with a factor that the host reads."""

    def region() -> None:
        scale_kernel[(2,)](x, out, factor=factors[0], count=len(x), WIDTH=4, num_warps=1)

    return region


@interpreted
def test_a_launch_is_one_node(driver: TapeDriver) -> None:
    """A replay runs the kernel and its grid on the same memory, with the numbers of the capture."""
    x, out, factors = torch.arange(6.0), torch.zeros(6), [2.0]
    graph = driver.capture(_scaling(x, out, factors))
    assert graph.num_nodes == 1
    x += 1
    factors[0] = 3.0
    graph.replay()
    assert out.tolist() == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]


@interpreted
def test_each_launch_keeps_its_own_arguments(driver: TapeDriver) -> None:
    """Memory that the region allocates is passed from launch to launch, in replays too."""
    x = torch.ones(6)

    def region() -> torch.Tensor:
        first, second = x + 1, torch.empty_like(x)
        _scaling(first, first, [2.0])()
        _scaling(first, second, [5.0])()
        return second

    graph = driver.capture(region, warmup=0)
    x += 1
    graph.replay()
    assert graph.outputs.tolist() == [30.0] * 6


@interpreted
@pytest.mark.usefixtures("driver")
def test_a_launch_outside_of_a_capture_runs_at_once() -> None:
    """Without a capture the interpreter runs a kernel as before, and nothing of it is kept."""
    require_interpreter("this test")
    kept, out = len(interpreter._captured), torch.zeros(6)
    _scaling(torch.ones(6), out, [2.0])()
    assert out.tolist() == [2.0] * 6
    assert len(interpreter._captured) == kept


@pytest.mark.usefixtures("driver")
def test_launches_are_recorded_once() -> None:
    """A second call changes nothing: an engine may begin twice in a process."""
    call = GridExecutor.__call__
    record_launches(lambda: True)
    assert GridExecutor.__call__ is call


@compiled
@pytest.mark.usefixtures("driver")
def test_without_the_interpreter_a_launch_is_refused() -> None:
    """No tape sees a compiled kernel: the error names it, and how to start Python."""
    with pytest.raises(ConfigError, match="the kernel scale_kernel needs Triton") as refused:
        _scaling(torch.ones(6), torch.zeros(6), [2.0])()
    assert "TRITON_INTERPRET=1" in str(refused.value)
    with pytest.raises(ConfigError, match="the backend acme needs Triton"):
        require_interpreter("the backend acme")
