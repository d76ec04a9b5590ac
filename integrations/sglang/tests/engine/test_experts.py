"""Layers of experts in the form that a tape can record, beside SGLang's own form for a CPU."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native as sglang_form

from graphpact.errors import ConfigError
from graphpact_sglang.tape.experts import moe_forward_native

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 9, 16, 12, 4, 2
CONFIG = SimpleNamespace(
    activation="silu", gemm1_alpha=None, gemm1_clamp_limit=None, apply_router_weight_on_input=False
)


def _layer() -> SimpleNamespace:
    torch.manual_seed(0)
    return SimpleNamespace(
        num_experts=EXPERTS,
        w13_weight=torch.randn(EXPERTS, 2 * INNER, HIDDEN),
        w2_weight=torch.randn(EXPERTS, HIDDEN, INNER),
    )


def _routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = torch.rand(TOKENS, EXPERTS)
    weights, experts = scores.topk(TOP_K)
    return weights, experts, scores


def test_experts_give_what_sglang_gives() -> None:
    """Every token gets the weighted sum of its experts."""
    layer, routed, x = _layer(), _routed(), torch.randn(TOKENS, HIDDEN)
    expected = sglang_form(layer, x, routed, CONFIG)
    torch.testing.assert_close(moe_forward_native(layer, x, routed, CONFIG), expected)


def test_a_token_without_an_expert_gets_zeros() -> None:
    """Padding tokens, which SGLang marks with -1, add nothing, and other tokens keep their results."""
    layer, (weights, experts, scores), x = _layer(), _routed(), torch.randn(TOKENS, HIDDEN)
    right = moe_forward_native(layer, x, (weights, experts, scores), CONFIG)
    experts[5:] = -1
    masked = moe_forward_native(layer, x, (weights, experts, scores), CONFIG)
    assert not masked[5:].any()
    torch.testing.assert_close(masked[:5], right[:5])


def test_what_experts_lack_is_refused() -> None:
    """A bias or another activation is named, instead of left out."""
    layer, routed, x = _layer(), _routed(), torch.randn(TOKENS, HIDDEN)
    layer.w2_weight_bias = torch.zeros(EXPERTS, HIDDEN)
    with pytest.raises(ConfigError, match="w2_weight_bias"):
        moe_forward_native(layer, x, routed, CONFIG)
    with pytest.raises(ConfigError, match="gelu"):
        moe_forward_native(_layer(), x, routed, SimpleNamespace(**vars(CONFIG) | {"activation": "gelu"}))
