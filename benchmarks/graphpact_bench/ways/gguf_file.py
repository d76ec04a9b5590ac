"""`write_gguf`: a Llama of transformers as a GGUF file, in the dtype of a way.

llama.cpp rotates neighbouring pairs of a head, transformers the two halves. So the rows of the weights of
queries and keys are put in llama.cpp's order.

Does not: quantize, or write a tokenizer: llama.cpp reads and writes token ids.
"""

from pathlib import Path
from typing import Any

import torch

from graphpact_bench.ways.base import WaySetting

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(file: Path, model: Any, setting: WaySetting) -> None:
    """Write the weights and sizes of a Llama to a GGUF file.

    Args:
        file: The file.
        model: A `transformers.LlamaForCausalLM`, in float32 or bfloat16.
        setting: The sizes of the model, and the dtype of its matrices in the file; norms are float32.
    """
    import gguf  # noqa: PLC0415  an extra

    shape, config = setting.shape, model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("none")
    bfloat16 = gguf.GGMLQuantizationType.BF16
    for name, weight in model.state_dict().items():
        weight = weight.detach().cpu()  # noqa: PLW2901  the same weight
        heads = shape.heads if "q_proj" in name else shape.kv_heads if "k_proj" in name else None
        if heads is not None:
            weight = in_pairs(weight, heads)  # noqa: PLW2901  the same rows
        if setting.dtype == "bfloat16" and weight.dim() > 1:
            bits = weight.bfloat16().contiguous().view(torch.uint8).numpy()
            writer.add_tensor(gguf_name(name), bits, raw_dtype=bfloat16)
        else:
            writer.add_tensor(gguf_name(name), weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return what GGUF calls the weight ``name`` of a Llama of transformers."""
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, *parts, kind = name.split(".")
    return f"blk.{layer}.{_OF_LAYERS['.'.join(parts)]}.{kind}"


def in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of a query or key weight so that the pairs of a rotation are neighbours.

    Args:
        weight: ``[heads * head_dim, width]``; row ``i`` of a head rotates with row ``i + head_dim / 2``.
        heads: The heads of the weight.
    """
    rows, width = weight.shape
    halves = weight.view(heads, 2, rows // heads // 2, width)
    return halves.transpose(1, 2).reshape(rows, width)
