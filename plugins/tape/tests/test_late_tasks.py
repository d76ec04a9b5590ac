"""Tasks whose tensors are rebound, and whose updates follow the launch of their replay."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpact.errors import CaptureError, ContractError, EngineError, ReplayError
from graphpact.graphs import DeclaredMemory, Graph, TaskKey
from graphpact_tape.tape import TapeDriver

CPU = torch.device("cpu")
ROWS = 3
WEIGHTS = {"weights": [1] * ROWS}


@torch.library.custom_op("graphpact_tests::add_sum", mutates_args=("out",))
def weigh(
    x: torch.Tensor, out: torch.Tensor, weights: list[int], table: torch.Tensor, shift: int = 0
) -> None:
    """Write ``x`` times the weight of each row, plus ``shift``, plus the sum of ``table``."""
    out.copy_(x * torch.tensor(weights, device=x.device)[:, None] + shift + int(table.sum()))


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as a lane runs its steps."""
    with torch.inference_mode():
        yield


def _table(value: int, size: int = 1) -> torch.Tensor:
    """Return a device tensor with a sum."""
    return torch.tensor([value, *[0] * (size - 1)], device=CPU)


class Tabled:
    """A region of layers. Each layer is a task that adds the sum of a table, which updates rebind.

    Args:
        strict: Whether the driver is strict.
        waits: Whether the graph waits for each update.
        driver: The driver; a new one by default.
        graph: The key of the graph.
        count: Layers.
    """

    def __init__(
        self,
        *,
        strict: bool,
        waits: bool = False,
        driver: TapeDriver | None = None,
        graph: Any = "g",
        count: int = 2,
    ) -> None:
        self.driver = driver or TapeDriver(CPU, strict=strict)
        self.key, self.layers, self.waits = graph, range(count), waits
        self.x = torch.zeros(ROWS, 2, device=CPU)
        self.tables = [_table(0) for _ in self.layers]
        self.driver.declare(DeclaredMemory(refreshed=[self.x]))
        self.graph: Graph = self.driver.capture(self.region)
        self.tables.clear()  # a graph does not need the tables that it was captured with

    def region(self) -> torch.Tensor:
        """Return the input plus the sums of all tables."""
        y = self.x * 1
        for layer, table in zip(self.layers, self.tables, strict=True):
            out, key = torch.empty_like(y), TaskKey(self.key, layer)
            self.driver.task(key, weigh, (y, out), WEIGHTS, rebound={"table": table}, waits=self.waits)
            y = out
        return y

    def update(self, layer: int, table: torch.Tensor) -> None:
        """Rebind the table of a layer."""
        self.driver.update_task(TaskKey(self.key, layer), WEIGHTS, rebound={"table": table})

    def update_all(self, tables: list[torch.Tensor]) -> None:
        """Rebind the tables of all layers."""
        for layer, table in zip(self.layers, tables, strict=True):
            self.update(layer, table)

    def require(self, added: int) -> None:
        """Assert that the outputs are the input plus a number."""
        torch.testing.assert_close(self.graph.outputs, self.x + added)


