"""Tests of generated code: it writes the same bits as a loop, into memory that nothing else needs."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.errors import CaptureError
from graphpact.graphs.driver import TaskKey
from graphpact.graphs.segments import EagerCall
from graphpact_tape import code, reuse
from graphpact_tape.host_guard import HostReadGuard
from graphpact_tape.host_tensors import HostMemory
from graphpact_tape.nodes import Node, make_node
from graphpact_tape.recorder import Recorder
from graphpact_tape.tape import Tape, TapeDriver
from support import STEPS

CPU = torch.device("cpu")

_MORE_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "rotate": lambda a, b: torch.cat((-a[:, 2:], a[:, :2]), dim=-1) * b + a,
    "rotate and read again": lambda a, b: torch.cat((n := -a[:, 2:], b[:, :2]), dim=1) * n.sum(),
    "constant": lambda a, b: a + torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 4) * b,
    "rotate by parts": lambda a, b: torch.cat((a[:1] * b[:1], a[1:2] - b[1:2], a[2:]), dim=0),
    "norm": lambda a, b: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * b,
    "numbers": lambda a, b: ((a + 1e-6) * -0.0 - 3 + b * float("inf")) / 7,
    "signed zeros": lambda a, b: (a * 0.0) * (b * -0.0),
    "large numbers": lambda a, b: a * 16777217 + (b.int() * 3 + (1 << 33)).to(a.dtype),
    "integers": lambda a, b: ((a.long() + 15) * 3 - 1).float() / 4 + (b.int() * 2).to(a.dtype),
    "half": lambda a, b: ((a.bfloat16() * 0.3 + 1e-3) / 3).float() + b,
    "gate": lambda a, b: torch.nn.functional.silu(a) * b,
    "out=": lambda a, b: torch.mul(a, b, out=torch.empty_like(a)),
    "cat of one tensor": lambda a, b: torch.cat((n := -a[:2], n)) + b,
    "cat of parts of one": lambda a, b: torch.cat((n := a[:2] * b[:2], n[:1], n[1:])) + b,
    "cat into memory in use": lambda a, b: torch.cat((-b[:2], a[2:]), out=a.clone()),
    "conjugate": lambda a, b: torch.view_as_real((a * 1j).conj() * b)[..., 1],
    "random": lambda a, b: a + torch.rand_like(b),
}
_STEPS = STEPS | _MORE_STEPS
_PROGRAMS = st.lists(
    st.tuples(st.sampled_from(sorted(_STEPS)), st.integers(0, 9), st.integers(0, 9), st.booleans()),
    min_size=1,
    max_size=14,
)


def _run(
    program: list[tuple[str, int, int, bool]],
    inputs: list[torch.Tensor],
    eager_call: Callable[..., torch.Tensor],
) -> list[torch.Tensor]:
    """Run steps on ``[4, 4]`` tensors; return the last two results, which may share memory with inputs."""
    values = list(inputs)
    for name, i, j, is_eager in program:
        a, b = values[i % len(values)], values[j % len(values)]
        if name in ("in place", "write a view", "index_put_"):
            a, b = a.clone() if 0 in a.stride() else a, b.clone()
        if name in ("reshape", "bmm"):
            a = a.contiguous()
        step = _STEPS[name]
        values.append(eager_call(step, a, b) if is_eager else step(a, b))
    return values[-2:]


def _loop(driver: TapeDriver, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record ``fn``; return a loop over its operations, which share no memory, and the outputs."""
    guard = HostReadGuard(HostMemory([], strict=False), "while a test records", CaptureError)
    recording = driver.record(Recorder(guard), fn)
    nodes: list[Node] = []
    for part in recording.parts:
        if isinstance(part, EagerCall):
            nodes.append((part, (), {}))
        else:
            nodes += [make_node(call) for call in part.calls if call.is_work]

    def replay() -> None:
        for op, args, kwargs in nodes:
            op(*args, **kwargs)

    return replay, recording.outputs


