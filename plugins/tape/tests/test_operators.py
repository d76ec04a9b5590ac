"""How a tape handles other libraries' operators: hidden writes, Python implementations, no tensors."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from compiling import (
    compiler,  # noqa: F401  a fixture
    interpret,
)
from graphpact import declare_kernel
from graphpact.errors import CaptureError, ContractError, ReplayError
from graphpact.graphs import DeclaredMemory, GraphDriver
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_tape import TapeDriver
from graphpact_tape.operators import is_work, written_by

CPU = torch.device("cpu")
_aten = torch.ops.aten

library = torch.library.Library("tape_tests", "DEF")
live = {"factor": 2.0, "calls": 0}
"""Python state that implementations read and write."""


def _store(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _scaled(x: torch.Tensor) -> torch.Tensor:
    live["calls"] += 1
    return x * live["factor"]


def _define(schema: str, function: Callable[..., Any], *, kernel: bool) -> Any:
    name = schema.split("(", 1)[0]
    library.define(schema)
    library.impl(name, function, "CompositeExplicitAutograd")
    op = getattr(torch.ops.tape_tests, name).default
    return declare_kernel(op) if kernel else op


# None of these schemas declares a write or an alias.
store = _define("store(Tensor target, Tensor source) -> ()", _store, kernel=True)
store_in_python = _define("store_in_python(Tensor target, Tensor source) -> ()", _store, kernel=False)
store_lists = _define(
    "store_lists(Tensor[] targets, Tensor[] sources) -> int",
    lambda targets, sources: (torch._foreach_copy_(targets, sources), len(targets))[1],
    kernel=True,
)
store_and_return = _define(
    "store_and_return(Tensor target, Tensor source) -> Tensor",
    lambda target, source: target.copy_(source),
    kernel=True,
)
store_and_compute = _define(
    "store_and_compute(Tensor target, Tensor source) -> Tensor",
    lambda target, source: (target.copy_(source), source * 3)[1],
    kernel=True,
)
scaled = _define("scaled(Tensor x) -> Tensor", _scaled, kernel=False)
reads = _define("reads(Tensor x) -> Tensor", lambda x: x * len(x.tolist()), kernel=False)
reads_as_kernel = _define("reads_as_kernel(Tensor x) -> Tensor", lambda x: x * x.tolist()[0], kernel=True)
reads_at = _define(
    "reads_at(int address, Tensor x) -> Tensor",
    lambda address, x: x * ctypes.c_float.from_address(address).value,
    kernel=False,
)
sometimes = _define("sometimes(Tensor x) -> Tensor", lambda x: x if x.sum() > 0 else x * 2, kernel=True)
count = _define("count() -> int", lambda: live.update(calls=live["calls"] + 1) or 7, kernel=True)

DRIVERS: dict[str, Callable[[], GraphDriver]] = {
    "fast": lambda: TapeDriver(CPU),
    "strict": lambda: TapeDriver(CPU, strict=True),
    "inductor": lambda: InductorDriver(CPU),
}


@pytest.fixture(autouse=True)
def _inference(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Run in inference mode; compile only in tests that use the fixture `compiler`."""
    if "compiler" not in request.fixturenames:
        interpret(monkeypatch)
    with torch.inference_mode():
        yield


drivers = pytest.mark.parametrize("make", DRIVERS.values(), ids=DRIVERS.keys())


def _replays_equal_eager(make: Callable[[], GraphDriver], region: Callable[..., Any]) -> None:
    """Capture ``region(x, cache)``, replay it on other inputs, and compare it with an eager run."""
    driver, x, cache = make(), torch.zeros(4), torch.zeros(4)
    driver.declare(DeclaredMemory(refreshed=[x], caches=[cache]))
    graph = driver.capture(lambda: region(x, cache))
    for turn in (1.0, 2.0):
        new, kept = torch.arange(4) + turn, torch.full((4,), -turn)
        x.copy_(new)
        cache.copy_(kept)
        graph.outputs.fill_(-99)
        graph.replay()
        wanted = region(new.clone(), kept)
        assert torch.equal(graph.outputs, wanted)
        assert torch.equal(cache, kept)


