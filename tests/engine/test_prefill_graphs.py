"""Prefill in full graphs, by the runner of the third-party example."""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError
from graphpact.shapes import EagerReason
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from support import ROOT, Catalog, reference_tokens

EXAMPLE = ROOT / "examples/third_party"
LENGTHS = (
    1,
    5,
    16,
    17,
    40,
    3,
    60,
    2,
)  # some fill a shape, some leave padding, 60 is split in chunks


@pytest.fixture
def prefill_runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """Return the example's runner, imported from its folder."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from my_attention.prefill import BucketPrefillRunner

    yield BucketPrefillRunner
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_attention"]:
        del sys.modules[name]


@pytest.mark.parametrize("strict", [False, True], ids=["fast", "strict"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "deepseek_v3"])
def test_tokens_of_prefill_graphs_equal_transformers(
    architecture: str,
    checkpoint: Callable[..., Path],
    prefill_runner: type[Any],
    *,
    strict: bool,
) -> None:
    """Greedy tokens equal transformers', and graphs prefill every prompt, whole or in chunks."""
    path = checkpoint(architecture)
    overrides = [
        f'model.path="{path}"',
        'engine.device="cpu"',
        "engine.max_num_seqs=4",
        "engine.max_num_batched_tokens=48",
        'lanes.prefill.runner="my_prefill"',
        f"lanes.prefill.strict={str(strict).lower()}",
        "verify.replay_against_eager=1.0",
    ]
    config = EngineConfig.load(None, env={}, overrides=overrides)
    draw = random.Random(architecture)
    prompts = [[draw.randrange(2, 199) for _ in range(n)] for n in LENGTHS]
    with Engine(config, catalog=Catalog(my_prefill=prefill_runner)) as engine:
        done = engine.generate(prompts, SamplingParams(max_new_tokens=6))
        (prefill,) = [lane for lane in engine.lanes if lane.name == "prefill"]
    assert [c.token_ids for c in done] == [reference_tokens(path, p, 6) for p in prompts]
    stats = prefill.stats
    assert not stats.eager
    assert {shape.num_tokens for shape in stats.shapes} == {16, 32, 48}
    assert stats.replays >= 3
    assert sum(s.raw_tokens for s in stats.shapes.values()) == sum(LENGTHS)
    assert any(s.padding_waste(shape) > 0 for shape, s in stats.shapes.items())
    assert engine.verifiers
    assert all(v.verified == v.lane.stats.replays for v in engine.verifiers)


def test_prompts_replay_shapes_of_their_requests_and_tokens(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shapes on two axes one prompt takes a shape of one request, and several take the larger one."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from recipes.prefill_grid import PrefillGrid

    path = checkpoint("llama")
    overrides = [
        f'model.path="{path}"',
        'engine.device="cpu"',
        "engine.max_num_seqs=4",
        "engine.max_num_batched_tokens=32",
        'lanes.prefill.runner="grid"',
        "lanes.prefill.batch_sizes=[1, 3]",
        "verify.replay_against_eager=1.0",
    ]
    config = EngineConfig.load(None, env={}, overrides=overrides)
    prompts = [[[5] * 9], [[5] * 9, [6] * 3, [7] * 5]]
    with Engine(config, catalog=Catalog(grid=PrefillGrid)) as engine:
        (prefill,) = [lane for lane in engine.lanes if lane.name == "prefill"]
        for batch in prompts:
            done = engine.generate(batch, SamplingParams(max_new_tokens=3))
            assert [c.token_ids for c in done] == [reference_tokens(path, p, 3) for p in batch]
    replayed = {(s.batch_size, s.num_tokens): n.replays for s, n in prefill.stats.shapes.items()}
    assert replayed == {(1, 16): 1, (3, 16): 0, (1, 32): 0, (3, 32): 1}
    assert not prefill.stats.eager


@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "trtllm_mla"])
@pytest.mark.parametrize("runner", ["grid", "my_prefill"])
def test_no_shape_has_more_tokens_than_its_requests_have_positions(
    runner: str,
    backend: str,
    checkpoint: Callable[..., Path],
    prefill_runner: type[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With more tokens a step than its requests can have, the largest shape has all their positions."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from recipes.prefill_grid import PrefillGrid

    overrides = [
        f'model.path="{checkpoint("deepseek_v3" if backend == "trtllm_mla" else "llama")}"',
        'engine.device="cpu"',
        f"engine.attention_backend={backend}",
        "engine.page_size=32",
        "engine.max_num_seqs=1",
        "engine.max_model_len=40",
        "engine.max_num_batched_tokens=64",
        f"lanes.prefill.runner={runner}",
    ]
    config = EngineConfig.load(None, env={}, overrides=overrides)
    with Engine(config, catalog=Catalog(grid=PrefillGrid, my_prefill=prefill_runner)) as engine:
        engine.generate([[5] * 30], SamplingParams(max_new_tokens=2))
        (prefill,) = [lane for lane in engine.lanes if lane.name == "prefill"]
    most = prefill.backend.context.limits.max_context_len
    assert max(shape.num_tokens for shape in prefill.stats.shapes) == min(most, 64)
    assert prefill.stats.replays == 1


def test_configured_sizes_that_a_runner_does_not_use_are_refused(
    checkpoint: Callable[..., Path], prefill_runner: type[Any]
) -> None:
    """``batch_sizes`` are refused, with the captured ones, for a runner that chooses its sizes itself."""
    overrides = [
        f'model.path="{checkpoint("llama")}"',
        'lanes.prefill.runner="my_prefill"',
        "lanes.prefill.batch_sizes=[1, 2]",
        "engine.max_num_seqs=4",
    ]
    config = EngineConfig.load(None, env={}, overrides=overrides)
    with pytest.raises(
        ConfigError, match=r"lanes\.prefill\.batch_sizes = \[1, 2\], .*'my_prefill' captures shapes of 4"
    ):
        Engine(config, catalog=Catalog(my_prefill=prefill_runner))


def test_a_prompt_whose_graph_is_released_runs_eagerly(
    checkpoint: Callable[..., Path], prefill_runner: type[Any]
) -> None:
    """A closed prefill lane runs its batches eagerly and counts the reason."""
    overrides = [
        f'model.path="{checkpoint("llama")}"',
        'engine.device="cpu"',
        'lanes.prefill.runner="my_prefill"',
        "engine.max_num_batched_tokens=32",
    ]
    config = EngineConfig.load(None, env={}, overrides=overrides)
    with Engine(config, catalog=Catalog(my_prefill=prefill_runner)) as engine:
        (prefill,) = [lane for lane in engine.lanes if lane.name == "prefill"]
        prefill.close()
        engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=1))
        assert prefill.stats.eager == {(ForwardMode.EXTEND, EagerReason.NOT_CAPTURED): 1}
