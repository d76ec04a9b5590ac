"""Greedy tokens of MLA models, through captured graphs over latents, equal those of transformers."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from checkpoints import needs_seam, save_random_checkpoint
from graphpact.attention import HeadLayout
from graphpact.errors import ConfigError
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import UnsupportedModelError
from graphpact_trtllm_mla import TRTLLMMLABackend

# Lengths from one token to several pages, in an order that makes batches grow and shrink.
PROMPT_LENGTHS = (1, 5, 63, 64, 40, 3, 65, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a maker of checkpoint directories, one for each architecture."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            path = tmp_path_factory.mktemp(architecture)
            made[architecture] = save_random_checkpoint(path, architecture)
        return made[architecture]

    return make


def make_engine(path: Path, *overrides: str) -> Engine:
    """Build an engine on a CPU whose every replay is verified."""
    settings = [
        f'model.path="{path}"',
        'engine.device="cpu"',
        "engine.max_num_seqs=4",
        "engine.max_num_batched_tokens=48",
        'engine.attention_backend="trtllm_mla"',
        "engine.page_size=64",
        "verify.replay_against_eager=1.0",
        *overrides,
    ]
    return Engine(EngineConfig.load(None, env={}, overrides=settings))


def reference_tokens(path: Path, prompt: list[int], count: int) -> list[int]:
    """Return the tokens of transformers' greedy generation for ``prompt``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return list(out[0, len(prompt) :].tolist())


@pytest.mark.few(1)
@needs_seam
@pytest.mark.parametrize("strict", [pytest.param("false", marks=pytest.mark.sweep), "true"])
@pytest.mark.parametrize("page_size", [pytest.param(32, marks=pytest.mark.sweep), 64])
@pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v3"])
def test_greedy_tokens_equal_transformers(
    architecture: str, page_size: int, strict: str, checkpoint: Callable[[str], Path]
) -> None:
    """Greedy tokens equal transformers' for every prompt; every decode step is a verified replay."""
    path = checkpoint(architecture)
    draw = random.Random(architecture)
    prompts = [[draw.randrange(2, 199) for _ in range(n)] for n in PROMPT_LENGTHS]
    counts = [draw.randrange(4, 24) for _ in prompts]
    options = (f"lanes.decode.strict={strict}", "engine.mixed=false")  # decodes run only in the decode lane
    engine = make_engine(path, f"engine.page_size={page_size}", *options)
    assert {layer.head_layout for layer in engine.model.layers} == {HeadLayout.MLA}
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
    assert any(a < b for a, b in itertools.pairwise(sizes))
    assert any(a > b for a, b in itertools.pairwise(sizes))
    decode = engine.lanes[0].stats
    assert decode.replays == len(sizes) == engine.verifiers[0].verified > 20
    assert not decode.eager
    assert any(s.padding_waste(shape) > 0 for shape, s in decode.shapes.items())


@needs_seam
@pytest.mark.parametrize("in_graph", [True, False])
def test_metadata_is_made_by_the_graph_or_before_it(
    in_graph: bool,  # noqa: FBT001  a parameter of the test
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens equal transformers', with metadata recorded in the graph or filled by the replay hook."""
    monkeypatch.setattr(TRTLLMMLABackend, "fill_is_device_only", in_graph)
    engine = make_engine(checkpoint("deepseek_v3"))
    assert engine.lanes[0].backend.records_metadata is in_graph
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    prompts = [[7, 8, 9] * 25, [10, 11]]
    done = engine.generate(prompts, params)
    want = [reference_tokens(checkpoint("deepseek_v3"), prompt, 8) for prompt in prompts]
    for completion, tokens in zip(done, want, strict=True):
        assert completion.token_ids[: len(tokens)] == tokens
    assert engine.lanes[0].stats.replays == engine.verifiers[0].verified == 7


@needs_seam
def test_what_it_cannot_serve_is_refused(checkpoint: Callable[[str], Path]) -> None:
    """Another page size, a model or a lane without MLA, and native kernels without a GPU are refused."""
    path = checkpoint("deepseek_v3")
    with pytest.raises(UnsupportedModelError, match=r"page size 16 \(has 32, 64\)"):
        make_engine(path, "engine.page_size=16")
    with pytest.raises(UnsupportedModelError, match=r"head layout gqa \(has mla\)"):
        make_engine(checkpoint("llama"))
    with pytest.raises(UnsupportedModelError, match=r"lanes\.prefill, 'flashinfer', has no MLA"):
        make_engine(path, 'lanes.prefill.attention_backend="flashinfer"')
    with pytest.raises(ConfigError, match="need a CUDA device"):
        make_engine(path, 'engine.kernel_provider="native"')
