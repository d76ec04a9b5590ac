"""Prefill in full graphs, by the runner of the third-party example."""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphpact.batch import ForwardMode
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
