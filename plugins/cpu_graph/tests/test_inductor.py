"""The inductor driver: replays, memory, eager calls, and refusals."""

import contextlib
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphpact.errors import CaptureError, ConfigError, EngineError, ReplayError
from graphpact.graphs.driver import DeclaredMemory
from graphpact.graphs.segments import EagerCall
from graphpact_cpu_graph import inductor
from graphpact_cpu_graph.inductor import InductorDriver, InductorGraph, missing_compiler
from graphpact_kernels import pack_kv_indices, write_kv_cache
from graphpact_tape.trees import tensors_of

CPU = torch.device("cpu")
NAN = float("nan")


def capture(fn: Callable[[], Any], **options: Any) -> InductorGraph:
    """Return the graph of ``fn``, captured by a new driver."""
    return InductorDriver(CPU).capture(fn, **options)


class Region:
    """A region with every kind of work: numbers, weights, a cache written by index, a kernel."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.scale = 3.0
        self.weight = torch.randn(4, 4, generator=generator)
        self.x = torch.randn(3, 4, generator=generator)
        self.where = torch.tensor([5, 2, 7])
        self.k = torch.zeros(10, 1, 4)
        self.v = torch.zeros(10, 1, 4)
        self.table = torch.arange(32, dtype=torch.int32).view(4, 8)
        self.indptr = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
        self.runs = 0

    def __call__(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute, write the caches, read them again, and pack indices by a custom op."""
        self.runs += 1
        y = (self.x @ self.weight * self.scale + torch.tensor([0.5])).view(3, 1, 4)
        write_kv_cache(y, y * 2, self.k, self.v, self.where)
        indices = torch.full((8,), -1, dtype=torch.int32)
        rows = torch.arange(1, 4)
        pack_kv_indices(self.table, rows, self.indptr, page_size=1, out=indices)
        return self.k.sum(0), {"indices": indices, "read": self.v[self.where].flatten(1)}

    def state(self) -> list[torch.Tensor]:
        """Run eagerly; return copies of the outputs and of the written caches."""
        first, rest = self()
        return [t.clone() for t in (first, *rest.values(), self.k, self.v)]


@pytest.fixture(scope="module")
def compiled(compiler: None) -> tuple[Region, InductorGraph]:
    """Return a region and its compiled graph."""
    region = Region()
    return region, capture(region)


@pytest.mark.sweep
def test_equal_regions_are_compiled_once(compiler: None) -> None:
    """A region like an earlier one uses its code with other tensors; one with another number does not."""
    regions = [Region() for _ in range(3)]
    regions[2].scale = 4.0
    graphs = [capture(region) for region in regions]
    entries = [graph._steps[0].args[0] for graph in graphs]
    assert entries[0] is entries[1]
    assert entries[0] is not entries[2]
    for number, (region, graph) in enumerate(zip(regions, graphs, strict=True)):
        region.x.fill_(number)
        region.k.fill_(number)
        graph.outputs[0].fill_(NAN)
        graph.outputs[1]["read"].fill_(NAN)
        graph.replay()
        replayed = [t.clone() for t in (graph.outputs[0], *graph.outputs[1].values(), region.k, region.v)]
        torch.testing.assert_close(replayed, region.state())


@pytest.mark.parametrize("kind", ["compiled", "interpreted"])
def test_a_replay_does_what_the_region_does(kind: str, request: pytest.FixtureRequest) -> None:
    """With new contents of its inputs, a replay has the outputs and in-place writes of an eager run."""
    made = request.getfixturevalue(kind)
    region, graph = made or ((region := Region()), capture(region))
    outputs = [graph.outputs[0], *graph.outputs[1].values()]
    addresses = [t.data_ptr() for t in outputs]
    runs = region.runs
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        region.x.copy_(torch.randn(3, 4, generator=generator))
        region.weight.copy_(torch.randn(4, 4, generator=generator))
        region.where.copy_(torch.randperm(10, generator=generator)[:3])
        before = region.k.clone(), region.v.clone()
        for output in outputs:
            output.fill_(NAN if output.is_floating_point() else -7)
        region.scale = NAN  # the replay uses the number of the capture
        graph.replay()
        replayed = [t.clone() for t in (*outputs, region.k, region.v)]
        assert region.runs == runs
        region.scale = 3.0
        region.k.copy_(before[0])
        region.v.copy_(before[1])
        torch.testing.assert_close(replayed, region.state())
        runs = region.runs
    assert [t.data_ptr() for t in outputs] == addresses


