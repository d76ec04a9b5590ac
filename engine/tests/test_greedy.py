"""Tokens from captured graphs equal the tokens of transformers."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from support import reference_tokens

# Lengths from one token to several pages, in an order that makes batches grow and shrink.
PROMPT_LENGTHS = (1, 5, 16, 17, 40, 3, 60, 2)


def make_engine(path: Path, *overrides: str) -> Engine:
    """Build an engine on a CPU that verifies every replay."""
    return Engine(
        EngineConfig.load(
            None,
            env={},
            overrides=[
                f'model.path="{path}"',
                'engine.device="cpu"',
                "engine.max_num_seqs=4",
                "verify.replay_against_eager=1.0",
                *overrides,
            ],
        )
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.sweep), 16])
@pytest.mark.parametrize(
    "architecture",
    ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "mixtral", "gpt_oss", "deepseek_v3"],
)
def test_greedy_tokens_equal_transformers(
    architecture: str, page_size: int, checkpoint: Callable[..., Path]
) -> None:
    """Greedy tokens equal transformers' for every prompt, and every decode step is a verified replay."""
    path = checkpoint(architecture)
    draw = random.Random(architecture)
    prompts = [[draw.randrange(2, 199) for _ in range(n)] for n in PROMPT_LENGTHS]
    counts = [draw.randrange(4, 24) for _ in prompts]
    options = ("engine.max_num_batched_tokens=24", "engine.mixed=false")  # every decode is of the decode lane
    engine = make_engine(path, f"engine.page_size={page_size}", *options)
    requests = [
        engine.add(prompt, SamplingParams(max_new_tokens=count))
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    sizes = []
    while engine.scheduler.has_work:
        before = engine.lanes[0].stats.replays
        tokened = engine.step()
        if engine.lanes[0].stats.replays > before:
            sizes.append(len(tokened))
    assert [r.output_token_ids for r in requests] == [
        reference_tokens(path, prompt, count) for prompt, count in zip(prompts, counts, strict=True)
    ]
    grew = any(a < b for a, b in itertools.pairwise(sizes))
    shrank = any(a > b for a, b in itertools.pairwise(sizes))
    assert grew
    assert shrank
    decode = engine.lanes[0].stats
    assert decode.replays == len(sizes) == engine.verifiers[0].verified > 20
    assert not decode.eager
    assert sum(s.raw_rows for s in decode.shapes.values()) == sum(
        len(r.output_token_ids) - 1 for r in requests
    )
    padded = [s for shape, s in decode.shapes.items() if s.padding_waste(shape) > 0]
    assert padded  # some batch was smaller than its shape


def test_logits_are_the_graphs_own(checkpoint: Callable[..., Path]) -> None:
    """A step returns what its replay wrote: outputs that held NaN before it are overwritten."""
    engine = make_engine(checkpoint("llama"), "verify.replay_against_eager=0.0")
    lane = engine.lanes[0]
    engine.add([5, 6, 7], SamplingParams(max_new_tokens=3))
    engine.add([9], SamplingParams(max_new_tokens=3))
    engine.step()
    scheduled = engine.scheduler.schedule()
    assert scheduled is not None
    with torch.inference_mode():  # the outputs are inference tensors
        for captured in lane.captured.values():
            captured.graph.outputs.logits.fill_(float("nan"))
    logits = lane.run(scheduled.batch).logits
    assert lane.stats.replays == 1
    assert torch.isfinite(logits).all()
    others = [c for s, c in lane.captured.items() if s.batch_size != 2]
    assert all(c.graph.outputs.logits.isnan().all() for c in others)
    eager = lane.run_eager(scheduled.batch).logits
    torch.testing.assert_close(logits, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("driver", ["cuda", "tape"])
def test_a_gpu_writes_the_same_tokens(
    architecture: str, driver: str, checkpoint: Callable[..., Path]
) -> None:
    """On a GPU, with CUDA graphs and with the tape, tokens equal a CPU's, and every replay is verified."""
    path = checkpoint(architecture)
    draw = random.Random(architecture)
    prompts = [[draw.randrange(2, 199) for _ in range(n)] for n in PROMPT_LENGTHS]
    params = SamplingParams(max_new_tokens=16)
    options = ("engine.max_num_batched_tokens=24", 'model.dtype="float64"')
    on_cpu = make_engine(path, *options).generate(prompts, params)
    engine = make_engine(path, *options, 'engine.device="cuda"', f"lanes.decode.graph_driver={driver}")
    assert [c.token_ids for c in engine.generate(prompts, params)] == [c.token_ids for c in on_cpu]
    assert engine.lanes[0].stats.replays == engine.verifiers[0].verified > 20


def test_batches_without_a_bucket_run_eagerly_with_the_reason(
    checkpoint: Callable[..., Path],
) -> None:
    """A batch larger than the largest shape runs eagerly with that reason, and gives the same tokens."""
    path = checkpoint("llama")
    engine = make_engine(path, "lanes.decode.batch_sizes=[1,2]")
    prompts = [[3 + i, 4, 5] for i in range(4)]
    done = engine.generate(prompts, SamplingParams(max_new_tokens=6, ignore_eos=True))
    plain = make_engine(path).generate(prompts, SamplingParams(max_new_tokens=6, ignore_eos=True))
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    (reason,) = engine.lanes[0].stats.eager
    assert reason[1].name == "over_largest"


def test_sampled_tokens_do_not_depend_on_neighbours(checkpoint: Callable[..., Path]) -> None:
    """A seeded request draws the same tokens by itself and in a batch."""
    path = checkpoint("llama")
    params = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
    together = make_engine(path).generate([[7, 8, 9], [10, 11], [12]], params)
    alone = make_engine(path).generate([[10, 11]], params)
    assert together[1].token_ids == alone[0].token_ids
