"""Layers of experts on a CPU, in a form that can be recorded.

SGLang's own form for a CPU reads on the host how many tokens each expert has, which no graph can. Here every
expert computes all tokens, and takes those that chose it. A token without an expert, with the index -1, gets
zeros: SGLang marks so the padding tokens, and the tokens of other ranks.

Does not: run fast, or quantized; a bias or another activation than SiLU is refused.
"""

from typing import Any

import torch
from torch.nn import functional

from graphpact.errors import ConfigError

KERNEL = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
"""The function of SGLang's for a CPU."""


def moe_forward_native(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
    """Return what the experts give for their tokens.

    Args:
        layer: SGLang's ``FusedMoE``, with ``w13_weight`` ``[experts, 2 * inner, hidden]`` and ``w2_weight``
            ``[experts, hidden, inner]``.
        x: ``[T, hidden]``.
        topk_output: Weights ``[T, top_k]`` float, and experts ``[T, top_k]`` int; -1 for none.
        config: SGLang's ``MoeRunnerConfig``.

    Returns:
        ``[T, hidden]``, with the dtype of ``x``.

    Raises:
        ConfigError: The layer has what is not served.
    """
    lacking = [
        name for name in ("w13_weight_bias", "w2_weight_bias") if getattr(layer, name, None) is not None
    ]
    if config.activation != "silu" or config.gemm1_alpha is not None or config.apply_router_weight_on_input:
        lacking.append(f"activation {config.activation!r} with its options")
    if lacking:
        raise ConfigError(
            f"experts on the tape have no {', '.join(lacking)}",
            hint="run a model with SiLU experts without bias, or the engine without GRAPHPACT=tape",
        )
    weights, experts, *_ = topk_output
    result = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for number, (gate_and_up, down) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
        gate, up = functional.linear(x, gate_and_up).chunk(2, dim=-1)
        share = (weights * (experts == number)).sum(dim=1, keepdim=True)
        result += functional.linear(functional.silu(gate) * up, down) * share
    return result.to(x.dtype)
