"""Five pull requests in their own engine: without a fix the guard names it, with the fix it is silent."""

import functools
import json
import shutil
from typing import Any

import pytest
import torch
import transformers
from draft_extend import PacksAccepted, PadsByMetadata, Result
from draft_extend import run as run_draft_extends
from engines import MODEL, Run, in_child, run_ranks
from seeds import (
    SEEDS,
    Seed,
)

from graphpact_sglang.load.in_process import InProcessEngine

WORDS = "tape,guard,contents:1"
_WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model with experts and random weights."""
    folder = tmp_path_factory.mktemp("experts")
    vocabulary = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(vocab_size=vocabulary, **_WIDTHS)
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6)  # otherwise layers add little, and all tokens look alike
    model.save_pretrained(folder)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


def _run(seed: Seed, words: str, experts: str, *, without_fix: bool) -> list[Run]:
    """Run the requests of a seed with the fix or without it; a run for each rank."""

    def plant(engine: InProcessEngine) -> None:
        for change in (seed.always, seed.plant if without_fix else None):
            if change is not None:
                change(engine)

    arguments = dict(seed.arguments) | ({"model_path": experts} if seed.ranks > 1 else {})
    before = seed.before if without_fix else None
    return run_ranks(
        words, seed.ranks, seed.requests(), plant, rounds=seed.rounds, before=before, **arguments
    )


@functools.cache
def _right(name: str, experts: str) -> list[Run]:
    """Return the runs with all fixes; seeds with the same engine and requests share them."""
    seed = SEEDS[name]
    same = [each for each, other in SEEDS.items() if _engine_of(other) == _engine_of(seed)]
    if same[0] != name:
        return _right(same[0], experts)
    return _run(seed, WORDS, experts, without_fix=False)


def _engine_of(seed: Seed) -> tuple[Any, ...]:
    return seed.ranks, seed.rounds, seed.arguments, seed.requests, seed.always


@pytest.mark.parametrize("name", SEEDS)
def test_a_fix_that_is_taken_out_is_named(name: str, experts: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Rule, owner and field are named on every rank, and answers are wrong where a kernel shows it."""
    seed, right = SEEDS[name], _right(name, experts)
    assert [run.faults for run in right] == [[]] * seed.ranks
    checked = [graph for run in right for graph in run.state["guard"]["graphs"].values()]
    assert all(graph["contents"] == graph["replays"] for graph in checked)
    if seed.answers == "refused":
        rule, owner, field = seed.named
        with pytest.raises(AssertionError, match="KernelRefusal"):
            _run(seed, WORDS, experts, without_fix=True)
        assert f"graphpact guard: {rule} {owner}.{field} in" in capfd.readouterr().err
        return
    wrong = _run(seed, WORDS, experts, without_fix=True)
    assert all(seed.named in [fault[:3] for fault in run.faults] for run in wrong)
    assert all((run.tokens == right[0].tokens) == (seed.answers == "right") for run in wrong)


@pytest.mark.parametrize("change", [None, PadsByMetadata], ids=["as released", "pads by its metadata"])
def test_a_draft_extend_with_one_stride_is_right(change: type | None) -> None:
    """The released TensorRT-LLM backend gives its eager numbers; its forward reads no offsets of queries."""
    found = in_child(run_draft_extends, change, words="tape")
    assert found.faults == set()
    assert ("cu_seqlens_q" in found.read) == (change is PadsByMetadata)
    assert max(_gaps(found)) < 1e-5


def test_a_draft_extend_by_accepted_lengths_is_named() -> None:
    """Offsets of accepted tokens, where the capture had one stride (PR 21987), are wrong rows, and named."""
    found = in_child(run_draft_extends, PacksAccepted, words="tape")
    assert ("GP07", "TRTLLMMLABackend", "cu_seqlens_q") in found.faults
    assert ("GP08", "TRTLLMMLABackend", "forward_decode_metadata.sum_seq_lens_q") in found.faults
    assert min(_gaps(found)) > 0.1


def _gaps(found: Result) -> list[float]:
    """Return for each batch how far its replay is from an eager run."""
    pairs = zip(found.replayed, found.eager, strict=True)
    return [float((torch.tensor(replayed) - torch.tensor(eager)).abs().max()) for replayed, eager in pairs]
