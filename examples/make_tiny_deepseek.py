"""Write a tiny DeepSeek-V3 with random weights, as an example of MLA.

The model is not trained, so its text is noise. It shows that an MLA model loads and runs through captured
graphs in absorbed form, with the same tokens as transformers. A seed fixes the weights, so the file can be
reproduced. The byte tokenizer is that of ``tiny-llama``.

It needs only torch and transformers.

    python examples/make_tiny_deepseek.py
    graphpact generate --config examples/deepseek.toml "Return a " --max-new-tokens 20
"""

import shutil
from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GenerationConfig

MODELS = Path(__file__).parent / "models"
CONFIG = DeepseekV3Config(
    vocab_size=258,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=48,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    max_position_embeddings=1024,
    bos_token_id=256,
    eos_token_id=256,
    pad_token_id=257,
    tie_word_embeddings=False,
)


def main() -> None:
    """Write config, weights in bfloat16, and tokenizer to ``examples/models/tiny-deepseek``."""
    folder = MODELS / "tiny-deepseek"
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)  # large enough that no two logits are equal
    model.generation_config = GenerationConfig(bos_token_id=256, eos_token_id=256, pad_token_id=257)
    model.bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODELS / "tiny-llama" / name, folder / name)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{folder}: {count:,} parameters")


if __name__ == "__main__":
    main()
