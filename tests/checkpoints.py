"""Small random checkpoints of many architectures, written with ``save_pretrained``, and draft heads for them.

Does not: cache them; the fixture ``checkpoint`` of ``conftest.py`` does that.
"""

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it has to be set before transformers is imported

import pytest
import safetensors.torch
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

transformers.utils.logging.disable_progress_bar()

needs_seam = pytest.mark.skipif(
    not hasattr(DeepseekV3Attention, "expand_kv"),
    reason=f"transformers {transformers.__version__} has no expand_kv; 5.15 has",
)
"""Skips tests of absorbed MLA with older versions of transformers, which have no hook for it."""

VOCAB = 199

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# Latent attention, one dense layer and one with experts; all widths differ.
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "phi3": ("Phi3Config", {}),
    # Two sliding-window layers and two full ones; the soft cap is low enough to change the results.
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": 16,
            "num_hidden_layers": 4,
            "attn_logit_softcapping": 1.0,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "head_dim": 16, "moe_intermediate_size": 32}),
    "olmoe": ("OlmoeConfig", _EXPERTS),
    "gpt_oss": ("GptOssConfig", {"head_dim": 16, "sliding_window": 16, "num_local_experts": 4}),
    "deepseek_v2": ("DeepseekV2Config", {**_MLA, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3Config", _MLA),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", {}),
    "llama4": ("Llama4TextConfig", {"attention_chunk_size": 16, "num_local_experts": 2}),
    "longrope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
        },
    ),
    "dynamic_rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    # Equally many decoder and encoder layers; the model computes positions itself and ignores position_ids.
    "bart": (
        "BartConfig",
        {
            "d_model": 64,
            "decoder_layers": 2,
            "encoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 96,
            "is_encoder_decoder": False,
            "is_decoder": True,
        },
    ),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    # This model reads the number of tokens of each expert on the host.
    "jetmoe": ("JetMoeConfig", {"kv_channels": 16, "num_local_experts": 4}),
    # This model applies its window only in the mask.
    "phimoe": ("PhimoeConfig", {"sliding_window": 16, "num_local_experts": 4}),
    "mpt": ("MptConfig", {"d_model": 64, "n_layers": 2, "n_heads": 4}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
}


def save_random_checkpoint(path: Path, architecture: str, **overrides: Any) -> Path:
    """Write a small random model to ``path``; its weights are large enough that no two logits tie."""
    config_name, special = ARCHITECTURES[architecture]
    config = getattr(transformers, config_name)(**{**_COMMON, **special, **overrides})
    torch.manual_seed(len(architecture))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(path)
    return path


def save_random_draft(path: Path, target: Path, architecture: str, **overrides: Any) -> Path:
    """Write a small random draft head for the model at ``target`` to ``path``."""
    from graphpact_engine.models import draft_heads

    theirs = json.loads((target / "config.json").read_text())
    keys = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "rope_parameters")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    raw = {key: theirs[key] for key in keys if key in theirs} | heads | overrides
    raw |= {"architectures": [architecture], "model_type": "llama", "num_hidden_layers": 1}
    if "Eagle3" in architecture:  # a target with two layers cannot have three different auxiliary layers
        raw["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    torch.manual_seed(len(architecture))
    config = transformers.LlamaConfig.from_dict({**raw, "attn_implementation": "graphpact"})
    head = getattr(draft_heads, architecture)(config)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    weights = {name: torch.randn_like(weight) * 0.2 for name, weight in head.state_dict().items()}
    safetensors.torch.save_file(weights, path / "model.safetensors")
    return path