@drivers
@pytest.mark.parametrize(
    "region",
    [
        pytest.param(lambda x, cache: (store(cache, x + 1), cache * 2)[1], id="returns nothing"),
        pytest.param(lambda x, cache: (store_in_python(cache, x + 1), cache * 2)[1], id="in Python"),
        pytest.param(lambda x, cache: store_lists([cache[:2], cache[2:]], [x[2:], x[:2]]) * x, id="lists"),
        pytest.param(lambda x, cache: store_and_return(cache, x + 1) * 2, id="returns its argument"),
        pytest.param(lambda x, cache: store_and_compute(cache, x + 1) * cache, id="returns new memory too"),
        pytest.param(
            lambda x, cache: (store(y := torch.empty(4, device=CPU), x + 1), y * 2 + cache)[1],
            id="own memory",
        ),
        pytest.param(
            lambda x, cache: (store((y := x * 1)[1:3], x[:2]), y.neg().exp() + y)[1],
            id="a view of own memory",
        ),
    ],
)
def test_a_write_that_a_schema_hides_is_repeated(make: Callable[[], GraphDriver], region: Any) -> None:
    """A replay repeats a call that writes an argument, whether or not its schema says so."""
    _replays_equal_eager(make, region)


@pytest.mark.sweep
@pytest.mark.usefixtures("compiler")
def test_a_compiler_does_not_drop_a_hidden_write() -> None:
    """Calls that return nothing and declare no write are repeated between pieces of compiled code."""
    _replays_equal_eager(DRIVERS["inductor"], lambda x, cache: (store(cache, x + 1), cache * 2)[1])


@drivers
def test_the_python_of_an_operator_does_not_run_in_a_replay(make: Callable[[], GraphDriver]) -> None:
    """For an operator in Python, the operations that it calls are recorded; its Python does not run again."""
    driver, x = make(), torch.ones(4)
    driver.declare(DeclaredMemory(refreshed=[x]))
    live["factor"] = 2.0
    graph = driver.capture(lambda: scaled(x) + 1)
    calls, live["factor"] = live["calls"], 5.0
    for value in (3.0, 4.0):
        x.fill_(value)
        graph.outputs.fill_(-99)
        graph.replay()
        assert graph.outputs.tolist() == [value * 2 + 1] * 4
    assert live["calls"] == calls


@drivers
def test_a_host_read_in_the_python_of_an_operator_is_refused(make: Callable[[], GraphDriver]) -> None:
    """A host read in such an implementation is refused; the error says how to declare a kernel."""
    with pytest.raises(CaptureError, match="tolist") as caught:
        make().capture(lambda: reads(torch.ones(4, device=CPU)))
    assert "tape_tests.reads.default" in str(caught.value)
    assert "graphpact.declare_kernel" in str(caught.value)


@drivers
def test_a_declared_kernel_may_read_its_arguments(make: Callable[[], GraphDriver]) -> None:
    """An operator that is declared to represent a kernel is one node, and reads its current inputs."""
    _replays_equal_eager(make, lambda x, _: reads_as_kernel(x) + 1)


@drivers
def test_a_call_without_tensors_is_repeated(make: Callable[[], GraphDriver]) -> None:
    """An operator that neither takes nor returns a tensor may do work, so each replay repeats it."""
    driver, x = make(), torch.ones(4)
    graph = driver.capture(lambda: x * count())
    before = live["calls"]
    graph.replay()
    assert live["calls"] == before + 1


@pytest.mark.parametrize("make", [DRIVERS["fast"], DRIVERS["strict"]], ids=["fast", "strict"])
def test_an_operator_that_returns_its_argument_by_its_contents_is_refused(make: Any) -> None:
    """If a result was an argument at capture but is new memory at a replay, the replay raises an error."""
    driver, x = make(), torch.ones(4)
    graph = driver.capture(lambda: sometimes(x) + 1)
    x.fill_(-1)
    with pytest.raises(ReplayError, match="returned an argument at capture, but returns new memory now"):
        graph.replay()


@drivers
def test_an_address_is_not_given_to_the_python_of_an_operator(make: Callable[[], GraphDriver]) -> None:
    """An address is refused, because a replay would not repeat what the implementation reads there."""
    x = torch.ones(4)

    def region() -> torch.Tensor:
        return torch.ops.tape_tests.reads_at(x.data_ptr() + 4, x) + 1

    with pytest.raises(CaptureError, match=r"is given the address taken at .*test_operators\.py"):
        make().capture(region)