def _bits(tensors: list[torch.Tensor]) -> list[list[int]]:
    return [t.contiguous().view(-1).view(torch.uint8).tolist() for t in tensors]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as a lane runs its steps."""
    with torch.inference_mode():
        yield


def _replays_like_the_loop(program: list[tuple[str, int, int, bool]], seed: int) -> None:
    """Capture a program, and record it for a loop; assert that both write the same bits in three rounds."""
    generator = torch.Generator().manual_seed(seed)
    sides = []
    for is_loop in (False, True):
        driver, inputs = TapeDriver(CPU), [torch.ones(4, 4), torch.ones(4, 4)]
        seen: list[torch.Tensor] = []

        def call(
            step: Callable[..., Any], *args: torch.Tensor, _seen: list[torch.Tensor] = seen
        ) -> torch.Tensor:
            _seen += args  # an eager call may keep its arguments
            result: torch.Tensor = step(*args)
            return result

        def region(
            driver: TapeDriver = driver,
            inputs: list[torch.Tensor] = inputs,
            call: Callable[..., Any] = call,
        ) -> list[torch.Tensor]:
            return _run(program, inputs, lambda *given: driver.eager_call(call, *given))

        if is_loop:
            replay, outputs = _loop(driver, region)
        else:
            graph = driver.capture(region, warmup=0)
            replay, outputs = graph.replay, graph.outputs
        sides.append((replay, [*outputs, *inputs], inputs, seen))
    for _ in range(3):
        fresh = [torch.randn(4, 4, generator=generator) for _ in range(2)]
        written = []
        for replay, tensors, inputs, seen in sides:
            for tensor, value in zip(inputs, fresh, strict=True):
                tensor.copy_(value)
            torch.manual_seed(seed)
            replay()
            written.append(_bits([*tensors, *seen]))
        assert written[0] == written[1]


@given(_PROGRAMS, st.integers(0, 2**31))
@settings(deadline=None)
def test_generated_code_writes_the_bits_of_the_loop(
    program: list[tuple[str, int, int, bool]], seed: int
) -> None:
    """Outputs, inputs and arguments of eager calls equal those of a loop over the record, bit for bit."""
    _replays_like_the_loop(program, seed)


@pytest.mark.parametrize("name", sorted(_STEPS))
def test_each_step_writes_the_bits_of_the_loop(name: str) -> None:
    """Each single step, repeated on its result and before an eager call, equals the loop bit for bit."""
    _replays_like_the_loop([(name, 0, 1, False), (name, 2, 1, False), ("add", 3, 2, True)], 0)


def test_intermediates_share_memory() -> None:
    """A chain of operations of any length keeps only two intermediates at a time."""
    x = torch.ones(1000)

    def region(count: int) -> torch.Tensor:
        y = x
        for _ in range(count):
            y = torch.sin(y)
        return y

    graphs = [TapeDriver(CPU).capture(partial(region, count)) for count in (4, 40)]
    assert [graph.pool_nbytes for graph in graphs] == [3 * x.nbytes] * 2


@pytest.mark.parametrize("keep", ["a name", "a view"])
def test_memory_that_is_held_elsewhere_is_not_reused(keep: str) -> None:
    """An intermediate that the region passed to other code has the right value after every replay."""
    x, held = torch.ones(100), []

    def region() -> torch.Tensor:
        y = x * 2
        held[:] = [y if keep == "a name" else y[10:20]]
        z = y
        for _ in range(6):
            z = torch.sin(z)
        return z

    graph = TapeDriver(CPU).capture(region)
    x.fill_(5)
    graph.replay()
    assert held[0].unique().tolist() == [10]


def test_the_memory_of_an_eager_call_is_not_reused() -> None:
    """The arguments and results of an eager call keep their values until the next replay."""
    driver, x, given_to = TapeDriver(CPU), torch.ones(50), []

    def eager(y: torch.Tensor) -> torch.Tensor:
        given_to[:] = [y]
        return y + 1

    def region() -> torch.Tensor:
        z = driver.eager_call(eager, x * 2)
        given_to.append(z)
        for _ in range(6):
            z = torch.sin(z)
        return z

    graph = driver.capture(region)
    result = given_to[1]
    x.fill_(3)
    graph.replay()
    assert [given_to[0].unique().tolist(), result.unique().tolist()] == [[6], [7]]


def test_a_traced_tape_has_a_line_for_each_tensor() -> None:
    """A traced tape reuses no memory, so that the line that made each of its tensors is known."""
    x = torch.ones(10)

    def region() -> torch.Tensor:
        y = x
        for _ in range(5):
            y = torch.sin(y)
        return y

    graph = TapeDriver(CPU, traced=True).capture(region)
    assert graph.pool_nbytes == 5 * x.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.complex128])
@pytest.mark.parametrize("count", range(1, 9))
def test_a_reused_storage_has_whole_elements(count: int, dtype: torch.dtype) -> None:
    """Byte memory that is reused for wider elements has only whole elements, because torch copies all."""
    x, y = torch.ones(257, dtype=torch.uint8), torch.ones(count, dtype=dtype)

    def region() -> torch.Tensor:
        z = (x + 1).sum(dtype=dtype)
        wide = y + z
        return torch.slice_scatter(wide, wide[1:] * 3, 0, 1) + 1

    graph = TapeDriver(CPU).capture(region)
    y.fill_(5)
    graph.replay()
    assert graph.outputs.tolist() == region().tolist()


def test_a_task_takes_its_updates_in_generated_code() -> None:
    """A task whose tensors are in reused memory runs with the arguments of the last update."""
    driver, x = TapeDriver(CPU), torch.ones(8)

    def region() -> torch.Tensor:
        y = torch.sin(torch.sin(x * 2))
        driver.task(TaskKey("graph", 0), torch.ops.aten.mul_.Scalar, (y,), {"other": 2.0})
        return torch.sin(torch.sin(y)) + 1

    graph = driver.capture(region)
    driver.update_task(TaskKey("graph", 0), {"other": 5.0})
    x.fill_(0.25)
    graph.replay()
    expected = torch.sin(torch.sin(torch.sin(torch.sin(x * 2)) * 5.0)) + 1
    assert torch.equal(graph.outputs, expected)


# -- what the code calls ---------------------------------------------------------------------------


def _functions(graph: Tape) -> list[str]:
    """Return the names of functions that a tape's code calls, without their numbers."""
    return re.findall(r"^ {12}(?:t\d+\.)?([a-z_]+?)_?\d*\(", str(graph.source), re.MULTILINE)


