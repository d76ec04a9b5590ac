"""The model of the benchmarks: a Llama with random weights over bytes, 128 wide.

Does not: measure anything.
"""

from pathlib import Path

import torch
import transformers

VOCAB = 256


def save_model(path: Path, layers: int, max_position_embeddings: int) -> None:
    """Write a checkpoint with random weights, large enough that no two logits are close."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(path)
