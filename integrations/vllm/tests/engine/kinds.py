"""Small random checkpoints of the kinds of models that vLLM serves on a CPU.

Does not: make models that vLLM has no class for, such as Bamba and BART.
"""

from pathlib import Path
from typing import Any

import torch
from model_sweep.small_models import VOCAB, save_small_model, small_config
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

# vLLM's own attention for a CPU takes heads of 32 numbers and more, and one width of latents, 576.
_HEAD = {"head_dim": 32}
_WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
_WINDOW = {"sliding_window": 16, **_HEAD}
_LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("qwen3", {"num_key_value_heads": 2, **_HEAD}),
    "windows": ("mistral", _WINDOW),
    "some windows": (
        "gemma3_text",
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], **_WINDOW},
    ),
    "windows and sinks": ("gpt_oss", _WINDOW),
    "moe": ("qwen3_moe", _HEAD),
    "mla": ("deepseek_v3", _LATENTS),
    "mamba2": ("falcon_h1", {**_WIDE_HEADS, **_HEAD}),
    "gdn": ("qwen3_next", {"linear_key_head_dim": 128, "linear_value_head_dim": 128, **_HEAD}),
    "convolutions": (
        "lfm2",
        {
            "num_hidden_layers": 2,
            "layer_types": ["conv", "full_attention"],
            "conv_dim": 64,
            "block_dim": 64,
            **_WIDE_HEADS,
        },
    ),
}
"""The model type of each kind, and its settings that differ from those of `model_sweep`."""


def save_kind(kind: str, path: Path) -> Path:
    """Write the checkpoint of one of `KINDS` to ``path``, and return it."""
    model_type, changed = KINDS[kind]
    save_small_model(path, small_config(model_type, **changed))
    return path


def save_whisper(path: Path) -> Path:
    """Write a checkpoint of Whisper for one second of audio to ``path``, and return it."""
    torch.manual_seed(0)
    sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 64)
    counts = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    config = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=16,
        max_source_positions=50,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **sizes,
        **counts,
        **heads,
    )
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and name != "model.encoder.embed_positions.weight":  # vLLM computes those
                parameter.normal_(0, 0.2)
    model.save_pretrained(path)
    tokenizer = WhisperTokenizer(vocab={f"<{token}>": token for token in range(VOCAB)}, merges=[])
    extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=1)
    WhisperProcessor(extractor, tokenizer).save_pretrained(path)
    return path
