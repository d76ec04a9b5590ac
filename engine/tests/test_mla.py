"""Tests of MLA: the absorbed form equals transformers, and the engine uses it if every lane can."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from checkpoints import needs_seam
from graphpact import ForwardBatch, ForwardMode, LayerSpec
from graphpact.attention import HeadLayout
from graphpact_engine import Engine, SamplingParams, models
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import UnsupportedModelError
from graphpact_flashinfer import FlashInferBackend
from support import Catalog

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


class Latents(FlashInferBackend):
    """A backend that attends over latents and nothing else."""

    capabilities = replace(FlashInferBackend.capabilities, head_layouts=frozenset({HeadLayout.MLA}))


class Versatile(FlashInferBackend):
    """A backend that attends over latents and over heads."""

    capabilities = replace(FlashInferBackend.capabilities, head_layouts=frozenset(HeadLayout))


class Choosy(Versatile):
    """A backend that attends over latents and over heads, for pages of 32 only."""

    capabilities = replace(Versatile.capabilities, page_sizes=frozenset({32}))


def attend_in_a_loop(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: LayerSpec,
    metadata: list[int],
) -> torch.Tensor:
    """Attend causally in loops over requests, queries and heads; metadata is the requests' lengths."""
    assert k is not None
    assert v is not None
    out, group = q.new_empty(*q.shape[:2], v.shape[2]), q.shape[1] // k.shape[1]
    start = 0
    for length in metadata:
        for at in range(start, start + length):
            for head in range(q.shape[1]):
                keys = k[start : at + 1, head // group]
                weights = torch.softmax(keys @ q[at, head] * layer.scaling, 0)
                out[at, head] = weights @ v[start : at + 1, head // group]
        start += length
    return out


def load(path: Path) -> Any:
    """Load a model in float64, with experts that compute in float64."""
    model = models.load_checkpoint(
        path, dtype=torch.float64, device=torch.device("cpu"), attention=models.ATTENTION_NAME
    ).model
    model.set_experts_implementation("batched_mm")
    return model


def logits_of(model: models.TransformersModel, prompts: list[list[int]]) -> torch.Tensor:
    """Return the logits of each prompt's last token, all prompts in one batch."""
    lengths = [len(prompt) for prompt in prompts]
    lens = torch.tensor(lengths)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(prompts),
        input_ids=torch.tensor([token for prompt in prompts for token in prompt]),
        positions=torch.tensor([at for length in lengths for at in range(length)]),
        out_cache_loc=torch.zeros(sum(lengths), dtype=torch.int64),
        req_pool_indices=torch.zeros(len(prompts), dtype=torch.int64),
        seq_lens=lens,
        seq_lens_cpu=lens,
        extend_seq_lens=lens,
        extend_seq_lens_cpu=lens,
    )
    with torch.inference_mode():
        return model(batch, lengths, attend_in_a_loop).logits


def prompt_of(length: int, seed: int) -> list[int]:
    """Return random tokens."""
    ids = torch.randint(2, 199, (length,), generator=torch.Generator().manual_seed(seed))
    return list(ids.tolist())


@needs_seam
@pytest.mark.parametrize(
    "overrides", [{}, {"q_lora_rank": None}, {"rope_interleave": False}, {"rope_parameters": YARN}]
)
@pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v3"])
def test_absorbed_form_equals_transformers(
    architecture: str, overrides: dict[str, Any], checkpoint: Callable[..., Path]
) -> None:
    """In float64 the logits of the absorbed form equal those of transformers' own forward pass."""
    model = load(checkpoint(architecture, **overrides))
    absorbed = models.TransformersModel(model, absorb=True)
    prompt = prompt_of(21, 0)
    got = logits_of(absorbed, [prompt])
    model.set_attn_implementation("sdpa")  # its softmax stays in float64
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1:]
    assert want.abs().max() > 1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