@pytest.mark.sweep
def test_experts_compile_in_every_dtype(compiler: None) -> None:
    """A grouped product compiles for every dtype that torch supports, with the layout of an eager run."""
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    tokens = [torch.randn(5, 8).to(dtype) for dtype in dtypes]
    weights = [torch.randn(3, 8, 8).to(dtype) for dtype in dtypes]

    def region() -> list[torch.Tensor]:
        return [
            torch.nn.functional.grouped_mm(x + 1, w.transpose(1, 2), offs=ends).relu()
            for x, w in zip(tokens, weights, strict=True)
        ]

    graph = capture(region)
    for x in tokens:
        x.mul_(-2)
    ends.copy_(torch.tensor([1, 4, 5]))
    graph.replay()
    torch.testing.assert_close(graph.outputs, region(), check_stride=True)


def test_caches_are_written_in_place(compiler: None) -> None:
    """A compiled replay allocates far less than the cache that it writes and reads."""
    cache, where, x = torch.zeros(200_000, 1, 4), torch.tensor([3, 5]), torch.ones(2, 1, 4)

    def region() -> torch.Tensor:
        write_kv_cache(x, x, cache, cache, where)
        return cache[where] + 1

    graph = capture(region)
    graph.replay()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        graph.replay()
    allocated = sum(max(e.self_cpu_memory_usage, 0) for e in profile.key_averages())
    assert allocated < cache.nbytes / 100


# -- what is recorded ------------------------------------------------------------------------------


@settings(
    derandomize=True,
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    starts=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5),
    breaks=st.integers(0, 5),
)
def test_overlapping_inputs_are_one_memory(
    starts: list[tuple[int, int]],
    steps: list[tuple[int, int]],
    breaks: int,
    interpreted: None,
) -> None:
    """If views of one memory overlap, replays equal eager runs, with or without a break of the graph."""
    memory = torch.arange(12.0)
    views = [memory[start : start + size] for start, size in starts]
    driver = InductorDriver(CPU)

    def region() -> list[torch.Tensor]:
        out = []
        for i, (target, source) in enumerate(steps):
            if i == breaks:
                driver.eager_call(memory.mul_, 2)
            into, of = views[target % len(views)], views[source % len(views)]
            into.add_(of.sum())
            out.append(of * 2)
        return out

    graph = driver.capture(region)
    memory.copy_(torch.arange(12.0))
    expected = [t.clone() for t in region()] + [memory.clone()]
    memory.copy_(torch.arange(12.0))
    graph.replay()
    torch.testing.assert_close([*graph.outputs, memory], expected)
    assert graph.num_segments == 1 + (breaks < len(steps))


@pytest.mark.sweep
def test_overlapping_inputs_are_compiled_as_one_memory(compiler: None) -> None:
    """In compiled code, a write through one view is visible through an overlapping view."""
    memory = torch.zeros(6, 4)
    flat, rows, last = memory.view(-1), memory[1:4], memory[:, 3]

    def region() -> torch.Tensor:
        rows.add_(1.0)
        flat.mul_(2.0)
        return last + 1.0

    graph = capture(region)
    memory.zero_()
    graph.replay()
    assert memory[:, 0].tolist() == [0.0, 2.0, 2.0, 2.0, 0.0, 0.0]
    assert graph.outputs.tolist() == [1.0, 3.0, 3.0, 3.0, 1.0, 1.0]


def test_one_memory_of_two_dtypes_is_refused(interpreted: None) -> None:
    """Memory that is written as one dtype and read as another is refused; the error names both dtypes."""
    floats = torch.zeros(4)
    integers = floats.view(torch.int32)
    with pytest.raises(CaptureError, match=r"as torch\.float32 and as torch\.int32"):
        capture(lambda: (floats.add_(1), integers + 1))
    assert capture(lambda: (floats + 1, integers + 1)).num_nodes == 2  # not written: no refusal


