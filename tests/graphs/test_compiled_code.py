"""Tests that recording drivers refuse compiled code, whose kernels they cannot see.

Most tests use torch.compile with a backend that compiles nothing; only some need inductor's code.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compiling import (
    compiler,  # noqa: F401  a fixture
    interpret,
)
from graphpact.errors import CaptureError
from graphpact.graphs import GraphDriver
from graphpact_tape.compiled import _entrances
from support import RECORDING_DRIVERS as DRIVERS

CPU = torch.device("cpu")


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GraphDriver:
    """Return a driver that records; inductor's graphs are interpreted and not compiled."""
    if request.param == "inductor":
        interpret(monkeypatch)
    return DRIVERS[request.param]()


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    """Check that every replaced function of torch and every setting of dynamo is back after a test."""
    torch.compiler.reset()  # torch limits how often it compiles a function, and all tests share that limit
    settings = torch._dynamo.config.get_config_copy()
    entrances = [
        (owner, name, getattr(owner, name)) for owner, name, _ in _entrances(lambda: False, Exception)
    ]
    with torch.inference_mode():
        yield
    assert torch._dynamo.config.get_config_copy() == settings
    assert entrances == [(owner, name, getattr(owner, name)) for owner, name, _ in entrances]


def keep(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
    """Return the graph uncompiled: a backend for torch.compile."""
    return module.forward


def compute(x: torch.Tensor) -> torch.Tensor:
    """Return a result of three operations."""
    return torch.sin(x) * 2 + 1


class Computes(nn.Module):
    """A module that computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of `compute`."""
        return compute(x)


def computes() -> torch.fx.GraphModule:
    """Return a graph of `compute`."""
    return torch.fx.symbolic_trace(compute)


def inductor_code(_: Path) -> Any:
    """Return a function compiled by inductor."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return torch._inductor.compile(computes(), [torch.ones(4)])


def a_package(path: Path) -> Any:
    """Return a loaded package of AOTInductor."""
    with torch.inference_mode(mode=False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls functions that it deprecates
        program = torch.export.export(Computes(), (torch.ones(4),))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(path / "it.pt2"))
        return torch._inductor.aoti_load_package(package)


FUNCTIONS = {
    "a function": (lambda: torch.compile(compute, backend=keep), "compute, compiled by torch.compile,"),
    "in one graph": (
        lambda: torch.compile(compute, backend=keep, fullgraph=True),
        "compute, compiled by torch.compile,",
    ),
    "of any shape": (
        lambda: torch.compile(compute, backend=keep, dynamic=True),
        "compute, compiled by torch.compile,",
    ),
    "a module": (lambda: torch.compile(Computes(), backend=keep), "Computes, compiled by torch.compile,"),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions_of_torch_compile_are_refused(kind: str, driver: GraphDriver) -> None:
    """A region that calls one is refused with name, line and hint; the warm-up may call it."""
    make, name = FUNCTIONS[kind]
    compiled, x = make(), torch.ones(4, device=CPU)

    def region() -> torch.Tensor:
        result: torch.Tensor = compiled(x)
        return result

    with pytest.raises(CaptureError, match=rf"{name} is called .* = compiled\(x\)") as caught:
        driver.capture(region)
    assert caught.value.rule == "GP20"
    assert "call the function that was given to the compiler" in str(caught.value.hint)
    assert torch.equal(compiled(x), compute(x))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("make", [inductor_code, pytest.param(a_package, marks=pytest.mark.sweep)])
def test_code_of_inductor_is_refused(make: Callable[[Path], Any], tmp_path: Path) -> None:
    """A region that calls it is refused by every driver; eager calls run it, at capture and at replays."""
    compiled, x = make(tmp_path), torch.ones(4, device=CPU)
    for driver in (DRIVERS["tape"](), DRIVERS["strict"](), DRIVERS["inductor"]()):
        with pytest.raises(
            CaptureError, match=r"code compiled by inductor is called .* compiled\(x\)"
        ) as caught:
            driver.capture(lambda: compiled(x))
        assert caught.value.rule == "GP20"
        graph = driver.capture(lambda driver=driver: driver.eager_call(compiled, x))
        x.fill_(2.0)
        graph.replay()
        torch.testing.assert_close(graph.outputs, compute(x))
        x.fill_(1.0)


@pytest.mark.sweep
@pytest.mark.usefixtures("compiler")
def test_a_compiled_graph_is_not_replayed_in_a_region() -> None:
    """A region that replays a graph of the inductor driver is refused; the graph stays usable."""
    x = torch.ones(4, device=CPU)
    graph = DRIVERS["inductor"]().capture(lambda: compute(x))
    for driver in (DRIVERS["tape"](), DRIVERS["strict"](), DRIVERS["inductor"]()):
        with pytest.raises(CaptureError, match="code compiled by inductor is called"):
            driver.capture(graph.replay)
    x.fill_(3.0)
    graph.replay()
    torch.testing.assert_close(graph.outputs, compute(x))


def test_a_region_that_catches_the_refusal_is_refused(driver: GraphDriver) -> None:
    """A capture fails if the region called compiled code, even if the region catches the error."""
    compiled, x = torch.compile(compute, backend=keep), torch.ones(4, device=CPU)

    def region() -> torch.Tensor:
        try:
            return compiled(x)
        except CaptureError:
            return compute(x)

    with pytest.raises(CaptureError, match=r"compiled by torch\.compile"):
        driver.capture(region)


@pytest.mark.parametrize("warmup", [0, 1])
def test_eager_calls_may_run_it(warmup: int, driver: GraphDriver) -> None:
    """Eager calls run compiled code without a dispatch mode, so torch compiles it only once."""
    compiled_graphs: list[torch.fx.GraphModule] = []

    def count(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled_graphs.append(module)
        return keep(module, inputs)

    compiled, x = torch.compile(compute, backend=count, fullgraph=True), torch.ones(4, device=CPU)

    def region() -> torch.Tensor:
        with torch.overrides.BaseTorchFunctionMode():  # a replay does not enter the mode either
            return driver.eager_call(compiled, x + 1) * 2

    graph = driver.capture(region, warmup=warmup)
    x.fill_(3.0)
    graph.replay()
    assert torch.equal(graph.outputs, compute(x + 1) * 2)
    assert graph.num_segments == 2
    assert len(compiled_graphs) == 1 + warmup  # the warm-up runs inside the region's mode


def with_an_unused_helper(x: torch.Tensor) -> torch.Tensor:
    """Return what `compute` returns; no compiled code is called."""
    torch.compile(compute, backend=keep)
    return compute(x)


def with_the_compiler_off(x: torch.Tensor) -> torch.Tensor:
    """Call a function of torch.compile under a setting that disables compilation."""
    with torch.compiler.set_stance("force_eager"):
        return torch.compile(compute, backend=keep)(x)


def scripted() -> Any:
    """Return `compute` in TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(compute)


DISPATCHED = {
    "eager": lambda: compute,
    "disabled": lambda: torch.compiler.disable(compute),
    "unused": lambda: with_an_unused_helper,
    "off": lambda: with_the_compiler_off,
    "scripted": scripted,
    "fx": computes,
    "exported": lambda: torch.export.export(Computes(), (torch.ones(4),)).module(),
}


@pytest.mark.parametrize("name", DISPATCHED)
def test_what_is_dispatched_is_recorded(name: str, driver: GraphDriver) -> None:
    """Functions that call no compiled code are recorded operation by operation, whatever their decorators."""
    fn, x = DISPATCHED[name](), torch.ones(4, device=CPU)
    graph = driver.capture(lambda: fn(x), warmup=2)
    x.fill_(3.0)
    graph.replay()
    assert graph.num_nodes == 3
    assert torch.equal(graph.outputs, compute(x))


def test_other_threads_run_compiled_code_in_a_capture(driver: GraphDriver) -> None:
    """Only the thread that records is refused."""
    compiled, x = torch.compile(compute, backend=keep), torch.ones(4, device=CPU)
    calls: list[bool] = []
    results: list[torch.Tensor] = []

    def work() -> None:
        while len(results) < 2:
            if len(calls) > len(results):
                results.append(compiled(x))
            time.sleep(0.001)

    def region() -> torch.Tensor:
        calls.append(True)
        while len(results) < len(calls):
            time.sleep(0.001)
        return x * 2

    thread = threading.Thread(target=work)
    thread.start()
    assert driver.capture(region).num_nodes == 1
    thread.join()
    assert [torch.equal(result, compute(x)) for result in results] == [True, True]
