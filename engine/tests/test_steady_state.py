"""Thousands of decode steps with changing batches: nothing grows, is compiled again, or is allocated."""

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from compiled_kernels import needs_compiled
from compiling import compiler  # noqa: F401  a fixture
from graphpact import Lane
from graphpact.plugins import PluginCatalog
from graphpact.shapes import GraphShape
from graphpact_cpu_graph import shared_library
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_tape import code

PROMPT = [5, 9, 2, 7]


def make_engine(path: Path, *overrides: str) -> Engine:
    """Return an engine that decodes up to eight requests, most of them in graphs."""
    given = [
        *(f'model.path="{path}"', 'engine.device="cpu"', "engine.max_num_seqs=8", "engine.page_size=4"),
        *("engine.num_pages=200", "lanes.decode.batch_sizes=[1, 2, 4, 6]", *overrides),
    ]
    return Engine(EngineConfig.load(None, env={}, overrides=given))


def run(engine: Engine, steps: int, seed: int) -> None:
    """Decode for ``steps`` steps: requests of random lengths arrive and end; then all end."""
    draw = random.Random(seed)
    for _ in range(steps):
        if draw.random() < 0.3:
            prompt = [draw.randrange(2, 199) for _ in range(draw.randrange(1, 12))]
            sampling = SamplingParams(
                max_new_tokens=draw.randrange(1, 30), temperature=draw.choice([0.0, 0.7]), ignore_eos=True
            )
            engine.add(prompt, sampling)
        engine.step()
    while engine.scheduler.has_work:
        engine.step()


def held(engine: Engine) -> dict[str, Any]:
    """Return counts of tensors, bytes and graphs while no request is alive."""
    gc.collect()
    storages = {}
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    graphs = [captured.graph for lane in engine.lanes for captured in lane.captured.values()]
    return {
        "tensors": len(tensors),
        "bytes": sum(storages.values()),
        "graphs": [id(graph) for graph in graphs],
        "pools": sum(graph.pool_nbytes for graph in graphs),
        "compiled": sum(counters["inductor"].values()),
    }


def num_plans(engine: Engine) -> int:
    """Return how many compiled fills the registries keep."""
    return sum(len(lane.registry._plans) for lane in engine.lanes if lane.registry is not None)


@pytest.mark.few(1)
@pytest.mark.parametrize("runner", ["cuda_graph", "cpu_graph"])
@pytest.mark.parametrize("steps", [300, pytest.param(2000, marks=pytest.mark.sweep)])
@pytest.mark.usefixtures("compiler")
def test_a_long_run_keeps_nothing(
    runner: str, steps: int, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long run leaves as many tensors, bytes and graphs as before, compiles nothing, and tokens agree."""
    engine = make_engine(checkpoint("llama", num_hidden_layers=1), f'lanes.decode.runner="{runner}"')
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    (expected,) = engine.generate([PROMPT], sampling)
    run(engine, 200, seed=1)  # each size, and each number of requests, was there

    def refuse(*_: object) -> None:
        raise AssertionError("something is compiled in a step")

    monkeypatch.setattr(shared_library, "compiled", refuse)
    monkeypatch.setattr(code, "Code", refuse)
    before = held(engine)
    run(engine, steps, seed=2)
    assert held(engine) == before
    (again,) = engine.generate([PROMPT], sampling)
    assert again.token_ids == expected.token_ids
    decode = engine.lanes[0]
    assert decode.stats.replays > steps // 2
    assert set(decode.captured) == {shape for shape, stats in decode.stats.shapes.items() if stats.replays}
    assert num_plans(engine) <= sum(shape.batch_size for shape in decode.shapes)  # one per live count


@pytest.mark.parametrize("backend", ["flashinfer", "fa3"])
def test_registry_and_metadata_allocate_nothing(
    backend: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a fill of some counts is compiled, preparing a replay allocates nothing, by torch's record."""
    path = checkpoint("llama", num_hidden_layers=1)
    engine = make_engine(path, f'engine.attention_backend="{backend}"')
    run(engine, 100, seed=1)
    taken: list[int] = []
    prepare = Lane.prepare

    def recorded(lane: Lane, batch: Any) -> Any:
        if not isinstance(lane.fit(batch), GraphShape):
            return prepare(lane, batch)
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            prepared = prepare(lane, batch)
        events = profile.profiler.kineto_results.events()
        taken.append(sum(e.nbytes() > 0 for e in events if e.name() == "[memory]"))
        return prepared

    monkeypatch.setattr(Lane, "prepare", recorded)
    run(engine, 40, seed=2)
    assert len(taken) > 20
    assert not any(taken), taken


@needs_compiled
@pytest.mark.parametrize("backend", ["flashinfer", "fa3"])
def test_index_tensors_are_filled_in_place(
    backend: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the metadata work before the graph, compiled kernels fill index tensors without new memory."""
    path = checkpoint("llama", num_hidden_layers=1)
    cls = PluginCatalog.scan().select("attention_backend", backend)
    monkeypatch.setattr(cls, "fill_is_device_only", False)
    engine = make_engine(path, f'engine.attention_backend="{backend}"')
    run(engine, 30, seed=1)
    lane = engine.lanes[0]
    shape, captured = next(iter(lane.captured.items()))
    step = captured.context
    with torch.inference_mode():
        lane.backend.init_metadata_replay(step.view, shape, captured.metadata)
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            lane.backend.init_metadata_replay(step.view, shape, captured.metadata)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert not [e.nbytes() for e in events if e.nbytes() > 0]
