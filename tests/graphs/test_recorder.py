"""Tests of the recorder; its rules are the same for every driver that uses it.

Inductor's graphs are interpreted and not compiled, because only the recording is under test.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiling import interpret
from graphpact.errors import CaptureError
from graphpact.graphs import DeclaredMemory, EagerCall, GraphDriver
from graphpact.tensors import storage_id
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_cpu_graph.pieces import outliving_of, pieces_of
from graphpact_tape.host_guard import HostReadGuard
from graphpact_tape.host_tensors import HostMemory
from graphpact_tape.recorder import Recorder, Recording, Segment
from graphpact_tape.tape import TapeDriver
from support import PROGRAMS, run_program

CPU = torch.device("cpu")
FAST = {"tape": lambda: TapeDriver(CPU), "inductor": lambda: InductorDriver(CPU)}
ALL = {**FAST, "strict": lambda: TapeDriver(CPU, strict=True)}


@pytest.fixture(autouse=True)
def _inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Enable inference mode, and run FX graphs node by node instead of compiling them."""
    interpret(monkeypatch)
    with torch.inference_mode():
        yield


@pytest.fixture(params=ALL)
def driver(request: pytest.FixtureRequest) -> GraphDriver:
    """Return a driver that uses the recorder."""
    make: Callable[[], GraphDriver] = ALL[request.param]
    return make()


@pytest.fixture(params=FAST)
def fast(request: pytest.FixtureRequest) -> GraphDriver:
    """Return a driver that uses the recorder, without strict rules."""
    make: Callable[[], GraphDriver] = FAST[request.param]
    return make()


def record(fn: Callable[[GraphDriver, Recorder], Any]) -> Recording:
    """Return the recording of ``fn``, which is called with a driver and the recorder."""
    recorder = Recorder(HostReadGuard(HostMemory(), "while it is recorded", CaptureError))
    driver = TapeDriver(CPU)
    return recorder.record(driver, lambda: fn(driver, recorder))


def test_memory_is_recorded_and_not_names(driver: GraphDriver) -> None:
    """A replay reads the memory that a tensor had at capture, even if the tensor got other memory later."""
    x = torch.ones(3)
    old = x.detach()
    graph = driver.capture(lambda: x + 1)
    x.data = torch.zeros(3)
    old.fill_(5.0)
    graph.replay()
    assert graph.outputs.tolist() == [6.0, 6.0, 6.0]


def test_a_name_may_have_two_memories_in_a_region(driver: GraphDriver) -> None:
    """If a tensor gets other memory inside a region, each recorded read keeps its own memory."""
    one, two = torch.ones(3), torch.ones(3)

    def region() -> torch.Tensor:
        x = one.detach()
        first = x * 2
        x.data = two
        return first + x

    graph = driver.capture(region)
    one.fill_(3.0)
    two.fill_(10.0)
    graph.replay()
    assert graph.outputs.tolist() == [16.0] * 3


def test_shapes_of_own_memory_may_change_in_place(driver: GraphDriver) -> None:
    """Work before and after an in-place change of shape replays with the shapes of the recording."""
    x = torch.arange(6.0).view(2, 3)

    def region() -> tuple[torch.Tensor, torch.Tensor]:
        y = x + 1
        y.add_(torch.full((2, 3), 1.0, device=CPU))
        before = y * 2
        y.t_().unsqueeze_(0)
        y.mul_(torch.full((1, 3, 2), 3.0, device=CPU))
        return before, y

    graph = driver.capture(region)
    for value in (1.0, 4.0):
        x.fill_(value)
        graph.replay()
        before, y = graph.outputs
        assert torch.equal(before, torch.full((2, 3), (value + 2) * 2))
        assert torch.equal(y, torch.full((1, 3, 2), (value + 2) * 3))


def test_shapes_of_external_memory_may_not(driver: GraphDriver) -> None:
    """An in-place change of the shape of an external tensor is refused; the error names the line."""
    x = torch.ones(3)
    with pytest.raises(CaptureError, match=r"unsqueeze_.* in place while .*, at .*recorder\.py:"):
        driver.capture(lambda: x.unsqueeze_(0), warmup=0)


def test_constants_start_from_their_value_in_every_replay(fast: GraphDriver) -> None:
    """A tensor made from Python numbers, which the region writes, is reset to them in each replay."""
    graph = fast.capture(lambda: torch.tensor([1.0, 2.0]).add_(1.0))
    for _ in range(3):
        graph.replay()
        assert graph.outputs.tolist() == [2.0, 3.0]
    assert graph.external_tensors() == []


def test_uninitialised_memory_is_no_work(driver: GraphDriver) -> None:
    """Every way to allocate uninitialized memory gives graph memory without adding a node."""
    x = torch.ones(2, 3)

    def region() -> list[torch.Tensor]:
        made = [
            torch.empty(2, 3, device=CPU),
            torch.empty_like(x),
            torch.empty_permuted((2, 3), (1, 0), device=CPU),
            torch.empty_strided((2, 3), (3, 1), device=CPU),
            x.new_empty(2, 3),
            x.new_empty_strided((2, 3), (3, 1)),
        ]
        return [t.copy_(x) for t in made]

    graph = driver.capture(region)
    assert graph.num_nodes == 6
    x.fill_(7.0)
    graph.replay()
    assert all(torch.equal(t, x) for t in graph.outputs)
    external = graph.external_tensors()
    assert external is not None
    assert [t.data_ptr() for t in external] == [x.data_ptr()]


