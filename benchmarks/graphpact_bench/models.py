"""The models that are measured: Llamas with random weights, of chosen widths and depths.

The weights have so large a deviation that no two logits are close: ways that round differently choose the
same tokens. A matrix multiplies the deviation of its input by about 2.3, whatever the width.

Does not: measure anything, or train.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from graphpact.errors import UsageError, did_you_mean

_DEVIATION, _WIDTH = 0.2, 128  # of the weights of a model of this width


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama.

    Args:
        width: The hidden size.
        layers: The number of layers.
        heads: Query heads of a layer.
        kv_heads: Key and value heads of a layer.
        intermediate: The width of the MLP.
        vocab: The number of tokens.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 256

    def __str__(self) -> str:
        return f"{self.width}x{self.layers}"


BYTES = ModelShape(width=128, layers=4, heads=4, kv_heads=4, intermediate=344)
"""The model of the documented tables: 4 layers, 128 wide, over 256 byte tokens."""

PRESETS: Mapping[str, ModelShape] = {
    "128x4": BYTES,
    "256x4": ModelShape(width=256, layers=4, heads=4, kv_heads=4, intermediate=688),
    "576x30": ModelShape(width=576, layers=30, heads=9, kv_heads=3, intermediate=1536, vocab=49152),
    "1024x8": ModelShape(width=1024, layers=8, heads=16, kv_heads=8, intermediate=2752),
    "2048x4": ModelShape(width=2048, layers=4, heads=32, kv_heads=8, intermediate=5504),
}
"""Shapes by name. ``576x30`` has 135 million parameters."""


def parse_shape(text: str) -> ModelShape:
    """Return the shape that ``text`` names.

    Args:
        text: ``WIDTHxLAYERS``, which may be the name of a preset; ``:key=value,...`` after it changes fields:
            ``768x12:heads=12,vocab=32000``. Without a preset: heads of 64 (of 32 below a width of 256), as
            many key and value heads, an MLP of 8/3 of the width, 256 tokens.

    Raises:
        UsageError: It is not a shape, a field is unknown, or the heads do not divide the width.
    """
    name, _, changes = text.partition(":")
    width_text, _, layers_text = name.partition("x")
    if not (width_text.isdecimal() and layers_text.isdecimal()):
        raise UsageError(f"{text!r} is not a shape of a model", hint="write WIDTHxLAYERS, such as 576x30")
    width, layers = int(width_text), int(layers_text)
    heads = max(width // (64 if width >= 256 else 32), 1)
    shape = PRESETS.get(name) or ModelShape(width, layers, heads, heads, 8 * (width // 3) or 8)
    known = [field.name for field in fields(ModelShape)]
    given: dict[str, int] = {}
    for change in changes.split(",") if changes else ():
        key, _, value = change.partition("=")
        if key not in known or not value.isdecimal():
            near = did_you_mean(key, known)
            raise UsageError(
                f"{text!r}: {change!r} is not FIELD=NUMBER; the fields are {', '.join(known)}",
                hint=f"did you mean {near}?" if near and near != key else None,
            )
        given[key] = int(value)
    if "heads" in given:
        given.setdefault("kv_heads", given["heads"])
    shape = replace(shape, **given)
    _require_possible(text, shape)
    return shape


def _require_possible(text: str, shape: ModelShape) -> None:
    sizes = [getattr(shape, field.name) for field in fields(ModelShape)]
    if min(sizes) < 1 or shape.width % (2 * shape.heads) or shape.heads % shape.kv_heads:
        raise UsageError(
            f"{text!r}: {shape.heads} heads and {shape.kv_heads} KV heads do not divide a width of"
            f" {shape.width}",
            hint="heads of an even size, and a multiple of the KV heads",
        )


def save_model(path: Path, shape: ModelShape, max_position_embeddings: int) -> None:
    """Write a checkpoint in float32 with the weights of a fixed seed.

    Args:
        path: The folder.
        shape: The sizes of the model.
        max_position_embeddings: The longest sequence.
    """
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    _save(path, transformers.LlamaForCausalLM(config), shape.width)


def save_latent_model(path: Path, layers: int, max_position_embeddings: int) -> None:
    """Write a checkpoint with latent attention (MLA), the attention of DeepSeek-V3, without experts.

    Args:
        path: The folder.
        layers: The number of layers.
        max_position_embeddings: The longest sequence.
    """
    config = transformers.DeepseekV3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    _save(path, transformers.DeepseekV3ForCausalLM(config), 128)


def _save(path: Path, model: Any, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    deviation = _DEVIATION * (_WIDTH / width) ** 0.5
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, deviation, generator=generator)
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(path)


def random_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Return ``count`` prompts of ``length`` random tokens; the same for the same count."""
    generator = torch.Generator().manual_seed(count)
    prompts: list[list[int]] = torch.randint(vocab, (count, length), generator=generator).tolist()
    return prompts
