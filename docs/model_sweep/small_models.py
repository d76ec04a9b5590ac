"""Small random models of any causal architecture: its default configuration, with every size shrunk by name.

Sizes are named alike in most configurations of transformers, so a table of name patterns shrinks them. What
the patterns cannot know, such as two sizes that must agree, is in `_SPECIAL`.

Does not: shrink what decides how a layer attends: kinds of layers, rotary embeddings, switches.
"""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ARCHITECTURES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Every model type that ``AutoModelForCausalLM`` knows."""

VOCAB = 199
MAX_POSITIONS = 128
_MAX_LAYERS = 8

# The first pattern that matches the whole name gives the largest allowed value.
_LIMITS = [
    (re.compile(pattern), limit)
    for pattern, limit in (
        (r".*vocab_size.*|.*_vocab", VOCAB),
        (r"max_position_embeddings|n_positions|n_ctx|max_(seq|sequence)_len(gth)?|context_length", MAX_POSITIONS),
        (r"max_(source|target)_positions|model_max_length", MAX_POSITIONS),
        (r"original_max_position_embeddings|floor_scale|log_scaling_n_floor", 16),
        (r"index_(topk|block_size|local_blocks|topk_blocks)|rel_extent", 4),
        (r".*(sliding_window|window_size|local_attention|chunk_size|chunk_length)(_size)?", 16),
        (r".*(num|n)_.*heads?|.*attention_heads|n_head|num_heads", 4),
        (r"topk_group", 1),
        (r".*experts_per_tok(en)?|moe_topk|moe_k|n_group|num_expert_group|(mamba_)?n_?groups", 2),
        (r".*experts|zero_expert_num", 4),
        (r"mamba_d_ssm", 128),
        (r"mamba_(d_head|head_dim|headdim)|attention_head_dim", 32),
        (r"(q|kv|o)_lora_rank|.*lowrank|.*_rank", 24),
        (r"qk_rope_head_dim|rotary_dim", 8),
        (r"qk_head_dim", 24),
        (r".*(head_dim|d_head|dim_head|d_kv|kv_channels|headdim|head_size)", 16),
        (r".*(hidden_size|d_model|n_embd|embedding_size|embed_dim|emb_dim|embedding_dim|proj_dim|dim_model.*)", 64),
        (r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|dff|dim_ff|n_inner|feed_forward_size)(_mlp)?", 96),
        (r".*(state_size|d_state|d_ssm|lru_width)", 16),
    )
]
_TOKENS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
_LAYER_COUNTS = re.compile(r"(num_(hidden_|decoder_|encoder_)?|n_|decoder_|encoder_)layers?|num_blocks")
_KV_HEADS = {
    "num_key_value_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "num_query_groups": "num_attention_heads",
}
_DECODER = {"is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": False}

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
    "gemma3n_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64},
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


def small_config(architecture: str) -> Any:
    """Return the default configuration of ``architecture``, made small, of a decoder."""
    cls = CONFIG_MAPPING[architecture]
    config = cls(**_shrunk(cls()))
    return config


def save_small_model(path: Path, architecture: str) -> None:
    """Write a small random model to ``path``. Its weights are large enough that no two logits tie."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(architecture), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(path)


def _shrunk(config: Any) -> dict[str, Any]:
    """Return the arguments that make a small configuration of the class of ``config``."""
    values = config.to_dict()
    special = _SPECIAL.get(config.model_type, {})
    parts = {name: getattr(config, name) for name in type(config).sub_configs}
    layers = _num_layers(values)
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name in special:
            continue
        if name in parts:
            if parts[name] is not None and not isinstance(parts[name], dict):
                made[name] = _shrunk(parts[name])
        elif name in _DECODER:
            made[name] = _DECODER[name]
        elif name in _TOKENS:
            made[name] = _TOKENS[name]
        elif isinstance(value, list) and value:
            made[name] = _shrunk_list(name, value, values, layers)
        elif isinstance(value, int) and not isinstance(value, bool):
            if _LAYER_COUNTS.fullmatch(name):
                made[name] = min(value, layers)
            elif name == "head_dim" and value == values.get("qk_rope_head_dim"):
                made[name] = 8
            elif name in _KV_HEADS:
                made[name] = 4 if value == values.get(_KV_HEADS[name]) else min(value, 2)
            else:
                limit = next((n for pattern, n in _LIMITS if pattern.fullmatch(name)), value)
                made[name] = min(value, limit)
    return {**made, **special}


def _num_layers(values: dict[str, Any]) -> int:
    """Return how many layers it takes to have one of each kind; at least two."""
    count = _layer_count(values)
    kinds = [v for v in values.values() if isinstance(v, list) and len(v) == count]
    needed = [max(v.index(kind) for kind in set(map(_hashable, v))) + 1 for v in kinds if all(isinstance(x, (str, int, float)) for x in v) and len(set(v)) < 5]
    return min(max([2, *needed]), _MAX_LAYERS)


def _hashable(value: Any) -> Any:
    return value


def _layer_count(values: dict[str, Any]) -> int:
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"):
        if isinstance(values.get(name), int):
            return int(values[name])
    return 0


def _shrunk_list(name: str, value: list[Any], values: dict[str, Any], layers: int) -> list[Any]:
    if len(value) == _layer_count(values):
        return value[:layers]
    if re.search("layer|idx", name) and all(isinstance(v, int) for v in value):
        return [v for v in value if v < layers]
    return value
