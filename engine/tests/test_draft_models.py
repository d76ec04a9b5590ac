"""Draft heads: what they compute, their checkpoints, and how many drafts of the shipped ones are accepted."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.nn import functional
from transformers import LlamaForCausalLM

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.errors import EngineError
from graphpact.speculation import HIDDEN_STATES
from graphpact.step import StepOutputs
from graphpact_engine import models
from graphpact_engine.errors import CheckpointError, UnsupportedModelError
from graphpact_engine.models.interface import attending
from graphpact_tape.tape import TapeDriver

CPU = torch.device("cpu")
EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = EXAMPLES / "models"
SHIPPED = ["tiny-llama-eagle", "tiny-llama-mtp"]
EAGLE, EAGLE3, MTP = "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3", "LlamaForCausalLMFrozenKvMtp"
HIDDEN, HEADS, KV_HEADS, DIM, VOCAB, WIDE, DRAFTED = 192, 6, 2, 32, 258, 40, 50

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """Return the training script, which has the attention of training and that of one request."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("train_draft_heads")
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def target() -> models.TransformersModel:
    """Return the shipped model."""
    path = MODELS / "tiny-llama"
    loaded = models.load_checkpoint(path, dtype=None, device=CPU, attention=models.ATTENTION_NAME)
    return models.TransformersModel(loaded.model)


@pytest.fixture(scope="module")
def eagle(target: models.TransformersModel) -> models.DraftModel:
    """Return the shipped EAGLE head."""
    return models.load_draft_model(MODELS / "tiny-llama-eagle", target=target)


def config(architecture: str, **more: Any) -> dict[str, Any]:
    """Return the config of a head as published heads have it."""
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
    } | more


def weights(architecture: str, *, bias: bool = False, embedding: bool = False) -> Weights:
    """Return random weights with the names of published heads."""
    layer = "midlayer" if architecture == EAGLE3 else "layers.0"
    wide = (2 if architecture == EAGLE3 else 1) * HIDDEN
    shapes = {
        "fc.weight": (HIDDEN, (3 if architecture == EAGLE3 else 2) * HIDDEN),
        f"{layer}.self_attn.q_proj.weight": (HEADS * DIM, wide),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * DIM, wide),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * DIM, wide),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{layer}.mlp.gate_proj.weight": (WIDE, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (WIDE, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, WIDE),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
    }
    if architecture == EAGLE3:
        shapes |= {f"{layer}.{name}.weight": (HIDDEN,) for name in ("hidden_norm", "input_layernorm")}
        shapes |= {"norm.weight": (HIDDEN,), "lm_head.weight": (DRAFTED, HIDDEN)}
    if architecture == MTP:
        for name in ("k_proj", "v_proj"):
            del shapes[f"{layer}.self_attn.{name}.weight"]
        shapes |= {f"{name}.weight": (HIDDEN,) for name in ("embed_norm", "hidden_norm", "norm")}
        shapes |= {f"{layer}.input_layernorm.weight": (HIDDEN,)}
    if bias:
        shapes["fc.bias"] = (HIDDEN,)
    if embedding:
        shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    generator = torch.Generator().manual_seed(5)
    made = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if architecture == EAGLE3:
        ids = torch.randperm(VOCAB, generator=generator)[:DRAFTED].sort().values
        made["d2t"] = ids - torch.arange(DRAFTED)
        made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, value=True)
    return made


def save(folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Path:
    """Write a checkpoint, and return its directory."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(weights), folder / "model.safetensors")
    return folder


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the RMS norm."""
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[T, heads, DIM]`` with rotary position embedding."""
    angles = positions[:, None] / 10000.0 ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return the output ``[T, heads * DIM]``: query ``t`` sees the keys ``seen[t]``."""
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / DIM**0.5
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)


