"""Tests that thousands of replays of several graphs leak nothing and compile nothing."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from compiling import compiler  # noqa: F401  a fixture
from graphpact.graphs import GraphDriver
from graphpact_cpu_graph import shared_library
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_tape import code
from graphpact_tape.tape import TapeDriver

CPU = torch.device("cpu")
SIZES = (1, 2, 4, 8)
STEPS = 2000
DRIVERS: dict[str, Callable[[], GraphDriver]] = {
    "tape": lambda: TapeDriver(CPU),
    "inductor": lambda: InductorDriver(CPU),
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as a lane runs its steps."""
    with torch.inference_mode():
        yield


class Decode:
    """A layer without attention that writes a cache, for batches up to the largest size."""

    def __init__(self) -> None:
        self.x = torch.zeros(SIZES[-1], 16)
        self.where = torch.zeros(SIZES[-1], dtype=torch.int64)
        self.cache = torch.zeros(32, 16)
        self.w = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) / 4

    def region(self, size: int) -> torch.Tensor:
        """Return the result for the first ``size`` rows."""
        x = self.x[:size]
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = torch.nn.functional.linear(h, self.w)
        self.cache.index_copy_(0, self.where[:size], torch.cat((-h[:, 8:], h[:, :8]), dim=-1))
        return torch.nn.functional.silu(h + self.cache[self.where[:size]]) + x

    def holders(self) -> list[int]:
        """Return the reference count of the storage of each tensor."""
        tensors = (self.x, self.where, self.cache, self.w)
        return [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in tensors]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.sweep) if n == "inductor" else n for n in DRIVERS]
)
@pytest.mark.usefixtures("compiler")
def test_replays_hold_and_compile_nothing_new(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 2,000 replays with changing sizes, the numbers of tensors, objects and programs are unchanged.

    Each result equals that of an eager run.
    """
    driver, decode = DRIVERS[name](), Decode()
    graphs = {size: driver.capture(lambda size=size: decode.region(size)) for size in SIZES}

    def refuse(*_: object) -> None:
        raise AssertionError("something is compiled in a replay")

    monkeypatch.setattr(shared_library, "compiled", refuse)
    monkeypatch.setattr(code, "Code", refuse)
    generator = torch.Generator().manual_seed(1)
    counts = []
    for step in range(STEPS):
        size = SIZES[int(torch.randint(len(SIZES), (1,), generator=generator))]
        decode.x.normal_(generator=generator)
        decode.where.copy_(torch.randperm(32, generator=generator)[: SIZES[-1]])
        graphs[size].replay()
        if step % 500 == 100:
            torch.testing.assert_close(graphs[size].outputs, decode.region(size))
        if step in (200, STEPS - 1):
            gc.collect()
            counts.append((decode.holders(), sum(isinstance(o, torch.Tensor) for o in gc.get_objects())))
            counts[-1] += (len(shared_library._loaded), sum(g.pool_nbytes for g in graphs.values()))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", DRIVERS)
@pytest.mark.usefixtures("compiler")
def test_a_replay_frees_what_it_allocates(name: str) -> None:
    """A replay frees all memory that it allocates, as torch's profiler of allocations shows."""
    driver, decode = DRIVERS[name](), Decode()
    graph = driver.capture(lambda: decode.region(8))
    graph.replay()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        for _ in range(20):
            graph.replay()
    changes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sum(changes) == 0
