"""Tasks on the tape: recorded operators whose host arguments are updated before each replay."""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpact.errors import CaptureError, ContractError, ReplayError
from graphpact.graphs import DeclaredMemory, Graph, GraphDriver, TaskKey, declare_kernel
from graphpact_tape.host_guard import HostReadGuard
from graphpact_tape.host_tensors import HostMemory
from graphpact_tape.recorder import Recorder, RecordingDriver
from graphpact_tape.tape import Tape, TapeDriver

CPU = torch.device("cpu")
ROWS = 3


@declare_kernel
@torch.library.custom_op("graphpact_tests::weigh", mutates_args=("out",))
def weigh(
    x: torch.Tensor,
    out: torch.Tensor,
    weights: list[int],
    shift: int = 0,
    table: torch.Tensor | None = None,
) -> None:
    """Write ``x`` times the weight of each row, plus ``shift``, plus the sum of ``table``."""
    more = 0 if table is None else int(table.sum())
    out.copy_(x * torch.tensor(weights, device=x.device)[:, None] + shift + more)


@declare_kernel
@torch.library.custom_op("graphpact_tests::weighed", mutates_args=())
def weighed(x: torch.Tensor, weights: list[int]) -> torch.Tensor:
    """Return new memory."""
    return x * weights[0]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as a lane runs its steps."""
    with torch.inference_mode():
        yield


class Layers:
    """A region of layers on a driver. Each layer is a task.

    Args:
        driver: The driver.
        graph: The key of the graph.
        count: Layers.
    """

    def __init__(self, driver: GraphDriver, graph: str = "g", count: int = 2) -> None:
        self.driver, self.key, self.layers = driver, graph, range(count)
        self.x = torch.ones(ROWS, 2, device=CPU)
        driver.declare(DeclaredMemory(refreshed=[self.x]))
        self.graph: Graph = driver.capture(self.region)

    def region(self) -> torch.Tensor:
        """Return the input times all weights, which are 1 at capture."""
        y = self.x * 1
        for layer in self.layers:
            out = torch.empty_like(y)
            self.driver.task(TaskKey(self.key, layer), weigh, (y, out), {"weights": [1] * ROWS})
            y = out
        return y

    def update(self, layer: int, *weights: int) -> None:
        """Update the task of a layer."""
        self.driver.update_task(TaskKey(self.key, layer), {"weights": list(weights)})


def _driver(*, strict: bool) -> TapeDriver:
    return TapeDriver(CPU, strict=strict)


@given(
    strict=st.booleans(),
    count=st.integers(1, 4),
    steps=st.lists(st.lists(st.integers(-5, 5), min_size=ROWS, max_size=ROWS), min_size=1, max_size=4),
)
def test_a_replay_uses_the_arguments_of_its_updates(
    *, strict: bool, count: int, steps: list[list[int]]
) -> None:
    """Each replay equals an eager run with the same arguments, for every number of layers."""
    layers = Layers(_driver(strict=strict), count=count)
    for weights in steps:
        layers.x.normal_()
        expected = layers.x.clone()
        for layer in layers.layers:
            layers.update(layer, *weights)
            expected = expected * torch.tensor(weights)[:, None]
        layers.graph.replay()
        torch.testing.assert_close(layers.graph.outputs, expected)


@given(st.integers(1, 3), st.lists(st.integers(0, 2), max_size=5))
def test_a_strict_replay_takes_one_order_of_updates_alone(count: int, order: list[int]) -> None:
    """Updates of known layers are accepted if and only if each comes once, in the order of the capture."""
    layers = Layers(_driver(strict=True), count=count)
    order = [layer for layer in order if layer < count]

    def step() -> None:
        for layer in order:
            layers.update(layer, 2, 2, 2)
        layers.graph.replay()

    if order == list(range(count)):
        step()
        return
    with pytest.raises(ReplayError) as refused:
        step()
    assert refused.value.rule == "GP21"


@pytest.mark.parametrize("strict", [False, True])
def test_a_task_is_one_node_and_keeps_no_update_object(*, strict: bool) -> None:
    """A task is one node; containers and host tensors are copied at capture and at each update."""
    driver, x = _driver(strict=strict), torch.ones(ROWS, 2, device=CPU)
    weights, table = [2] * ROWS, torch.tensor([3])
    driver.declare(DeclaredMemory(refreshed=[x], host=[table]))

    def region() -> torch.Tensor:
        out = torch.empty_like(x)
        driver.task(TaskKey("g", 0), weigh, (x, out), {"weights": weights, "shift": 1, "table": table})
        return out

    graph = driver.capture(region)
    assert graph.num_nodes == 1
    driver.update_task(TaskKey("g", 0), {"weights": weights, "shift": 5, "table": table})
    weights[0] = 100
    table.fill_(100)
    graph.replay()
    assert graph.outputs.tolist() == [[2 + 5 + 3] * 2] * ROWS


@pytest.mark.parametrize("strict", [False, True])
def test_outside_a_region_a_task_is_a_call(*, strict: bool) -> None:
    """Warm-up runs, eager calls and eager steps call the operator with the given arguments."""
    driver, x, out = _driver(strict=strict), torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    driver.task(TaskKey("g", 0), weigh, (x, out), {"weights": [1, 2, 3]})
    assert out.tolist() == [[1], [2], [3]]
    with pytest.raises(ReplayError, match=r"0 of g is not a task, .*; the graphs with tasks: none"):
        driver.update_task(TaskKey("g", 0), {"weights": [1, 2, 3]})


def test_a_missed_update_keeps_the_old_arguments_on_the_fast_tape() -> None:
    """Without an update, a fast replay uses the arguments of the last update, as a device does."""
    layers = Layers(_driver(strict=False))
    layers.update(0, 2, 2, 2)
    layers.update(1, 3, 3, 3)
    layers.graph.replay()
    layers.update(1, 5, 5, 5)
    layers.graph.replay()
    assert layers.graph.outputs.tolist() == [[10, 10]] * ROWS


def _missed(layers: Layers, _: Layers) -> None:
    layers.update(0, 2, 2, 2)
    layers.graph.replay()


def _twice(layers: Layers, _: Layers) -> None:
    layers.update(0, 2, 2, 2)
    layers.update(0, 2, 2, 2)


def _out_of_order(layers: Layers, _: Layers) -> None:
    layers.update(1, 2, 2, 2)


def _of_another_layer(layers: Layers, _: Layers) -> None:
    layers.update(0, 2, 2)


def _of_another_graph(layers: Layers, other: Layers) -> None:
    for layer in layers.layers:
        other.update(layer, 2, 2, 2)
    layers.graph.replay()


def _of_an_unknown_graph(layers: Layers, _: Layers) -> None:
    layers.driver.update_task(TaskKey("unknown", 0), {"weights": [2, 2, 2]})


def _of_an_unknown_layer(layers: Layers, _: Layers) -> None:
    layers.update(7, 2, 2, 2)


def _of_another_name(layers: Layers, _: Layers) -> None:
    layers.driver.update_task(TaskKey("g", 0), {"lengths": [2, 2, 2]})


def _of_a_device_tensor(layers: Layers, _: Layers) -> None:
    layers.driver.update_task(TaskKey("g", 0), {"weights": torch.ones(3, device="meta")})


def _during_the_replay(layers: Layers, _: Layers) -> None:
    side = layers.driver.stream()
    for layer in layers.layers:
        layers.update(layer, 2, 2, 2)
    layers.graph.replay()
    with side:
        layers.update(0, 2, 2, 2)


def _not_awaited(layers: Layers, _: Layers) -> None:
    side = layers.driver.stream()
    side.wait_stream(layers.driver.current_stream())
    with side:
        for layer in layers.layers:
            layers.update(layer, 2, 2, 2)
    layers.graph.replay()


_WAYS: Mapping[Callable[[Layers, Layers], None], str] = {
    _missed: r"task 1 of g \(.*weigh.*\), recorded at .*, was not updated before this replay and keeps"
    r" weights=\[1, 1, 1\]; 1 of the graph's 2 tasks were updated\n",
    _twice: r"task 0 of g .* is updated for the second time .*: the next one is 1; captured order: 0, 1",
    _out_of_order: r"task 1 of g .* is updated before its turn .*: the next one is 0; captured order: 0, 1",
    _of_another_layer: r"task 0 of g .*, recorded at .* with weights=\[1, 1, 1\], is updated at .* with"
    r" weights=\[2, 2\]",
    _of_another_graph: r"task 0 of g .* was not updated .*; 0 of the graph's 2 tasks were updated; tasks of"
    r" other were updated instead",
    _of_an_unknown_graph: r"0 of unknown is not a task, at .*; the graphs with tasks: (g, other|other, g)",
    _of_an_unknown_layer: r"7 of g is not a task, at .*; the tasks of this graph: 0, 1",
    _of_another_name: r"task 0 of g .* with weights=\[1, 1, 1\], is updated at .* with lengths=\[2, 2, 2\]",
    _of_a_device_tensor: r"task 0 of g .* is updated at .*: a Tensor is not a host number",
    _during_the_replay: r"task 0 of g .* is updated, and its arguments are in use: a replay of g reads them"
    r" at .*, and an update of task 0 of g .* writes them at",
    _not_awaited: r"a task of g is replayed, and its arguments are in use: an update of task 0 of g .* writes"
    r" them at .*, and a replay of g reads them at",
}
_ON_ANY_TAPE = (_of_an_unknown_graph, _of_an_unknown_layer, _of_another_name, _of_a_device_tensor)


@pytest.mark.parametrize("way", _WAYS, ids=lambda way: way.__name__.strip("_"))
def test_each_way_to_break_tasks_is_refused(way: Callable[[Layers, Layers], None]) -> None:
    """A strict tape raises GP21 with task, graph and arguments, and can then replay a correct step."""
    driver = _driver(strict=True)
    other, layers = Layers(driver, "other"), Layers(driver)
    with pytest.raises(ReplayError, match=_WAYS[way]) as refused:
        way(layers, other)
    assert refused.value.rule == "GP21"
    assert refused.value.hint
    driver.synchronize()
    for each in (layers, other):
        with driver.preparation():
            for layer in each.layers:
                each.update(layer, 2, 3, 4)
        each.graph.replay()
        assert each.graph.outputs.tolist() == [[4, 4], [9, 9], [16, 16]]


@pytest.mark.parametrize("way", _ON_ANY_TAPE, ids=lambda way: way.__name__.strip("_"))
def test_what_no_task_can_take_is_refused_on_the_fast_tape_too(way: Callable[..., None]) -> None:
    """An unknown key, arguments with another name and device tensors are errors in both modes."""
    driver = _driver(strict=False)
    other, layers = Layers(driver, "other"), Layers(driver)
    with pytest.raises(ReplayError, match=_WAYS[way]) as refused:
        way(layers, other)
    assert refused.value.rule == "GP21"


def test_a_step_that_is_prepared_and_not_launched_may_be_prepared_again() -> None:
    """A new preparation may begin the updates again, even after some of them; the same one may not."""
    layers = Layers(_driver(strict=True))
    for done in ([0], [0, 1], [0, 1]):
        with layers.driver.preparation():
            for layer in done:
                layers.update(layer, 2, 2, 2)
    layers.graph.replay()
    assert layers.graph.outputs.tolist() == [[4, 4]] * ROWS
    with layers.driver.preparation():
        layers.update(0, 2, 2, 2)
        with pytest.raises(ReplayError, match="for the second time"):
            layers.update(0, 2, 2, 2)


def test_updates_on_a_stream_that_waits_and_is_awaited_are_right() -> None:
    """Updates may run on a separate stream, as on an NPU, if both waits exist."""
    layers = Layers(_driver(strict=True))
    side, main = layers.driver.stream(), layers.driver.current_stream()
    for weight in (2, 3):
        side.wait_stream(main)
        with side:
            for layer in layers.layers:
                layers.update(layer, *[weight] * ROWS)
        main.wait_stream(side)
        layers.graph.replay()
        assert layers.graph.outputs.tolist() == [[weight**2] * 2] * ROWS


def test_updates_after_the_host_waited_are_right() -> None:
    """Instead of the stream, the host may wait for the previous replay: by event, stream or driver."""
    layers = Layers(_driver(strict=True))
    driver, side = layers.driver, layers.driver.stream()
    main, replayed = driver.current_stream(), driver.event()

    def step() -> None:
        with side:
            for layer in layers.layers:
                layers.update(layer, 2, 2, 2)
        main.wait_stream(side)
        layers.graph.replay()
        replayed.record()

    for wait in (replayed.synchronize, main.synchronize, driver.synchronize):
        step()
        assert layers.graph.outputs.tolist() == [[4, 4]] * ROWS
        wait()
    step()
    with pytest.raises(ReplayError, match="in use: a replay of g reads them"):
        step()


def test_a_preparation_takes_no_device_tensor_by_value() -> None:
    """In a strict preparation, an update with a device tensor is a host read, refused by GP20."""
    driver, x, lens = _driver(strict=True), torch.ones(ROWS, 2, device=CPU), torch.ones(ROWS, device=CPU)
    on_host = torch.tensor([1])
    driver.declare(DeclaredMemory(refreshed=[x, lens], host=[on_host]))

    def region() -> torch.Tensor:
        out = torch.empty_like(x)
        driver.task(TaskKey("g", 0), weigh, (x, out), {**_ONES, "table": on_host})
        return out

    graph = driver.capture(region)
    with (
        pytest.raises(
            ReplayError, match="an update of a task needs a tensor's contents on the host"
        ) as refused,
        driver.preparation(),
    ):
        driver.update_task(TaskKey("g", 0), {**_ONES, "table": lens})
    assert refused.value.rule == "GP20"
    with driver.preparation():
        driver.update_task(TaskKey("g", 0), {**_ONES, "table": on_host + 4})
    graph.replay()
    assert graph.outputs.tolist() == [[6, 6]] * ROWS


@pytest.mark.parametrize("strict", [False, True])
def test_a_graph_that_is_captured_again_or_released_has_no_old_tasks(*, strict: bool) -> None:
    """Updates go to the newest graph of a key; released graphs and failed captures have no tasks."""
    driver = _driver(strict=strict)
    old = Layers(driver)
    new = Layers(driver)
    for layer in new.layers:
        new.update(layer, 2, 2, 2)
    new.graph.replay()
    assert new.graph.outputs.tolist() == [[4, 4]] * ROWS
    old.graph.release()
    with pytest.raises(KeyError):
        driver.capture(lambda: {}["missing"])
    for layer in new.layers:
        new.update(layer, 3, 3, 3)
    new.graph.replay()
    assert new.graph.outputs.tolist() == [[9, 9]] * ROWS
    held = weakref.ref(new.graph.tasks) if isinstance(new.graph, Tape) else None
    new.graph.release()
    gc.collect()
    assert held is None or held() is None
    with pytest.raises(ReplayError, match="is not a task"):
        new.update(0, 1, 1, 1)


def _region(driver: GraphDriver, *tasks: tuple[TaskKey, Any, dict[str, Any]]) -> Callable[[], torch.Tensor]:
    x, out = torch.ones(ROWS, 2, device=CPU), torch.zeros(ROWS, 2, device=CPU)
    driver.declare(DeclaredMemory(refreshed=[x, out]))

    def region() -> torch.Tensor:
        for key, op, updated in tasks:
            driver.task(key, op, (x, out) if op is not weighed else (x,), updated)
        return out

    return region


_ONES: dict[str, Any] = {"weights": [1] * ROWS}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ([(TaskKey("g", 0), weigh, _ONES)] * 2, "the task 0 of g follows task 0 of g"),
        (
            [(TaskKey("g", 0), weigh, _ONES), (TaskKey("h", 1), weigh, _ONES)],
            "the task 1 of h follows task 0 of g",
        ),
        ([(TaskKey("g", 0), weighed, _ONES)], "returns new memory"),
        ([(TaskKey("g", 0), lambda *_, **__: None, _ONES)], "is not a torch operator"),
        (
            [(TaskKey("g", 0), weigh, {**_ONES, "table": torch.zeros(1).numpy()})],
            "ndarray is not a host number",
        ),
    ],
)
def test_a_capture_refuses_what_cannot_be_updated(
    tasks: list[tuple[TaskKey, Any, dict[str, Any]]], says: str, *, strict: bool
) -> None:
    """Two tasks with one key, two graphs in one capture, and calls of unsuitable operators are refused."""
    driver = _driver(strict=strict)
    with pytest.raises(CaptureError, match=says) as refused:
        driver.capture(_region(driver, *tasks), warmup=0)
    assert refused.value.rule == "GP21"
    assert "test_tasks.py" in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize("strict", [False, True])
def test_a_region_does_not_update(*, strict: bool) -> None:
    """An update inside a region is refused: a graph would not repeat it."""
    layers = Layers(_driver(strict=strict))
    with pytest.raises(CaptureError, match="the task 0 of g is updated while a graph is recorded") as refused:
        layers.driver.capture(lambda: layers.update(0, 1, 1, 1))
    assert refused.value.rule == "GP21"


class _Without(RecordingDriver):
    """A driver that records tapes but does not support tasks."""

    name = "without"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return None."""
        del device

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Record one run."""
        del warmup
        return Tape(self.record(Recorder(HostReadGuard(HostMemory(), "at capture", CaptureError)), fn))


def test_a_driver_without_tasks_says_so() -> None:
    """Captures and updates of tasks raise GP21 and say what to do; outside a region a task is a call."""
    driver = _Without(CPU)
    assert not driver.has_tasks
    region = _region(driver, (TaskKey("g", 0), weigh, _ONES))
    assert region().tolist() == [[1, 1]] * ROWS
    for act in (lambda: driver.capture(region), lambda: driver.update_task(TaskKey("g", 0), _ONES)):
        with pytest.raises(ContractError, match="graph driver 'without' has no tasks") as refused:
            act()
        assert refused.value.rule == "GP21"
        assert refused.value.hint


def test_a_strict_task_holds_its_memory_to_the_rules_of_other_operations() -> None:
    """Freed external memory, undeclared writes and another graph's memory are refused for tasks too."""
    driver = _driver(strict=True)
    layers = Layers(driver)
    foreign = torch.zeros(ROWS, 2, device=CPU)
    args = (layers.x, foreign)
    with pytest.raises(CaptureError, match="not declared as written") as undeclared:
        driver.capture(lambda: driver.task(TaskKey("w", 0), weigh, args, _ONES))
    assert undeclared.value.rule == "GP19"
    other = layers.graph.outputs
    with pytest.raises(CaptureError, match="another graph's capture allocated") as shared:
        driver.capture(lambda: driver.task(TaskKey("s", 0), weigh, (other, torch.empty_like(other)), _ONES))
    assert shared.value.rule == "GP15"
    spare = [torch.ones(ROWS, 2, device=CPU)]

    def reads_spare() -> torch.Tensor:
        out = torch.empty(ROWS, 2, device=CPU)
        driver.task(TaskKey("f", 0), weigh, (spare[0], out), _ONES)
        return out

    graph = driver.capture(reads_spare)
    spare.clear()
    driver.update_task(TaskKey("f", 0), _ONES)
    with pytest.raises(ReplayError, match="was freed") as freed:
        graph.replay()
    assert freed.value.rule == "GP14"