@needs_seam
def test_layers_ask_for_latents_when_absorbed(checkpoint: Callable[..., Path]) -> None:
    """In the absorbed form all heads share one key, of latent and rotated part, with the model's scaling."""
    model = load(checkpoint("deepseek_v3"))
    scaling = 24**-0.5
    (expanded, _) = models.TransformersModel(model).layers
    assert expanded == LayerSpec(0, 4, 4, 24, 12, scaling)
    assert expanded.head_layout is HeadLayout.MHA
    absorbed = models.TransformersModel(model, absorb=True).layers
    assert absorbed == [LayerSpec(i, 4, 1, 32, 24, scaling, kv_lora_rank=24) for i in (0, 1)]
    assert {layer.head_layout for layer in absorbed} == {HeadLayout.MLA}


@needs_seam
def test_both_forms_of_one_model_stand_side_by_side(checkpoint: Callable[..., Path]) -> None:
    """Only the pass of an absorbed model attends over latents, even if it fails: others share its weights.

    A third model absorbs the same layers, and changes nothing of them.
    """
    model = load(checkpoint("deepseek_v2"))
    absorbed, expanded = (models.TransformersModel(model, absorb=a) for a in (True, False))
    prompts = [prompt_of(9, 1)]
    one, other = logits_of(absorbed, prompts), logits_of(expanded, prompts)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    with pytest.raises(IndexError):
        logits_of(absorbed, [[5, 10**6]])
    assert torch.equal(logits_of(expanded, prompts), other)
    classes = [type(module) for module in model.modules()]
    assert torch.equal(logits_of(models.TransformersModel(model, absorb=True), prompts), one)
    assert [type(module) for module in model.modules()] == classes
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        own = model(input_ids=torch.tensor(prompts), use_cache=False).logits[0, -1:]
    torch.testing.assert_close(own, other, rtol=0, atol=1e-9)


@needs_seam
def test_an_absorbed_model_is_freed_with_its_last_name(checkpoint: Callable[..., Path]) -> None:
    """The weights of an absorbed layer do not wait for the garbage collector: there is no reference cycle."""
    model = load(checkpoint("deepseek_v3"))
    weight = weakref.ref(model.model.layers[0].self_attn.kv_b_proj.weight)
    absorbed = models.TransformersModel(model, absorb=True)
    logits_of(absorbed, [prompt_of(3, 0)])
    gc.collect()
    gc.disable()
    try:
        del model, absorbed
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("architecture", "absorb"),
    [
        pytest.param("deepseek_v2", True, marks=needs_seam),
        pytest.param("deepseek_v3", True, marks=needs_seam),
        ("deepseek_v3", False),
    ],
)
def test_logits_do_not_depend_on_neighbours(
    architecture: str, *, absorb: bool, checkpoint: Callable[..., Path]
) -> None:
    """A request's logits are the same with any other request in its batch, and close to those without."""
    model = models.TransformersModel(load(checkpoint(architecture)), absorb=absorb)
    mine = prompt_of(11, 2)
    beside = [logits_of(model, [prompt_of(8, seed), mine])[1] for seed in (3, 4, 5)]
    assert torch.equal(beside[0], beside[1])
    assert torch.equal(beside[0], beside[2])
    # Routers compute in float32, whose rounding depends on the number of rows.
    torch.testing.assert_close(logits_of(model, [mine])[0], beside[0], rtol=0, atol=1e-4)


class FancyLinear(torch.nn.Linear):
    """A linear layer that may compute more than a product with its weight, as a quantized one does."""


class FancyTensor(torch.nn.Parameter):
    """A weight that may represent other values, as a quantized one does."""


@needs_seam
@pytest.mark.parametrize("what", ["bias", "FancyLinear", "FancyTensor"])
def test_what_cannot_be_absorbed_is_refused(what: str, checkpoint: Callable[..., Path]) -> None:
    """Only a plain linear layer without bias is absorbed; other layers still have the expanded form."""
    model = load(checkpoint("deepseek_v3"))
    module = model.model.layers[1].self_attn
    if what == "FancyTensor":
        module.kv_b_proj.weight = FancyTensor(module.kv_b_proj.weight.data)
    else:
        kind = FancyLinear if what == "FancyLinear" else torch.nn.Linear
        module.kv_b_proj = kind(24, 4 * 28, bias=what == "bias", dtype=torch.float64)
    with pytest.raises(UnsupportedModelError, match=f"kv_b_proj .* {what}") as caught:
        models.TransformersModel(model, absorb=True)
    assert "expanded" in str(caught.value.hint)
    assert models.TransformersModel(model).layers[1].kv_lora_rank is None