def plain_head(
    w: Weights,
    embeds: torch.Tensor,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    frozen: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the language model head and the hidden states of a sequence, in plain torch."""
    three = "midlayer.hidden_norm.weight" in w
    layer = "midlayer" if three else "layers.0"
    if three:
        residual = hidden @ w["fc.weight"].T + w.get("fc.bias", 0)
        norms = w[f"{layer}.input_layernorm.weight"], w[f"{layer}.hidden_norm.weight"]
        x = torch.cat((rms(embeds, norms[0]), rms(residual, norms[1])), dim=-1)
    else:
        if frozen:
            embeds, hidden = rms(embeds, w["embed_norm.weight"]), rms(hidden, w["hidden_norm.weight"])
        x = residual = torch.cat((embeds, hidden), dim=-1) @ w["fc.weight"].T + w.get("fc.bias", 0)
        if frozen:
            x = rms(x, w[f"{layer}.input_layernorm.weight"])
    q, k, v = (
        (x @ w[name].T).view(len(x), -1, DIM) if name in w else None
        for name in (f"{layer}.self_attn.{part}_proj.weight" for part in "qkv")
    )
    q = rotated(q, positions)
    if frozen:
        k, v = frozen
        seen = torch.ones(len(q), len(k), dtype=torch.bool)
    else:
        k = rotated(k, positions)
        seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
    x = residual + attention(q, k, v, seen) @ w[f"{layer}.self_attn.o_proj.weight"].T
    y = rms(x, w[f"{layer}.post_attention_layernorm.weight"])
    gate, up, down = (w[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    x = x + (functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
    if "norm.weight" not in w:
        return x, x
    normed = rms(x, w["norm.weight"])
    return normed, (x if three else normed)


def batch_of(ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, **more: Any) -> ForwardBatch:
    """Return a draft decode of one request that selects all rows."""
    fields: dict[str, Any] = {
        "forward_mode": ForwardMode.DRAFT_DECODE,
        "batch_size": 1,
        "input_ids": ids,
        "positions": positions,
        "out_cache_loc": positions[:, None],
        "req_pool_indices": torch.ones(1, dtype=torch.int64),
        "seq_lens": torch.tensor([len(ids)]),
        "seq_lens_cpu": torch.tensor([len(ids)]),
        "extra": {HIDDEN_STATES: hidden},
    }
    return ForwardBatch(**fields | more)


def run(
    script: ModuleType, draft: models.DraftModel, batch: ForwardBatch, request: Any | None = None
) -> StepOutputs:
    """Return the outputs of a batch of one request, whose slots are positions."""
    if request is None:
        request = script.OneRequest([(torch.zeros(64, KV_HEADS, DIM),) * 2])
    request.positions = batch.positions
    with torch.inference_mode():
        return draft(batch, None, request.attend)


def inputs(width: int = HIDDEN, count: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, positions and hidden states of a sequence."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCAB, (count,), generator=generator)
    return ids, torch.arange(count), torch.randn(count, width, generator=generator)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("embedding", [False, True])
def test_a_published_eagle_head_is_the_function_of_its_papers(
    script: ModuleType,
    target: models.TransformersModel,
    tmp_path: Path,
    *,
    prefix: str,
    bias: bool,
    embedding: bool,
) -> None:
    """With or without a name prefix, a bias or its own embedding, logits equal those of plain torch."""
    w = weights(EAGLE, bias=bias, embedding=embedding)
    path = save(tmp_path / "head", config(EAGLE, bias=bias), {prefix + n: t for n, t in w.items()})
    draft = models.load_draft_model(path, target=target)
    (layer,) = draft.layers
    assert (layer.layer_id, layer.kv_layer, draft.has_own_kv, draft.target_layers) == (0, 5, True, (-1,))
    assert (draft.hidden_size, draft.target_hidden_size, draft.vocab_size) == (HIDDEN, HIDDEN, VOCAB)
    assert {name for name, _ in draft.named_weights()} >= set(w)
    ids, positions, hidden = inputs()
    outputs = run(script, draft, batch_of(ids, positions, hidden))
    head = target.model.lm_head.weight.detach()
    read, following = plain_head(w, w.get("embed_tokens.weight", head)[ids], hidden, positions)
    torch.testing.assert_close(outputs["hidden_states"], following, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outputs.logits, read @ head.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_an_eagle3_head_gives_logits_over_the_vocabulary_of_the_target(
    script: ModuleType, target: models.TransformersModel, tmp_path: Path, prefix: str
) -> None:
    """Tokens that the head does not draft have the logit -inf, others that of plain torch."""
    w = weights(EAGLE3)
    named = {name.replace("midlayer.", prefix): tensor for name, tensor in w.items()}
    ids_of = "eagle_aux_hidden_state_layer_ids"
    path = save(tmp_path / "head", config(EAGLE3, draft_vocab_size=DRAFTED, **{ids_of: [1, 2, 4]}), named)
    draft = models.load_draft_model(path, target=target)
    assert (draft.target_layers, draft.target_hidden_size) == ((1, 2, 4), 3 * HIDDEN)
    ids, positions, hidden = inputs(3 * HIDDEN)
    outputs = run(script, draft, batch_of(ids, positions, hidden))
    embeds = target.model.get_input_embeddings()(ids).detach()
    read, following = plain_head(w, embeds, hidden, positions)
    torch.testing.assert_close(outputs["hidden_states"], following, rtol=1e-4, atol=1e-4)
    drafted = torch.arange(DRAFTED) + w["d2t"]
    torch.testing.assert_close(outputs.logits[:, drafted], read @ w["lm_head.weight"].T, rtol=1e-4, atol=1e-4)
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, drafted, value=False)
    assert (outputs.logits[:, others] == -torch.inf).all()
    request = script.OneRequest([(torch.zeros(64, KV_HEADS, DIM),) * 2])
    run(script, draft, batch_of(ids, positions, hidden), request)
    after = run(script, draft, batch_of(ids[:1], positions[-1:] + 1, following[-1:]), request)
    assert after["hidden_states"].shape == (1, HIDDEN)  # its own hidden states are not three


def test_a_frozen_kv_head_reads_the_keys_of_a_target_layer(
    script: ModuleType, target: models.TransformersModel, tmp_path: Path
) -> None:
    """Every query sees only the keys of tokens that the target has read; the head adds no keys."""
    w = weights(MTP)
    path = save(tmp_path / "head", config(MTP, target_kv_layer=2), w)
    draft = models.load_draft_model(path, target=target)
    (layer,) = draft.layers
    assert (layer.layer_id, layer.kv_layer, draft.has_own_kv) == (0, 2, False)
    assert replace(target.layers[2], layer_id=0, kv_layer=2) == layer
    caches = [tuple(torch.randn(2, 20, KV_HEADS, DIM)) for _ in range(5)]
    request = script.OneRequest(caches, read=8)
    ids, positions, hidden = inputs(count=3)
    positions = positions + 8
    outputs = run(script, draft, batch_of(ids, positions, hidden), request)
    embeds = target.model.get_input_embeddings()(ids).detach()
    frozen = caches[2][0][:8], caches[2][1][:8]
    _, following = plain_head(w, embeds, hidden, positions, frozen)
    torch.testing.assert_close(outputs["hidden_states"], following, rtol=1e-4, atol=1e-4)
    assert not request.own


@pytest.mark.parametrize("name", SHIPPED)
def test_drafts_in_serving_are_those_of_training(
    script: ModuleType, target: models.TransformersModel, name: str
) -> None:
    """Three drafts of a chain have the hidden states of the runs that the head was trained with."""
    draft = models.load_draft_model(MODELS / name, target=target)
    plain = LlamaForCausalLM.from_pretrained(MODELS / "tiny-llama", dtype=torch.float32)
    text = torch.tensor(list(b"Return the name of the file that"))
    length, newest = len(text) - 1, 20
    with torch.inference_mode():
        given = plain.model(text[None], use_cache=True)
        states = given.last_hidden_state[0]
        cache = [
            (one.keys[0].transpose(0, 1), one.values[0].transpose(0, 1))
            for one in given.past_key_values.layers
        ]
        embeds = plain.model.embed_tokens(text[1:])
        frozen = (
            None
            if draft.has_own_kv
            else (
                given.past_key_values.layers[-1].keys[:, :, :-1],
                given.past_key_values.layers[-1].values[:, :, :-1],
            )
        )
        training = script.UnrolledAttention(1, frozen)
        shift = 0 if draft.has_own_kv else 1
        hidden, expected = states[:-1], []
        for step in range(3):
            training.step = step
            with attending(training):
                _, out = draft.head(embeds, hidden, torch.arange(length) + shift)
            expected.append(out[newest - 1 + step])
            hidden = functional.pad(out, (0, 0, 1, 0))[:-1]
    request = script.OneRequest(cache, read=newest)
    at = torch.arange(newest) if draft.has_own_kv else torch.tensor([newest - 1])
    hidden = run(script, draft, batch_of(text[at + 1], at + shift, states[at]), request)["hidden_states"][-1:]
    for step, wanted in enumerate(expected):
        torch.testing.assert_close(hidden[0], wanted, rtol=1e-3, atol=1e-3)
        after = torch.tensor([newest + step])
        hidden = run(script, draft, batch_of(text[after + 1], after + shift, hidden), request)[
            "hidden_states"
        ]


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_only_selected_rows_go_through_the_head(
    script: ModuleType, eagle: models.DraftModel, counts: list[int], data: st.DataObject
) -> None:
    """A ragged batch and a draft extend give the selected row of each request, by requests."""
    ids, positions, hidden = inputs(count=sum(counts))
    every = run(script, eagle, batch_of(ids, positions, hidden))
    assert set(every.axes.values()) == {"tokens"}
    lens = torch.tensor(counts)
    more: dict[str, Any] = {"batch_size": len(counts), "out_cache_loc": positions}
    ragged = batch_of(
        ids,
        positions,
        hidden,
        forward_mode=ForwardMode.EXTEND,
        extend_seq_lens=lens,
        extend_seq_lens_cpu=lens,
        **more,
    )
    some = run(script, eagle, ragged)
    assert set(some.axes.values()) == {"bs"}
    for output, whole in zip(some.values(), every.values(), strict=True):
        torch.testing.assert_close(output, whole[lens.cumsum(0) - 1], rtol=1e-4, atol=1e-4)
    width, requests = max(counts), len(counts)
    ids, positions, hidden = inputs(count=width * requests)
    right = torch.tensor([data.draw(st.integers(0, width - 1)) for _ in counts], dtype=torch.int32)
    every = run(script, eagle, batch_of(ids, positions, hidden))
    mode = {"forward_mode": ForwardMode.DRAFT_EXTEND, "num_correct_drafts": right}
    some = run(script, eagle, batch_of(ids, positions, hidden, **more | mode | {"out_cache_loc": positions}))
    assert set(some.axes.values()) == {"bs"}
    for output, whole in zip(some.values(), every.values(), strict=True):
        wanted = whole[torch.arange(requests) * width + right]
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", [EAGLE, EAGLE3, MTP])
def test_a_graph_of_a_draft_follows_its_inputs(
    target: models.TransformersModel, tmp_path: Path, architecture: str
) -> None:
    """A captured draft extend, replayed on other inputs, gives the outputs of an eager one."""
    more = {"draft_vocab_size": DRAFTED} if architecture == EAGLE3 else {}
    path = save(tmp_path / "head", config(architecture, **more), weights(architecture))
    draft = models.load_draft_model(path, target=target)
    ids, positions, hidden = inputs(draft.target_hidden_size, count=6)
    batch = batch_of(
        ids,
        positions,
        hidden,
        forward_mode=ForwardMode.DRAFT_EXTEND,
        batch_size=2,
        out_cache_loc=positions,
        num_correct_drafts=torch.tensor([0, 2], dtype=torch.int32),
    )

    def attend(q: torch.Tensor, *_: Any) -> torch.Tensor:
        return q * 2

    with torch.inference_mode():
        graph = TapeDriver(CPU, strict=True).capture(lambda: draft(batch, None, attend))
        ids.copy_(ids.flip(0))
        positions.add_(3)
        hidden.neg_()
        batch.num_correct_drafts.copy_(torch.tensor([1, 0]))
        graph.replay()
        expected = draft(batch, None, attend)
        for name, wanted in expected.items():
            torch.testing.assert_close(graph.outputs[name], wanted)


def refused(
    tmp_path: Path,
    target: models.TransformersModel,
    error: type[Exception],
    match: str,
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Load a checkpoint that is refused with ``match``."""
    with pytest.raises(error, match=match):
        models.load_draft_model(save(tmp_path / "head", config, weights), target=target)


@pytest.mark.parametrize(
    ("architecture", "changes", "error", "match"),
    [
        (EAGLE, {"vocab_size": 300}, CheckpointError, "vocab_size 300; the target's is 258"),
        (EAGLE, {"hidden_size": 96}, CheckpointError, "hidden_size 96; the target's is 192"),
        (EAGLE3, {"target_hidden_size": 64}, CheckpointError, "target_hidden_size 64; the target's is 192"),
        (EAGLE, {"architectures": ["GPT2LMHeadModel"]}, UnsupportedModelError, f"GPT2.*one of {EAGLE}"),
        (EAGLE, {"architectures": None}, UnsupportedModelError, "architectures None"),
        (EAGLE, {"model_type": "gpt2"}, UnsupportedModelError, "model_type 'gpt2'"),
        (EAGLE, {"num_hidden_layers": 2}, CheckpointError, r"missing keys layers\.1\."),
        (EAGLE, {"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers is 0"),
        (EAGLE, {"num_hidden_layers": 10**9}, CheckpointError, "the weights have 9 tensors"),
        (EAGLE, {"intermediate_size": 41}, CheckpointError, "mismatched keys"),
        (EAGLE, {"rms_norm_eps": -1.0}, CheckpointError, "rms_norm_eps"),
        (EAGLE, {"max_position_embeddings": 0}, CheckpointError, "max_position_embeddings"),
        (EAGLE, {"draft_vocab_size": 7}, CheckpointError, "draft_vocab_size is 7 of 258"),
        (MTP, {"target_kv_layer": 5}, CheckpointError, "target_kv_layer is 5; the target has layers 0 to 4"),
        (MTP, {"target_kv_layer": -1}, CheckpointError, "target_kv_layer is -1"),
        (MTP, {"target_kv_layer": True}, CheckpointError, "target_kv_layer is True"),
        (MTP, {"num_attention_heads": 12}, CheckpointError, r"\(12, 16, .* layer 4 of the target"),
        (MTP, {"rope_theta": 1e6}, CheckpointError, "1000000.0.* layer 4 of the target"),
        (EAGLE3, {"draft_vocab_size": 60}, CheckpointError, "each of 60 rows"),
        (EAGLE3, {"num_hidden_layers": 2}, UnsupportedModelError, "has 2 layers"),
        (EAGLE3, {"norm_before_residual": True}, UnsupportedModelError, "norm_before_residual"),
        (EAGLE3, {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, CheckpointError, "from 0 to 5"),
        (EAGLE3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, CheckpointError, "states 3"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    target: models.TransformersModel,
    tmp_path: Path,
    architecture: str,
    changes: dict[str, Any],
    error: type[Exception],
    match: str,
) -> None:
    """A head for another target, or of another form, is refused with both numbers."""
    given = config(architecture, **{"draft_vocab_size": DRAFTED} if architecture == EAGLE3 else {})
    refused(tmp_path, target, error, match, given | changes, weights(architecture))


@pytest.mark.parametrize(
    ("architecture", "change", "match"),
    [
        (EAGLE, lambda w: w | {"layers.0.input_layernorm.weight": torch.ones(HIDDEN)}, "unexpected keys"),
        (EAGLE, lambda w: w | {"model.fc.weight": w["fc.weight"].clone()}, "two tensors for 'fc.weight'"),
        (EAGLE, lambda w: w | {"fc.weight": w["fc.weight"].int()}, "is I32"),
        (EAGLE, lambda w: w | {"fc.weight": w["fc.weight"] / 0}, "NaN or infinite"),
        (EAGLE, lambda w: {n: t for n, t in w.items() if n != "fc.weight"}, "missing keys fc.weight"),
        (EAGLE3, lambda w: w | {"d2t": w["d2t"] - 300}, "a different token id"),
        (EAGLE3, lambda w: w | {"d2t": -torch.arange(DRAFTED)}, "a different token id"),
        (EAGLE3, lambda w: w | {"d2t": w["d2t"].float()}, "d2t is F32"),
        (EAGLE3, lambda w: {n: t for n, t in w.items() if n != "d2t"}, "no d2t"),
        (EAGLE3, lambda w: {n: t for n, t in w.items() if n != "lm_head.weight"}, "no lm_head.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    target: models.TransformersModel,
    tmp_path: Path,
    architecture: str,
    change: Callable[[Weights], Weights],
    match: str,
) -> None:
    """Wrong names, shapes, dtypes and values are refused by name."""
    more = {"draft_vocab_size": DRAFTED} if architecture == EAGLE3 else {}
    refused(
        tmp_path, target, CheckpointError, match, config(architecture, **more), change(weights(architecture))
    )


def test_a_published_pickle_is_refused_with_the_way_to_convert_it(
    target: models.TransformersModel, tmp_path: Path
) -> None:
    """The weights of ``pytorch_model.bin`` are not read."""
    path = save(tmp_path / "head", config(EAGLE), weights(EAGLE))
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle") as caught:
        models.load_draft_model(path, target=target)
    assert "safetensors.torch.save_file" in (caught.value.hint or "")


def test_a_batch_without_hidden_states_is_refused(eagle: models.DraftModel) -> None:
    """The error names the field that a runner forgot."""
    ids, positions, hidden = inputs()
    with pytest.raises(EngineError, match=r"draft\.hidden_states"):
        eagle(batch_of(ids, positions, hidden, extra={}), None, lambda *_: hidden)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_head_is_small_and_worth_its_steps(
    script: ModuleType, target: models.TransformersModel, name: str
) -> None:
    """Three greedy steps of a chain give at least 2.0 tokens a verification, on prompts of the examples."""
    files = list((MODELS / name).iterdir())
    assert {file.suffix for file in files} == {".json", ".safetensors", ".md"}
    assert sum(file.stat().st_size for file in files) <= 2_000_000
    draft = models.load_draft_model(MODELS / name, target=target)
    plain = LlamaForCausalLM.from_pretrained(MODELS / "tiny-llama", dtype=torch.float32)
    total = script.Acceptance(3)
    for prompt in script.read_prompts(EXAMPLES / "prompts.txt")[:3]:
        text = script.greedy(plain, prompt, 64)
        total.accepted += script.accepted_drafts(plain, draft, text, len(prompt), 3)
    assert total.tokens >= 2.0, str(total)