def test_outputs_of_the_outside_stay_outside(interpreted: None) -> None:
    """A returned external tensor is the same object; two returned views of one result share its memory."""
    x = torch.ones(3)

    def region() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        y = x.mul_(2) + 1
        return x, y, y[:2], 7

    graph = capture(region)
    graph.replay()
    assert graph.outputs[0] is x
    assert graph.outputs[1].data_ptr() == graph.outputs[2].data_ptr()
    assert graph.outputs[3] == 7
    assert graph.pool_nbytes == 12
    assert [t.data_ptr() for t in graph.external_tensors()] == [x.data_ptr()]


def test_graphs_of_one_driver_do_not_disturb_each_other(interpreted: None) -> None:
    """Interleaved replays do not change the outputs of other graphs."""
    driver, x = InductorDriver(CPU), torch.zeros(2)
    graphs = [driver.capture(lambda n=n: x + n) for n in range(3)]
    for start, order in ((1.0, (0, 2, 1)), (2.0, (1, 1, 0, 2))):
        x.fill_(start)
        for i in order:
            graphs[i].replay()
        assert [g.outputs.tolist() for g in graphs] == [[start + n] * 2 for n in range(3)]


def test_a_released_graph_is_not_replayed(interpreted: None) -> None:
    """A released graph has no outputs, no pool and no external tensors; its replay raises EngineError.

    Its code and all tensors that only it referenced are freed: outputs, results between segments, weights.
    """
    driver, inputs = InductorDriver(CPU), [torch.zeros(2), torch.full((2,), 3.0)]
    graph = driver.capture(lambda: driver.eager_call(torch.sin, inputs[0] * 2) * inputs[1])
    held: list[Any] = [graph.outputs, *graph.external_tensors(), *graph._steps]
    held += [step.func for step in graph._steps if isinstance(step, partial)]
    held += [step.result for step in graph._steps if isinstance(step, EagerCall)]
    gone = [weakref.ref(each) for each in held]
    inputs.clear()
    held.clear()
    gc.collect()
    assert len(gone) == 9
    assert all(ref() is not None for ref in gone)
    graph.release()
    gc.collect()
    assert not [ref() for ref in gone if ref() is not None]
    assert (graph.outputs, graph.pool_nbytes, graph.external_tensors()) == (None, 0, [])
    with pytest.raises(EngineError, match="released"):
        graph.replay()


# -- eager calls -----------------------------------------------------------------------------------


def test_eager_calls_are_made_in_every_replay(compiler: None) -> None:
    """A replay makes the eager call between two segments, with the first one's result as argument."""
    driver, x, seen = InductorDriver(CPU), torch.ones(3), []

    def call(y: torch.Tensor) -> torch.Tensor:
        seen.append(y.tolist())  # an eager call may read on the host
        return torch.tensor([sum(seen[-1])])

    def region() -> torch.Tensor:
        assert driver.is_capturing or len(seen) == 0  # the warm-up comes first
        total = driver.eager_call(call, x * 2)  # which no recorded work reads again
        return total + x

    graph = driver.capture(region)
    assert not driver.is_capturing
    assert graph.num_segments == 2
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    graph.replay()
    assert seen[-1] == [2.0, 4.0, 6.0]
    assert len(seen) == 3  # warm-up, capture, replay
    assert graph.outputs.tolist() == [13.0, 14.0, 15.0]
    assert driver.eager_call(call, x).tolist() == [6.0]  # outside a region it is an ordinary call


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.int64), None])
def test_an_eager_call_that_returns_otherwise_is_refused(other: Any, interpreted: None) -> None:
    """A replayed eager call that returns another shape, dtype or structure raises ReplayError."""
    driver, results = InductorDriver(CPU), [torch.zeros(2), torch.zeros(2), other]
    graph = driver.capture(lambda: driver.eager_call(results.pop, 0) + 1)
    with pytest.raises(ReplayError, match=r"torch\.float32 \(2,\) at capture and"):
        graph.replay()


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: bool(t[0]),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: torch.where(t > 0),
        lambda t: torch.arange(t[0]),
    ],
)
def test_host_reads_are_refused_with_their_line(
    read: Callable[[torch.Tensor], object], interpreted: None
) -> None:
    """Each kind of host read raises with the line in this file; the driver can capture again afterwards."""
    driver, x = InductorDriver(CPU), torch.ones(3)
    with pytest.raises(CaptureError, match=r"contents on the host .*, at .*test_inductor\.py:\d+: "):
        driver.capture(lambda: read(x + 1), warmup=0)
    assert not driver.is_capturing
    x.tolist()
    assert driver.capture(lambda: x + 1).num_nodes == 1


