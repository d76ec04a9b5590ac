"""Greedy tokens of an engine with ``fa3`` equal those of transformers."""

import random
from pathlib import Path

import pytest
import torch
import transformers

from checkpoints import save_random_checkpoint
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig

# Lengths from one token to several pages, in an order that makes batches grow and shrink.
PROMPT_LENGTHS = (1, 17, 40, 3, 30)
COUNTS = (12, 5, 9, 14, 7)


def generate(path: Path, prompts: list[list[int]], *overrides: str) -> tuple[Engine, list[list[int]]]:
    """Run an engine that verifies every replay; return the engine and the generated tokens."""
    options = [
        f'model.path="{path}"',
        'engine.device="cpu"',
        'engine.attention_backend="fa3"',
        "engine.max_num_seqs=4",
        "lanes.decode.batch_sizes=[2,4]",
        "engine.max_num_batched_tokens=24",
        "verify.replay_against_eager=1.0",
        *overrides,
    ]
    engine = Engine(EngineConfig.load(None, env={}, overrides=options))
    requests = [
        engine.add(prompt, SamplingParams(max_new_tokens=count))
        for prompt, count in zip(prompts, COUNTS, strict=True)
    ]
    while engine.scheduler.has_work:
        engine.step()
    return engine, [r.output_token_ids for r in requests]


def reference(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of transformers' greedy generation for each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    written = []
    for prompt, count in zip(prompts, COUNTS, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
        written.append(out[0, len(prompt) :].tolist())
    return written


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("architecture", "page_size", "strict"),
    [
        ("llama", 1, True),
        ("qwen3", 16, False),
        ("mistral", 16, False),  # windows
        ("gemma2", 1, False),  # windows in every other layer, and soft caps
        ("gpt_oss", 16, False),  # sinks
        ("gpt_oss", 1, True),
    ],
)
def test_greedy_tokens_equal_transformers(
    architecture: str, page_size: int, tmp_path: Path, *, strict: bool
) -> None:
    """Greedy tokens equal transformers' for every prompt; every decode step is a verified replay."""
    path = save_random_checkpoint(tmp_path, architecture)
    draw = random.Random(architecture)
    prompts = [[draw.randrange(2, 199) for _ in range(n)] for n in PROMPT_LENGTHS]
    overrides = [f"engine.page_size={page_size}"]
    if strict:
        overrides.append("lanes.decode.strict=true")
    engine, written = generate(path, prompts, *overrides)
    assert written == reference(path, prompts)
    decode = engine.lanes[0].stats
    assert decode.replays == engine.verifiers[0].verified > 10
    assert not decode.eager
    assert engine.lanes[0].backend.records_metadata
    assert any(s.padding_waste(shape) > 0 for shape, s in decode.shapes.items())
