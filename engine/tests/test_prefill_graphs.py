"""Prefill through graphs: full ones, by the runner of the third-party example, and broken or split ones."""

import itertools
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
from support import ROOT, Catalog, pairwise, reference_tokens

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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "strict", [pytest.param(False, marks=pytest.mark.sweep), True], ids=["fast", "strict"]
)
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


@pytest.mark.few(2)
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


# -- broken and split graphs -------------------------------------------------------------------------

DIMENSIONS: dict[str, list[Any]] = {
    "runner": ["breakable_cuda_graph", "piecewise_cuda_graph"],
    "model": [("llama", "flashinfer"), ("gemma2", "fa3"), ("deepseek_v3", "trtllm_mla"), ("mixtral", "fa3")],
    "strict": [False, True],
    "step": [24, 48],
}


def _cases() -> list[Any]:
    """Return all combinations; most of them are sweeps: torch.compile traces a graph in a second or two."""
    few = [tuple(case.values()) for case in pairwise(DIMENSIONS)]
    split = [case for case in few if case[0].startswith("piecewise")]
    few = [case for case in few if case not in split[1:]]
    return [
        pytest.param(
            case,
            id="-".join([case[0].partition("_")[0], *case[1], "strict" if case[2] else "fast", str(case[3])]),
            marks=() if case in few else pytest.mark.sweep,
        )
        for case in itertools.product(*DIMENSIONS.values())
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", _cases())
def test_tokens_of_broken_and_split_prefill_equal_transformers(
    case: tuple[str, tuple[str, str], bool, int], checkpoint: Callable[..., Path]
) -> None:
    """Greedy tokens equal transformers', every replay equals an eager run, and graphs read every chunk.

    Chunks with cached prefixes and several prompts of a step are among them. Every graph has one segment more
    than the model has layers.
    """
    runner, (architecture, backend), strict, most = case
    path = checkpoint(architecture)
    overrides = [
        f'model.path="{path}"',
        'engine.device="cpu"',
        "engine.max_num_seqs=4",
        f"engine.max_num_batched_tokens={most}",
        f'engine.attention_backend="{backend}"',
        *(["engine.page_size=32"] if backend == "trtllm_mla" else []),
        f'lanes.prefill.runner="{runner}"',
        f"lanes.prefill.token_counts={[8, most]}",
        "lanes.prefill.max_padding_ratio=48",
        f"lanes.prefill.strict={str(strict).lower()}",
        "verify.replay_against_eager=1.0",
    ]
    draw = random.Random(most)
    with Engine(EngineConfig.load(None, env={}, overrides=overrides)) as engine:
        prompts = [[draw.randrange(2, engine.vocab_size) for _ in range(n)] for n in LENGTHS]
        done = engine.generate(prompts, SamplingParams(max_new_tokens=4, ignore_eos=True))
        lane = next(lane for lane in engine.lanes if lane.name == "prefill")
        segments = {captured.graph.num_segments for captured in lane.captured.values()}
        assert segments == {len(engine.model.layers) + 1}
        assert lane.stats.replays >= sum(LENGTHS) // most
        assert not lane.stats.eager
        verifier = next(v for v in engine.verifiers if v.lane is lane)
        assert verifier.verified == verifier.equal_to_the_bit == lane.stats.replays
    for prompt, completion in zip(prompts, done, strict=True):
        assert completion.token_ids == reference_tokens(path, prompt, 4)


@pytest.mark.parametrize(
    ("lane", "settings", "fault"),
    [
        ("prefill", ["runner='eager'", "max_padding_ratio=3"], "max_padding_ratio = 3.0, but runner 'eager'"),
        ("decode", ["max_padding_ratio=3"], "max_padding_ratio has no effect: graphs of mode decode"),
        (
            "prefill",
            ["runner='eager'", "token_counts=[8]"],
            "token_counts = [8], but runner 'eager' captures",
        ),
        (
            "decode",
            ["token_counts=[3]"],
            "token_counts = [3], but runner 'cuda_graph' captures shapes of 1, 2,",
        ),
        ("prefill", ["batch_sizes=[8]"], "batch_sizes = [8], but runner 'breakable_cuda_graph' captures"),
        (
            "prefill",
            ["token_counts=[4096]"],
            "token_counts has 4096, but a step of this lane has at most 2048",
        ),
    ],
)
def test_keys_of_prefill_graphs_without_an_effect_are_refused(
    lane: str, settings: list[str], fault: str, checkpoint: Callable[..., Path]
) -> None:
    """A key that the runner or the mode of its lane does not use is an error with key and value."""
    overrides = [
        f'model.path="{checkpoint("llama")}"',
        'lanes.prefill.runner="breakable_cuda_graph"',
        *(f"lanes.{lane}.{setting}" for setting in settings),
    ]
    with pytest.raises(ConfigError) as error:
        Engine(EngineConfig.load(None, env={}, overrides=overrides))
    assert f"lanes.{lane}.{fault}" in str(error.value)


def test_a_chunk_limit_bounds_the_graphs(checkpoint: Callable[..., Path]) -> None:
    """With a limit of prompt tokens, no count above that limit and the decodes beside it is captured."""
    overrides = [
        f'model.path="{checkpoint("llama")}"',
        'lanes.prefill.runner="breakable_cuda_graph"',
        "engine.max_num_seqs=4",
        "engine.max_prefill_chunk=16",
    ]
    for mixed, most in ((True, 19), (False, 16)):
        settings = [*overrides, f"engine.mixed={str(mixed).lower()}"]
        with Engine(EngineConfig.load(None, env={}, overrides=settings)) as engine:
            lane = next(lane for lane in engine.lanes if lane.name == "prefill")
            assert max(shape.num_tokens for shape in lane.captured) == most


@pytest.mark.sweep
@pytest.mark.parametrize(
    "runner",
    ["breakable_cuda_graph", pytest.param("piecewise_cuda_graph", marks=pytest.mark.sweep)],
)
def test_prompts_of_speculation_are_read_through_graphs(runner: str) -> None:
    """Tokens are those of eager prompts, where the target returns hidden states too; replays are verified."""
    models = ROOT / "examples/models"
    overrides = [
        f'model.path="{models / "tiny-llama"}"',
        'engine.device="cpu"',
        "engine.max_num_seqs=2",
        'speculative.algorithm="eagle"',
        f'speculative.draft_model="{models / "tiny-llama-eagle"}"',
    ]
    graphs = [f'lanes.prefill.runner="{runner}"', "lanes.prefill.token_counts=[16, 96]"]
    graphs += ["lanes.prefill.max_padding_ratio=96", "verify.replay_against_eager=1.0"]
    prompts = [[1 + n % 90 for n in range(count)] for count in (3, 40, 61)]
    found = []
    for more in ([], graphs):
        with Engine(EngineConfig.load(None, env={}, overrides=[*overrides, *more])) as engine:
            done = engine.generate(prompts, SamplingParams(max_new_tokens=6, ignore_eos=True))
            lane = next(lane for lane in engine.lanes if lane.name == "prefill")
            found.append([completion.token_ids for completion in done])
            assert (lane.stats.replays > 1) is bool(more)
    assert found[0] == found[1]