def test_declared_host_memory_is_free_to_read(interpreted: None) -> None:
    """Declared host tensors, and tensors computed only from them, may be read; graphs keep their values."""
    driver, x, lengths = InductorDriver(CPU), torch.ones(3), torch.tensor([2, 3])
    driver.declare(DeclaredMemory(host=[lengths]))
    graph = driver.capture(lambda: x * lengths.max().item() + lengths[:1].tolist()[0] + lengths[0] * 10)
    lengths.fill_(100)
    graph.replay()
    assert graph.outputs.tolist() == [25.0, 25.0, 25.0]
    assert [t.data_ptr() for t in graph.external_tensors()] == [x.data_ptr()]
    with pytest.raises(CaptureError, match="a copy to the host"):
        driver.capture(lambda: lengths.copy_(x[:2]), warmup=0)
    with pytest.raises(CaptureError, match="contents on the host"):
        driver.capture(lambda: int((x + lengths[0]).sum()), warmup=0)


def test_captures_are_not_nested(interpreted: None) -> None:
    """A capture inside another driver's capture is refused with its line; both can capture afterwards."""
    drivers, x = [InductorDriver(CPU), InductorDriver(CPU)], torch.ones(2)
    with pytest.raises(CaptureError, match=r"inside another one, at .*test_inductor\.py:\d+: "):
        drivers[0].capture(lambda: drivers[1].capture(lambda: x + 1), warmup=0)
    for driver in drivers:
        assert driver.capture(lambda: x + 1).num_segments == 1


def test_a_swallowed_refusal_is_raised_all_the_same(interpreted: None) -> None:
    """If a region catches the refusal of its host read, the capture still fails."""
    x = torch.ones(2)

    def region() -> torch.Tensor:
        with contextlib.suppress(CaptureError):
            x.tolist()
        return x + 1

    with pytest.raises(CaptureError, match="contents on the host"):
        capture(region, warmup=0)