def test_a_layer_is_called_through_the_functions_of_torch() -> None:
    """Each operation of a transformer layer is one call of a torch function or method."""
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    cache, where = torch.zeros(9, 8), torch.tensor([3, 5, 1, 2])

    def region() -> torch.Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        q = torch.nn.functional.linear(h, w)
        q = q + torch.cat((-q[:, 4:], q[:, :4]), dim=-1)
        cache.index_copy_(0, where, q)
        return torch.nn.functional.silu(q) * x

    graph = TapeDriver(CPU).capture(region)
    assert graph._code is not None
    assert _functions(graph) == [
        *("mul", "mean", "add", "rsqrt", "mul", "mm"),
        *("neg", "copy", "add", "index_copy", "silu", "mul"),
    ]
    overloads = {type(torch.ops.aten.mul.out._op)}
    assert not [value for value in graph._code.names.values() if type(value) in overloads - {type(torch.mul)}]


def test_a_function_that_dispatches_another_operation_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of the right name that adds instead of multiplying is detected and not used."""

    class Wrong:
        mul = staticmethod(torch.add)

    monkeypatch.setattr(code, "_BINDINGS", (Wrong,))
    x = torch.full((3,), 3.0)
    graph = TapeDriver(CPU).capture(lambda: x * x)
    graph.replay()
    assert graph.outputs.tolist() == [9] * 3


def test_reuse_of_memory_in_use_is_caught_when_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the loop catches memory that is reused while it is still needed."""
    homes = reuse._homes

    def shortened(spans: dict[int, tuple[int, int]], *rest: Any) -> dict[int, int]:
        return homes({storage: (begin, begin) for storage, (begin, _) in spans.items()}, *rest)

    monkeypatch.setattr(reuse, "_homes", shortened)
    with pytest.raises((AssertionError, RuntimeError)):  # torch refuses some overlaps
        _replays_like_the_loop([("norm", 0, 1, False), ("rotate", 2, 0, False), ("gate", 3, 2, False)], 0)
