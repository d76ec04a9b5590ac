"""Exhibits of the batch that a capture runs with: GP11.

Does not: plant bugs in replays.
"""

from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.shapes import GraphShape
from graphpact_museum.edits.override import overrides
from graphpact_museum.edits.runners import (
    after_fill_of_captures,
)
from graphpact_museum.exhibit import exhibit


@exhibit("GP11", "sgl-project/sglang#22404", on="cuda_graph", lanes="decode", prefix="cuda-graph")
@exhibit("GP11", "sgl-project/sglang#22404", on="cpu_graph", lanes="decode", prefix="cpu-graph")
@exhibit("GP11", "sgl-project/sglang#22404", on="reference_runner", lanes="extend", prefix="reference-runner")
@after_fill_of_captures
def counts_plainly_at_capture(_: Any, registry: Any, __: ForwardBatch, shape: GraphShape) -> None:
    """The count of live tokens is that of the shape at capture, but the share of the rank at replay."""
    if registry.has_slot("num_token_non_padded"):
        registry.get_slot("num_token_non_padded").slice_for(0, 0).fill_(shape.num_tokens)


@exhibit("GP11", "vllm-project/vllm#53658", on="cuda_graph", lanes="decode")
@overrides("dummy")
def cuda_graph_dummies_beyond_the_longest(runner: Any, right: Any, shape: GraphShape) -> ForwardBatch:
    """The dummy's sequences are longer than a row of the page table."""
    dummy: ForwardBatch = right(shape)
    lens = dummy.seq_lens + runner.context.limits.max_context_len
    return replace(dummy, seq_lens=lens, seq_lens_cpu=lens.cpu().clone())


@exhibit("GP11", "vllm-project/vllm#53658", on="reference_runner", lanes="target_verify")
@overrides("dummy")
def verify_dummies_without_room_for_drafts(runner: Any, right: Any, shape: GraphShape) -> ForwardBatch:
    """The dummy's sequences have the maximum length, and its drafts come after them."""
    dummy: ForwardBatch = right(shape)
    lens = torch.full_like(dummy.seq_lens, runner.context.limits.max_context_len)
    return replace(dummy, seq_lens=lens, seq_lens_cpu=lens.cpu().clone())


@exhibit("GP11", "NVIDIA/TensorRT-LLM#14640", on="cpu_graph", lanes="decode")
@overrides("dummy")
def cpu_graph_dummies_disagree_with_the_host(_: Any, right: Any, shape: GraphShape) -> ForwardBatch:
    """The dummy's lengths are 0 on the host and right on the device."""
    dummy: ForwardBatch = right(shape)
    return replace(dummy, seq_lens_cpu=torch.zeros_like(dummy.seq_lens_cpu))


@exhibit("GP11", "NVIDIA/TensorRT-LLM#14640", on="reference_runner", lanes="mixed")
@overrides("dummy")
def mixed_dummies_disagree_with_the_host(_: Any, right: Any, shape: GraphShape) -> ForwardBatch:
    """The extend lengths are in another order on the host than on the device."""
    dummy: ForwardBatch = right(shape)
    return replace(dummy, extend_seq_lens_cpu=dummy.required_extend_lens()[1].flip(0))


@exhibit("GP11", "lightseekorg/tokenspeed#258", on="reference_runner", lanes="draft_decode")
@overrides("dummy")
def draft_dummies_of_length_zero(_: Any, right: Any, shape: GraphShape) -> ForwardBatch:
    """The dummy's sequences have length 0, while the drafts after them have positions and slots."""
    dummy: ForwardBatch = right(shape)
    return replace(
        dummy,
        seq_lens=torch.zeros_like(dummy.seq_lens),
        seq_lens_cpu=torch.zeros_like(dummy.seq_lens_cpu),
    )


@exhibit("GP11", "vllm-project/vllm#53821", on="cuda_graph", lanes="decode")
@after_fill_of_captures
def cuda_graph_blanks_lengths_at_capture(_: Any, registry: Any, __: ForwardBatch, shape: GraphShape) -> None:
    """At capture lengths are zeroed after the fill to protect a kernel, although it does not need them."""
    registry.get_slot("seq_lens").slice_for(shape.batch_size, 0).zero_()