def test_a_hidden_write_to_undeclared_memory_is_refused() -> None:
    """A strict capture finds the write by comparing memory, and names operator and memory."""
    driver, x, hidden = TapeDriver(CPU, strict=True), torch.ones(4), torch.zeros(3, 4)
    driver.declare(DeclaredMemory(refreshed=[x]))
    with pytest.raises(ContractError, match="not declared as written") as caught:
        driver.capture(lambda: (store(hidden[1], x), x + 1)[1])
    assert "tape_tests.store.default, whose schema does not declare it, writes a tensor" in str(caught.value)
    assert caught.value.rule == "GP19"


def test_hidden_writes_of_a_capture_are_undone() -> None:
    """A strict capture restores external memory, even if an operator wrote it against its schema."""
    driver, x, cache = TapeDriver(CPU, strict=True), torch.ones(4), torch.zeros(4)
    driver.declare(DeclaredMemory(refreshed=[x], caches=[cache]))
    driver.capture(lambda: store(cache, x), warmup=0)
    assert cache.tolist() == [0, 0, 0, 0]


def test_a_hidden_write_without_a_wait_is_a_race() -> None:
    """A strict tape checks the stream order of a hidden write in the same way as that of a declared one."""
    driver, x, cache = TapeDriver(CPU, strict=True), torch.ones(4), torch.zeros(4)
    driver.declare(DeclaredMemory(refreshed=[x], caches=[cache]))

    def region() -> torch.Tensor:
        side = driver.stream()
        side.wait_stream(driver.current_stream())
        with side:
            store(cache, x)
        read = cache + 1
        driver.current_stream().wait_stream(side)
        return read

    with pytest.raises(CaptureError, match="wait"):
        driver.capture(region)


def test_the_running_statistics_of_batch_norm_are_written() -> None:
    """Normalisation in training mode writes its statistics, although torch's schema does not mark this."""
    x, mean, var = torch.randn(5, 3), torch.zeros(3), torch.ones(3)
    args = (x, None, None, mean, var, True, 0.1, 1e-5)
    assert [id(t) for t in written_by(_aten.native_batch_norm.default, args, {})] == [id(mean), id(var)]
    driver = TapeDriver(CPU, strict=True)
    driver.declare(DeclaredMemory(refreshed=[x]))
    with pytest.raises(ContractError, match="not declared as written"):
        driver.capture(lambda: torch.nn.functional.batch_norm(x, mean, var, training=True))


def test_what_a_region_looks_at_is_no_work() -> None:
    """Views, queries of a layout and profiler marks are not recorded in a tape."""
    x = torch.arange(12.0).view(3, 4)

    def region() -> torch.Tensor:
        with torch.profiler.record_function("a mark"):
            first, second = _aten._unsafe_view(x, [4, 3]).t()[1:].unsafe_chunk(2)
            assert x.is_contiguous()
            assert _aten.is_same_size(first, second)
        return first.expand(2, *first.shape).detach() + torch.empty_like(first).zero_()

    assert TapeDriver(CPU).capture(region).num_nodes == 2


def test_an_operation_of_torch_is_work_if_it_is_no_view() -> None:
    """Of torch's operations without an alias in the schema, only the listed ones are not recorded."""
    left_out = set()
    for schema in torch._C._jit_get_all_schemas():
        packet = getattr(_aten, schema.name.removeprefix("aten::"), None)
        if not schema.name.startswith("aten::") or packet is None:
            continue
        op = getattr(packet, schema.overload_name or "default", None)
        tensors = [r for r in schema.returns if "Tensor" in str(r.type)]
        if op is None or is_work(op, allocates=False) or not tensors:
            continue
        if all(each.alias_info is None for each in tensors) and not schema.is_mutable:
            left_out.add(schema.name.removeprefix("aten::"))
    views = {"_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"}
    uninitialised = {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    }
    assert left_out == views | uninitialised


@drivers
def test_an_operator_that_takes_functions_is_refused(make: Callable[[], GraphDriver]) -> None:
    """A higher-order operator is refused; the error has its name and the line."""
    x = torch.ones(4)
    choose = torch.ops.higher_order.cond
    with pytest.raises(CaptureError, match=r"cond is called.*test_operators\.py"):
        make().capture(lambda: choose(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,)), warmup=0)