def test_an_older_transformers_is_named(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absorption without ``expand_kv`` in transformers is refused; the hint names a version with it."""
    model = load(checkpoint("deepseek_v3"))
    monkeypatch.delattr(DeepseekV3Attention, "expand_kv", raising=False)
    with pytest.raises(UnsupportedModelError, match=transformers.__version__) as caught:
        models.TransformersModel(model, absorb=True)
    assert "transformers>=5.15" in str(caught.value.hint)


def make_engine(path: Path, decode: str, prefill: str, *overrides: str) -> Engine:
    """Build an engine whose lanes have the backends of these names, and that verifies every replay."""
    config = EngineConfig.load(
        None,
        env={},
        overrides=[
            f'model.path="{path}"',
            'engine.device="cpu"',
            "engine.max_num_seqs=4",
            "verify.replay_against_eager=1.0",
            f'lanes.decode.attention_backend="{decode}"',
            f'lanes.prefill.attention_backend="{prefill}"',
            *overrides,
        ],
    )
    return Engine(config, catalog=Catalog(latents=Latents, versatile=Versatile, choosy=Choosy))


@needs_seam
@pytest.mark.parametrize("strict", ["false", "true"])
def test_an_engine_keeps_latents_where_every_lane_can(strict: str, checkpoint: Callable[..., Path]) -> None:
    """Absorbed and expanded engines give the same tokens; a layer caches 32 or 144 numbers per token."""
    path = checkpoint("deepseek_v3")
    prompts = [prompt_of(n, n) for n in (1, 17, 40, 5)]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    told = []
    for decode, prefill, width, widths in (
        ("latents", "versatile", 32, {(1, 32), (1, 24)}),
        ("versatile", "flashinfer", 144, {(4, 24), (4, 12)}),
    ):
        engine = make_engine(path, decode, prefill, f"lanes.decode.strict={strict}", "engine.num_pages=40")
        cache = engine.memory.kv_cache
        assert {tuple(t.shape[1:]) for t in (*cache.k, *cache.v)} == widths
        assert cache.nbytes == 2 * width * 4 * (40 + 1) * 16
        told.append([c.token_ids for c in engine.generate(prompts, params)])
        assert engine.lanes[0].stats.replays == engine.verifiers[0].verified > 5
    assert told[0] == told[1]


@needs_seam
def test_latents_buy_a_larger_cache(checkpoint: Callable[..., Path]) -> None:
    """The memory budget counts a latent once: the same memory holds 144 / 32 times as many pages."""
    path = checkpoint("deepseek_v3")
    pages = {}
    for name in ("versatile", "flashinfer"):
        tight = ("engine.kv_cache_memory_gib=1e-3", "engine.max_num_seqs=64")
        engine = make_engine(path, "versatile", name, *tight)
        pages[name] = engine.memory.pages.num_pages
        assert engine.memory.kv_cache.nbytes <= 1e-3 * 2**30
    assert (pages["versatile"] + 1) // (pages["flashinfer"] + 1) == 4


def test_lanes_that_disagree_are_named(checkpoint: Callable[..., Path]) -> None:
    """A backend for latents only is refused if another lane's has no MLA; the error names that lane."""
    path = checkpoint("deepseek_v3")
    for lanes, other in (
        (("latents", "flashinfer"), "prefill"),
        (("flashinfer", "latents"), "decode"),
    ):
        with pytest.raises(UnsupportedModelError, match="head layout mha") as caught:
            make_engine(path, *lanes)
        assert f"backend of lanes.{other}, 'flashinfer', has no MLA" in caught.value.message
        assert f'lanes.{other}.attention_backend = "latents"' in str(caught.value.hint)
    for model, decode, says in (
        ("llama", "latents", "head layout gqa"),
        ("deepseek_v3", "choosy", "page size 16"),
    ):  # these fail with any backend in the other lane
        with pytest.raises(UnsupportedModelError, match=says) as caught:
            make_engine(checkpoint(model), decode, "flashinfer")
        assert "has no MLA" not in str(caught.value)
