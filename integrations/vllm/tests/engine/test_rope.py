"""The kernel of RoPE of vLLM for CPUs, which graphpact switches off, see `graphpact_vllm.arguments`."""

import torch
from vllm import _custom_ops
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

HEADS, WIDTH, TOKENS = 4, 64, 5
ANGLES = torch.arange(128)[:, None] / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
COSINES = torch.cat([ANGLES.cos(), ANGLES.sin()], dim=-1)
POSITIONS = torch.arange(3, 3 + TOKENS)


def by_torch(query: torch.Tensor) -> torch.Tensor:
    """Return queries that vLLM's own torch code rotates."""
    return RotaryEmbedding.forward_static(POSITIONS, query, None, WIDTH, WIDTH, COSINES, is_neox_style=True)[
        0
    ]


def by_kernel(query: torch.Tensor) -> torch.Tensor:
    """Return queries that vLLM's kernel for CPUs rotates."""
    rotated = query.clone()
    _custom_ops.rotary_embedding(POSITIONS, rotated, None, WIDTH, COSINES, is_neox=True)
    return rotated


def test_the_kernel_is_right_without_a_dimension_for_heads() -> None:
    """Queries of ``[T, num_heads * head_dim]`` are rotated as by torch."""
    query = torch.randn(TOKENS, HEADS * WIDTH)
    torch.testing.assert_close(by_kernel(query), by_torch(query))


def test_the_kernel_takes_heads_for_tokens() -> None:
    """Of queries of ``[T, num_heads, head_dim]`` it rotates the first ``T`` heads of all tokens only.

    If this fails, vLLM's kernel may be right, and the switch may go.
    """
    query = torch.randn(TOKENS, HEADS, WIDTH)
    wrong, right = by_kernel(query).flatten(0, 1), by_torch(query)
    heads = query.flatten(0, 1)
    torch.testing.assert_close(wrong[:TOKENS], by_torch(heads[:TOKENS]))
    torch.testing.assert_close(wrong[TOKENS:], heads[TOKENS:])
    assert not torch.allclose(wrong, right.flatten(0, 1))
