"""Small random checkpoints of the kinds of models that vLLM serves on a CPU.

Does not: make models that vLLM has no class for, such as Bamba and BART.
"""

from pathlib import Path
from typing import Any

from model_sweep.small_models import save_small_model, small_config

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