@given(
    strict=st.booleans(),
    waits=st.booleans(),
    count=st.integers(1, 3),
    steps=st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_a_replay_reads_the_tensors_of_its_updates(
    *, strict: bool, waits: bool, count: int, steps: list[tuple[int, int]]
) -> None:
    """Each replay reads the tensor of the last update, even if its size differs, and no earlier one."""
    layers = Tabled(strict=strict, waits=waits, count=count)
    for value, size in steps:
        layers.x.normal_()
        tables = [_table(value, size) for _ in range(count)]
        layers.update_all(tables)
        layers.graph.replay()
        layers.require(value * count)
        for table in tables:
            table.fill_(1000)  # the plugin may use it again


@pytest.mark.parametrize("strict", [False, True])
def test_a_rebound_tensor_is_read_by_its_address(*, strict: bool) -> None:
    """A replay sees writes to the tensor after the update, but not new memory of the tensor object."""
    layers, tables = Tabled(strict=strict), [_table(1), _table(2)]
    kept = tables[1][:]
    layers.update_all(tables)
    tables[0].fill_(10)
    tables[1].set_(_table(1000))
    layers.graph.replay()
    layers.require(12)
    del kept


def _freed(layers: Tabled) -> None:
    layers.update_all([_table(1), _table(2)])


def _moved(layers: Tabled) -> None:
    tables = [_table(1), _table(2)]
    layers.update_all(tables)
    layers.tables = tables
    tables[0].resize_(1 << 20)


@pytest.mark.parametrize(("way", "says"), [(_freed, "was freed"), (_moved, "moved from")])
def test_a_rebound_tensor_that_is_gone_is_named(way: Callable[[Tabled], None], says: str) -> None:
    """If a tensor was freed or moved before the replay, GP14 names the argument and the update's line."""
    layers = Tabled(strict=True)
    way(layers)
    with pytest.raises(
        ReplayError, match=f"table of task 0 of g .* {says}.*the update at .*test_late"
    ) as gone:
        layers.graph.replay()
    assert gone.value.rule == "GP14"
    layers.tables = [_table(3), _table(4)]
    layers.update_all(layers.tables)
    layers.graph.replay()
    layers.require(7)


def test_a_rebound_tensor_is_no_memory_of_a_graph() -> None:
    """A tensor that a capture allocated is refused by GP15, because replays overwrite it."""
    layers = Tabled(strict=True)
    with pytest.raises(ReplayError, match=r"table of task 0 of g .* a graph's capture allocated") as refused:
        layers.update(0, layers.graph.outputs.flatten().long().set_(layers.graph.outputs.untyped_storage()))
    assert refused.value.rule == "GP15"


def _not_rebound(layers: Tabled) -> None:
    layers.driver.update_task(TaskKey("g", 0), WEIGHTS)


def _by_value(layers: Tabled) -> None:
    layers.driver.update_task(TaskKey("g", 0), {**WEIGHTS, "table": _table(1)})


def _of_another_dtype(layers: Tabled) -> None:
    layers.update(0, _table(1).float())


def _no_tensor(layers: Tabled) -> None:
    layers.driver.update_task(TaskKey("g", 0), WEIGHTS, rebound={"table": [1]})  # type: ignore[dict-item]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("way", [_not_rebound, _by_value, _of_another_dtype, _no_tensor])
def test_an_update_rebinds_what_the_capture_declared(way: Callable[[Tabled], None], *, strict: bool) -> None:
    """A missing argument, a value, a non-tensor, and in strict mode another dtype are refused by GP21."""
    layers = Tabled(strict=strict)
    if way is _of_another_dtype and not strict:
        return
    with pytest.raises(ReplayError, match=r"task 0 of g .* is updated at") as refused:
        way(layers)
    assert refused.value.rule == "GP21"


@pytest.mark.parametrize("strict", [False, True])
def test_a_capture_refuses_what_cannot_be_rebound(*, strict: bool) -> None:
    """Memory of the region, a written argument, and an argument that is also updated by value are refused."""
    driver = TapeDriver(CPU, strict=strict)
    x, table = torch.zeros(ROWS, 2, device=CPU), _table(1)
    driver.declare(DeclaredMemory(refreshed=[x]))

    def region(**given: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            rebound = {name: make() for name, make in given.items()}
            args = (x,) if "out" in rebound else (x, torch.empty_like(x))
            updated = {**WEIGHTS, "shift": 0} if "shift" in rebound else WEIGHTS
            driver.task(TaskKey("g", 0), weigh, args, updated, rebound=rebound)

        return run

    for given_, says in (
        ({"table": lambda: table * 1}, "table is memory of the graph"),
        ({"out": lambda: torch.empty_like(x)}, "writes out, which cannot be rebound"),
        ({"shift": lambda: table}, "shift of .* cannot be both updated and rebound"),
    ):
        with pytest.raises(CaptureError, match=says) as refused:
            driver.capture(region(**given_), warmup=0)
        assert refused.value.rule == "GP21"


# -- updates after the launch ------------------------------------------------------------------------------


@given(
    strict=st.booleans(),
    count=st.integers(1, 3),
    before=st.integers(0, 3),
    on_side=st.booleans(),
    beside=st.booleans(),
    values=st.lists(st.integers(-5, 5), min_size=2, max_size=4),
)
def test_updates_may_follow_the_launch(
    *, strict: bool, count: int, before: int, on_side: bool, beside: bool, values: list[int]
) -> None:
    """Updates before the launch and after it, on any stream, from any thread, give the same result."""
    layers = Tabled(strict=strict, waits=True, count=count)
    main, side = layers.driver.current_stream(), layers.driver.stream()
    for value in values:
        tables = [_table(value) for _ in range(count)]

        def update(layer: int, tables: list[torch.Tensor] = tables) -> None:
            with side if on_side else main:
                layers.update(layer, tables[layer])

        def rest(update: Callable[[int], None] = update) -> None:
            for layer in range(min(before, count), count):
                update(layer)

        if on_side:
            side.wait_stream(main)
        for layer in range(min(before, count)):
            update(layer)
        layers.graph.replay()
        if beside:
            thread = threading.Thread(target=rest)
            thread.start()
            thread.join()
        else:
            rest()
        layers.driver.synchronize()
        layers.require(value * count)


@pytest.mark.parametrize("strict", [False, True])
def test_a_thread_may_update_while_another_one_launches(*, strict: bool) -> None:
    """The replay runs after the launch and all updates, whichever comes last."""
    layers = Tabled(strict=strict, waits=True)
    for value in range(20):
        tables = [_table(value), _table(1)]
        thread = threading.Thread(target=layers.update_all, args=(tables,))
        thread.start()
        layers.graph.replay()
        thread.join()
        layers.require(value + 1)


def _synchronizes(layers: Tabled) -> None:
    layers.driver.synchronize()


def _prepares(layers: Tabled) -> None:
    with layers.driver.preparation():
        pass


def _replays(layers: Tabled) -> None:
    layers.graph.replay()


def _waits_for_an_event(layers: Tabled) -> None:
    event = layers.driver.event()
    event.record()
    event.synchronize()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("need", [_synchronizes, _prepares, _replays, _waits_for_an_event])
def test_an_update_that_never_comes_is_named(need: Callable[[Tabled], None], *, strict: bool) -> None:
    """An action that needs a replay that still waits is refused by GP21, once, with task and launch."""
    layers = Tabled(strict=strict, waits=True)
    if need is _waits_for_an_event and not strict:
        return  # an event of a driver without streams knows no driver
    layers.tables = [_table(2), _table(3)]
    layers.update(0, layers.tables[0])
    layers.graph.replay()
    with pytest.raises(
        ReplayError, match=r"task 1 of g .* was not updated for the replay that was launched at .*test_late"
    ) as missed:
        need(layers)
    assert missed.value.rule == "GP21"
    assert "1 of the graph's 2 tasks were updated" in str(missed.value)
    layers.driver.synchronize()
    layers.update_all(layers.tables)
    layers.graph.replay()
    layers.require(5)


def test_a_wait_for_earlier_work_needs_no_launched_replay() -> None:
    """The host may wait for an event of the step before between the launch and the updates."""
    layers, tables = Tabled(strict=True, waits=True), [_table(1), _table(2)]
    fence = layers.driver.event()
    fence.record()
    layers.graph.replay()
    fence.synchronize()
    layers.update_all(tables)
    layers.require(3)


def test_an_event_after_the_launch_covers_the_replay() -> None:
    """An update of the next step may wait for an event that was recorded between launch and updates."""
    layers = Tabled(strict=True, waits=True)
    side, replayed = layers.driver.stream(), layers.driver.event()
    for value in (1, 2):
        layers.tables = [_table(value)] * 2
        layers.graph.replay()
        side.wait_event(replayed)  # of the previous step
        replayed.record()
        with side:
            layers.update_all(layers.tables)
        layers.require(2 * value)


def test_a_replay_that_waits_comes_after_the_work_before_its_updates() -> None:
    """The event of an update covers its stream, so an earlier write of a table there needs no other wait."""
    layers = Tabled(strict=True, waits=True)
    main, side, layers.tables = layers.driver.current_stream(), layers.driver.stream(), [_table(0)] * 2
    for value in (1, 2):
        with layers.driver.preparation():
            side.wait_stream(main)
            with side:
                layers.tables[0].fill_(value)
                layers.update_all(layers.tables)
        layers.graph.replay()
        layers.require(2 * value)


def test_an_update_of_the_next_step_waits_for_the_replay() -> None:
    """Updates on a stream that does not wait for the previous replay are GP21, even after the launch."""
    layers = Tabled(strict=True, waits=True)
    side, layers.tables = layers.driver.stream(), [_table(1), _table(2)]
    layers.graph.replay()
    with side:
        layers.update_all(layers.tables)
    layers.require(3)
    layers.graph.replay()
    with (
        pytest.raises(ReplayError, match="its arguments are in use: a replay of g reads them") as refused,
        side,
    ):
        layers.update_all(layers.tables)
    assert refused.value.rule == "GP21"


def test_a_table_that_is_written_beside_the_replay_is_found() -> None:
    """A rebound tensor is an input of the replay, so an unordered write on another stream is GP16."""
    layers = Tabled(strict=True)
    side, layers.tables = layers.driver.stream(), [_table(1), _table(2)]
    with layers.driver.preparation():
        with side:
            layers.tables[1].fill_(5)
        layers.update_all(layers.tables)
    with pytest.raises(ContractError, match="two streams use") as raced:
        layers.graph.replay()
    assert raced.value.rule == "GP16"


@pytest.mark.parametrize("strict", [False, True])
def test_one_key_in_two_graphs_is_an_error(*, strict: bool) -> None:
    """If a later graph takes the key of a graph, that graph cannot be replayed, but all others can."""
    driver = TapeDriver(CPU, strict=strict)
    first, other = (Tabled(strict=strict, driver=driver, graph=key, count=1) for key in (8, 4))
    second = Tabled(strict=strict, driver=driver, graph=8, count=2)
    for layers in (second, other):
        layers.tables = [_table(3) for _ in layers.layers]
        layers.update_all(layers.tables)
        layers.graph.replay()
        layers.require(3 * len(layers.layers))
    with pytest.raises(ReplayError, match=r"a graph that was captured later has the same key, 8") as taken:
        first.graph.replay()
    assert taken.value.rule == "GP21"
    first.graph.release()
    with pytest.raises(EngineError):
        first.graph.replay()


def _of_outputs(layers: Tabled) -> object:
    return layers.graph.outputs.tolist()


def _of_what_is_computed(layers: Tabled) -> object:
    return bool((layers.graph.outputs * 2).isnan().any())


def _of_an_input(layers: Tabled) -> object:
    return layers.x[0, 0].item()


READS = [_of_outputs, _of_what_is_computed, _of_an_input]


@pytest.mark.parametrize("read", READS)
def test_a_host_read_before_an_awaited_update_is_refused(read: Callable[[Tabled], object]) -> None:
    """Between launch and updates a host read of memory of graphs is GP21, also if its error is caught."""
    layers, tables = Tabled(strict=True, waits=True), [_table(1), _table(2)]

    def step() -> None:
        with layers.driver.step():
            layers.graph.replay()
            layers.update(0, tables[0])
            with contextlib.suppress(ReplayError):
                read(layers)
            layers.update(1, tables[1])

    with pytest.raises(
        ReplayError, match=r"after the launch at .* before the update of task 1 of g"
    ) as refused:
        step()
    assert refused.value.rule == "GP21"
    with layers.driver.step():
        layers.graph.replay()
        layers.update_all(tables)
        read(layers)
    layers.require(3)


def test_other_host_reads_before_an_awaited_update_are_allowed() -> None:
    """The host may read its own numbers, and on a stream that does not wait for the replay, its results."""
    layers, tables = Tabled(strict=True, waits=True), [_table(1), _table(2)]
    lens, own, side = torch.tensor([3, 4]), torch.ones(2), layers.driver.stream()
    own.copy_(lens)
    side.wait_stream(layers.driver.current_stream())
    with layers.driver.step():
        layers.graph.replay()
        assert lens.tolist() == [3, 4]
        assert bool((own > 0).all())
        with side:
            assert layers.x[0, 0].item() == 0
        layers.update_all(tables)
    layers.require(3)


def test_a_step_ends_after_all_updates() -> None:
    """A step whose launched replay still waits at its end is refused, and the next step may run."""
    layers, tables = Tabled(strict=True, waits=True), [_table(1), _table(2)]

    def step() -> None:
        with layers.driver.step():
            layers.graph.replay()
            layers.update(0, tables[0])

    with pytest.raises(ReplayError, match="was not updated for the replay that was launched"):
        step()
    with layers.driver.step():
        layers.graph.replay()
        layers.update_all(tables)
    layers.require(3)