def test_what_inductor_cannot_compile_is_a_capture_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler error becomes a CaptureError with its first line and the name of another driver."""

    def fail(*_: object) -> None:
        raise RuntimeError("a kernel is beyond me\nand here is why")

    monkeypatch.setattr(inductor, "compiled", fail)
    x = torch.ones(2)
    with pytest.raises(CaptureError, match=r"beyond me\n.*is the tape"):
        capture(lambda: x + 1)


# -- where it runs ---------------------------------------------------------------------------------


def test_it_is_for_cpus_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device or a missing compiler makes the driver unavailable; it has no strict mode."""
    assert "not for cuda" in str(InductorDriver.unavailable(torch.device("cuda")))
    monkeypatch.setattr(inductor, "missing_compiler", lambda: "none here")
    assert InductorDriver.unavailable(CPU) == "none here"
    with pytest.raises(ConfigError, match="'inductor' has no strict mode"):
        InductorDriver(CPU, strict=True)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, or without Python.h, the reason names the missing file and what to install."""
    from torch._inductor import config, cpp_builder

    look = missing_compiler.__wrapped__
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert look() == (
            "no C++ compiler: 'no-such-compiler' cannot be run; install g++, or set CXX to a compiler"
        )
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(inductor.sysconfig, "get_path", lambda _: "/nowhere")
    monkeypatch.setattr(inductor.sys, "platform", "linux")
    assert "no Python.h in /nowhere: install" in str(look())


@pytest.mark.few(1)
@pytest.mark.parametrize("compiler", ["g++", "no-such-compiler"])
def test_the_compiler_is_found_without_importing_inductor(compiler: str) -> None:
    """In a new process the answer is that of torch's own search, and torch's compiler is not imported."""
    program = (
        "import sys\nfrom graphpact_cpu_graph.inductor import missing_compiler\n"
        "look = missing_compiler.__wrapped__\nquick = look()\n"
        "assert 'torch._inductor' not in sys.modules\n"
        "import torch._inductor.config\nassert look() == quick, (look(), quick)\nprint(quick)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"CXX": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ("'no-such-compiler' cannot be run" in done.stdout) == (compiler != "g++")


# -- memory that a compiler does not see as torch does ------------------------------------------------


def _ordered(count: int) -> torch.Tensor:
    return torch.arange(float(count))


_Region: TypeAlias = tuple[torch.Tensor, Callable[[torch.Tensor], Any]]

_REAL: dict[str, _Region] = {
    "an offset from the beginning of a storage": (
        _ordered(8)[3:],
        lambda x: x.as_strided((2, 2), (2, 1), 2) * 2,
    ),
    "an offset before the input": (
        _ordered(8)[3:],
        lambda x: (x.add_(1), x.as_strided((2,), (1,), 0) + x[0]),
    ),
    "a shift in place": (_ordered(12).view(4, 3).t(), lambda x: x[:, 1:].copy_(x[:, :-1].clone())),
    "rows in another order": (
        _ordered(12).view(4, 3),
        lambda x: x.index_put_((x[:, 0].argsort(),), x.clone()),
    ),
    "a copy that is read after a write": (_ordered(4), lambda x: (y := x.clone(), x.add_(1), y * 2)[2]),
    "a copy to another tensor": (_ordered(4), lambda x: (x[:2].copy_(x[2:]), x.mul_(3))),
    "a scatter that is not in place": (
        _ordered(4),
        lambda x: (y := torch.slice_scatter(x, x[:2] * 2, 0, 1, 3), x.zero_(), y)[2],
    ),
    "a scatter into a copy of windows": (
        _ordered(7).as_strided((3, 4), (1, 1)),
        lambda x: (y := torch.select_scatter(x, x[:, 1] * 2, 1, 0), x[2].fill_(1), y)[2],
    ),
    "an element of an expanded tensor": (_ordered(1).expand(3, 1), lambda x: x[1:2].fill_(0.5)),
}
_COMPLEX: dict[str, _Region] = {
    "a conjugate input": (torch.complex(_ordered(4), _ordered(4) + 1), lambda x: (x.mul(2j), x.conj() * 2j)),
    "a negated input": (torch.complex(_ordered(4), _ordered(4)).conj().imag, lambda x: x + 1),
    "a conjugate that is written": (torch.complex(_ordered(4), _ordered(4)).conj(), lambda x: x.imag.add_(2)),
    "a conjugate output": (torch.complex(_ordered(4), _ordered(4)), lambda x: (x * 2).conj()),
}


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("kind", ["compiled", "interpreted"])
@pytest.mark.parametrize("regions", [_REAL, _COMPLEX], ids=["real", "complex"])  # those have no C++ program
def test_memory_is_read_and_written_as_torch_does(
    kind: str, regions: dict[str, _Region], request: pytest.FixtureRequest
) -> None:
    """Offsets, lazy conjugation and copies of memory that is written behave as in an eager run."""
    request.getfixturevalue("compiler" if kind == "compiled" else kind)
    wholes = {name: x.untyped_storage() for name, (x, _) in regions.items()}
    before = {name: storage.clone() for name, storage in wholes.items()}

    def region() -> dict[str, Any]:
        return {name: fn(x) for name, (x, fn) in regions.items()}

    def state(run: Callable[[], Any]) -> dict[str, Any]:
        for name, storage in wholes.items():
            storage.copy_(before[name])
        torch.manual_seed(0)
        outputs = run()
        read = {name: tensors_of(outputs[name]) for name in regions}
        memory = {name: bytes(storage) for name, storage in wholes.items()}
        return {name: ([t.resolve_conj().tolist() for t in read[name]], memory[name]) for name in regions}

    graph = capture(region)
    assert state(lambda: (graph.replay(), graph.outputs)[1]) == state(region)


@pytest.mark.sweep
def test_a_list_of_one_tensor_is_compiled(compiler: None) -> None:
    """Operations on a list of one tensor are compiled, although inductor's C++ programs would crash."""
    x = torch.ones(4)
    graph = capture(lambda: (torch._foreach_zero_([x]), torch._foreach_norm([x + 3])))
    x.fill_(5)
    graph.replay()
    assert x.tolist() == [0, 0, 0, 0]
    assert graph.outputs[1][0].item() == 6


def test_an_operation_that_is_no_valid_code_is_refused(interpreted: None) -> None:
    """``random_.from`` is refused: its name is a Python keyword, and torch writes graphs as Python code."""
    x = torch.ones(4)
    with pytest.raises(CaptureError, match="inductor cannot compile the region: SyntaxError"):
        capture(lambda: x.random_(0, 5))