def test_host_numbers_are_kept_by_value(driver: GraphDriver) -> None:
    """A number read from declared host memory keeps its captured value in every replay."""
    x, lengths = torch.ones(3), torch.tensor([2, 3])
    driver.declare(DeclaredMemory(host=[lengths]))
    graph = driver.capture(lambda: x + lengths[1])
    lengths.fill_(100)
    graph.replay()
    assert graph.outputs.tolist() == [4.0] * 3


def test_containers_are_kept_as_they_were(driver: GraphDriver) -> None:
    """A list that changes after the capture does not change the replay."""
    parts = [torch.ones(1), torch.full((2,), 2.0)]
    first = parts[0]
    graph = driver.capture(lambda: torch.cat(parts))
    parts.reverse()
    first.fill_(5.0)
    graph.replay()
    assert graph.outputs.tolist() == [5.0, 2.0, 2.0]


def test_what_a_segment_made_is_read_in_any_later_one(driver: GraphDriver) -> None:
    """A later segment reads and writes a tensor of the first, across eager calls that do not take it."""
    x, seen = torch.ones(2), []

    def region() -> torch.Tensor:
        made = x * 2
        driver.eager_call(seen.append, 0)
        other = x + 1
        driver.eager_call(lambda t: seen.append(t.tolist()), other)
        made.add_(1)
        driver.eager_call(lambda t: seen.append(t.tolist()), made)
        return made[:1] + x

    graph = driver.capture(region, warmup=0)
    x.fill_(5.0)
    seen.clear()
    graph.replay()
    assert seen == [0, [6.0, 6.0], [11.0, 11.0]]
    assert graph.outputs.tolist() == [16.0, 16.0]


@settings(
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(program=PROGRAMS, breaks=st.lists(st.integers(0, 8), max_size=2), seed=st.integers(0, 99))
def test_drivers_record_the_same_work(
    program: list[tuple[str, int, int]], breaks: list[int], seed: int
) -> None:
    """All drivers count the same nodes, segments and external memory; replays are equal bit for bit."""
    with torch.inference_mode():
        x, y = torch.zeros(4, 4), torch.zeros(4, 4)
        graphs = []
        for make in ALL.values():
            driver = make()

            def region(driver: GraphDriver = driver) -> list[torch.Tensor]:
                steps = iter(range(len(program)))

                def call(step: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> Any:
                    return driver.eager_call(step, a, b) if next(steps) in breaks else step(a, b)

                return run_program(program, x, y, call=call)

            graphs.append(driver.capture(region))
        summaries = {
            (
                graph.num_nodes,
                graph.num_segments,
                frozenset(storage_id(t) for t in graph.external_tensors() or ()),
            )
            for graph in graphs
        }
        assert len(summaries) == 1
        generator = torch.Generator().manual_seed(seed)
        for t in (x, y):
            t.normal_(generator=generator)
        results = []
        for graph in graphs:
            graph.replay()
            results.append([t.clone() for t in graph.outputs])
        for other in results[1:]:
            assert all(map(torch.equal, results[0], other))


# -- the recording ---------------------------------------------------------------------------------


def test_what_outlives_each_piece_of_a_recording() -> None:
    """`outliving_of` lists the memory of each piece that a later piece, an eager call or the outputs read."""
    x = torch.ones(2)
    made: dict[str, torch.Tensor] = {}

    def region(_: GraphDriver, recorder: Recorder) -> torch.Tensor:
        made["unread"] = x * 1
        made["for the call"] = x * 2
        made["for the last"] = x * 3
        recorder.eager_call(len, (made["for the call"],))
        made["between"] = x * 4
        made["returned"] = made["between"] + 1
        recorder.eager_call(len, (x,))
        made["unread too"] = made["for the last"] + 1
        return made["returned"]

    recording = record(region)
    names = {storage_id(t): name for name, t in made.items()}
    pieces = pieces_of(recording.parts)
    outliving = [{names[storage] for storage in piece} for piece in outliving_of(pieces, recording.outputs)]
    assert outliving == [{"for the call", "for the last"}, set(), {"returned"}, set(), set()]


def test_a_recording_has_one_tensor_for_each_place() -> None:
    """Tensors at the same place in memory are one object in the recording; a tensor elsewhere is another."""
    x = torch.ones(4)
    recording = record(lambda *_: (x[:2] + 1, x[:2] * 2, x[2:] + 1))
    given = [call.args[0] for call in recording.segments[0].calls if call.is_work]
    assert given[0] is given[1]
    assert given[2] is not given[0]
    assert all(storage_id(t) == storage_id(x) for t in given)


def test_a_recording_names_the_line_of_each_call() -> None:
    """Each call has the line of the region that caused it, also if torch decomposes an operation."""
    x = torch.ones(2, 2)
    recording = record(lambda *_: torch.nn.functional.linear(x, x))
    for call in recording.segments[0].calls:
        assert f"{__file__}:" in str(call.line)
        assert "functional.linear(x, x)" in str(call.line)


def test_parts_are_segments_with_eager_calls_between() -> None:
    """A recording begins and ends with a segment, even an empty one."""
    x = torch.ones(2)
    recording = record(lambda _, recorder: recorder.eager_call(torch.neg, (x,)))
    assert [type(part) for part in recording.parts] == [Segment, EagerCall, Segment]
    assert storage_id(recording.outputs) in recording.own
    assert recording.num_nodes == 0
