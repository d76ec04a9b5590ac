"""Small random models of any causal architecture: its default configuration with every size reduced.

Most configurations of transformers use similar names for sizes, so a table of name patterns reduces them.
`_SPECIAL` has the other settings, such as missing defaults.

Does not: change settings that decide how a layer attends: kinds of layers, rotary embeddings, switches.
"""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 199
MAX_POSITIONS = 128
_MAX_LAYERS = 8
_HEADS, _KV_HEADS = 4, 2

_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {**_LINEAR, "rope_type": "yarn", "original_max_position_embeddings": 32}
_LLAMA3 = {
    **_YARN,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
}
_FULL = {"layer_types": ["full_attention"] * 4}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert, an encoder": ("bert", {"is_decoder": False}),
    "gemma3_text, bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}),
    "llama, dynamic rope": ("llama", {"rope_parameters": {**_LINEAR, "rope_type": "dynamic"}}),
    "llama, linear rope": ("llama", {"rope_parameters": _LINEAR}),
    "llama, llama3 rope": ("llama", {"rope_parameters": _LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": _YARN}),
    "llama4_text, full attention": ("llama4_text", _FULL),
    "llama4_text, full attention, untuned": (
        "llama4_text",
        {**_FULL, "attn_temperature_tuning": False},
    ),
    "phi3, longrope": ("phi3", {"rope_parameters": _LONG}),
    "phimoe, sliding window": ("phimoe", {"sliding_window": 16}),
    "qwen2, sliding window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
}
"""Variants of architectures by name: settings other than the defaults that change how a layer attends."""

CASES = (*sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]),)
"""Every model type of ``AutoModelForCausalLM``, and the variants."""

# The first pattern that matches the whole name gives the maximum of the setting.
_LIMITS = tuple(
    (re.compile(pattern), limit)
    for pattern, limit in (
        (r".*vocab_size.*|.*_vocab", VOCAB),
        (r"max_position_embeddings|n_positions|n_ctx|context_length", MAX_POSITIONS),
        (r"max_(seq|sequence)_len(gth)?", MAX_POSITIONS),
        (r"max_(source|target)_positions|model_max_length", MAX_POSITIONS),
        (r"original_max_position_embeddings|floor_scale|log_scaling_n_floor", 16),
        (r"index_(topk|block_size|local_blocks|topk_blocks)|rel_extent", 4),
        (r".*(sliding_window|window_size|local_attention|chunk_size|chunk_length)(_size)?", 16),
        (r"mamba_(d_head|head_dim|headdim)|attention_head_dim", 32),
        (r".*(num|n)_.*heads?|.*attention_heads|n_head|num_heads", _HEADS),
        (r"topk_group", 1),
        (r".*experts_per_tok(en)?|moe_topk|moe_k|n_group|num_expert_group|(mamba_)?n_?groups", 2),
        (r".*experts|zero_expert_num", 4),
        (r"mamba_d_ssm", 128),
        (r".*(state_size|d_state|lru_width)", 16),
        (r"(q|kv|o)_lora_rank|.*lowrank|.*_rank", 24),
        (r"qk_rope_head_dim|rotary_dim", 8),
        (r"qk_head_dim", 24),
        (r".*(head_dim|d_head|dim_head|d_kv|kv_channels|headdim|head_size)", 16),
        (r".*(hidden_size|d_model|n_embd|embedding_size|(embed|emb|embedding)_dim|proj_dim)", 64),
        (r"dim_model.*|hidden_size_per_layer_input", 64),
        (r".*(intermediate_size|ffn_dim|ffn_hidden_size|feed_forward_size)(_mlp)?", 96),
        (r"d_ff|dff|dim_ff|n_inner", 96),
    )
)
_TOKENS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
_LAYER_COUNTS = re.compile(r"(num_(hidden_|decoder_|encoder_)?|n_|decoder_|encoder_)layers?|num_blocks")
# If keys and queries have equally many heads in the large model, they also do in the small one.
_HEADS_OF_KEYS = {
    "num_key_value_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "num_query_groups": "num_attention_heads",
}
_DECODER = {"is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": False}

# By the model type of a configuration or of a part of it.
_SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
    },
    "dots1": {
        "moe_intermediate_size": 96,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "falcon_h1": {"mamba_d_ssm": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 32},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 16]},
    "xmod": {"default_language": "en_XX"},
}


def small_config(case: str, **changed: Any) -> Any:
    """Return the configuration of a small decoder.

    Args:
        case: One of `CASES`.
        changed: Settings that differ.
    """
    architecture, settings = VARIANTS.get(case, (case, {}))
    cls = CONFIG_MAPPING[architecture]
    return cls(**{**_shrunk(cls(), settings.get("layer_types")), **settings, **changed})


def save_small_model(path: Path, config: Any) -> None:
    """Write a random model of ``config`` to ``path``. Its weights are large: no two logits tie."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:  # norms, biases and sinks keep their scale and lose their symmetry
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(path)


def _shrunk(config: Any, kinds: list[str] | None = None) -> dict[str, Any]:
    """Return the arguments that make a small configuration of the class of ``config``."""
    values, parts = config.to_dict(), set(type(config).sub_configs)
    count = _layer_count(values)
    layers = len(kinds) if kinds else _num_layers(values, count)
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name in parts:
            part = getattr(config, name)
            if part is not None and not isinstance(part, dict):
                made[name] = _shrunk(part)
        elif isinstance(value, list) and len(value) == count:
            made[name] = [_limited(name, item) for item in value[:layers]]
        elif isinstance(value, list) and re.search("layer|idx", name):  # numbers of layers
            made[name] = [item for item in value if not isinstance(item, int) or item < layers]
        elif _LAYER_COUNTS.fullmatch(name):
            made[name] = min(value, layers) if isinstance(value, int) else value
        elif (small := _small(name, value, values)) is not value:
            made[name] = small
    common = {k: v for k, v in {**_DECODER, **_TOKENS}.items() if k in values}
    return {**made, **common, **_SPECIAL.get(config.model_type, {})}


def _small(name: str, value: Any, values: dict[str, Any]) -> Any:
    """Return a setting of a small model; ``values`` are all settings of the large one."""
    if name == "head_dim" and value == values.get("qk_rope_head_dim"):
        return _limited("qk_rope_head_dim", value)
    if name in _HEADS_OF_KEYS and value is not None:
        many = value == values.get(_HEADS_OF_KEYS[name])
        return _HEADS if many else min(value, _KV_HEADS)
    return _limited(name, value)


def _limited(name: str, value: Any) -> Any:
    """Return ``value``, or the maximum for its name if it is a larger whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    limit = next((limit for pattern, limit in _LIMITS if pattern.fullmatch(name)), value)
    return min(value, limit)


def _layer_count(values: dict[str, Any]) -> int:
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
    return next((values[name] for name in names if isinstance(values.get(name), int)), 0)


def _num_layers(values: dict[str, Any], count: int) -> int:
    """Return the number of layers needed to include each kind: at least two, at most `_MAX_LAYERS`."""
    needed = [2]
    for value in values.values():
        if isinstance(value, list) and len(value) == count:
            needed += [value.index(kind) + 1 for kind in value if isinstance(kind, str | int)]
    return min(max(needed), _MAX_LAYERS)
