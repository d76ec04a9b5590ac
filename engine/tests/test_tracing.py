"""Tests that torch.compile traces the forward pass of a model in one graph, as piecewise graphs need it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import needs_seam
from graphpact import ForwardBatch, ForwardMode, LayerSpec, declare_kernel
from graphpact_engine import models


@declare_kernel
@torch.library.custom_op("graphpact_tests::attend_in_a_node", mutates_args=())
def attend_in_a_node(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attend causally over one request; one node in a trace."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], is_causal=True, scale=scaling
    )
    return out[0].transpose(0, 1).contiguous()


@attend_in_a_node.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    del k, scaling
    return q.new_empty(*q.shape[:2], v.shape[2])


def attend(q: torch.Tensor, k: Any, v: Any, layer: LayerSpec, metadata: None) -> torch.Tensor:
    """Attend as a lane does."""
    del metadata
    return attend_in_a_node(q, k, v, layer.scaling)


@pytest.mark.parametrize(
    ("architecture", "absorb"),
    [
        ("llama", False),
        pytest.param("deepseek_v3", False, marks=pytest.mark.sweep),
        pytest.param("deepseek_v3", True, marks=needs_seam),
        pytest.param("deepseek_v2", True, marks=[needs_seam, pytest.mark.sweep]),
    ],
)
def test_a_forward_pass_is_one_graph(
    architecture: str, *, absorb: bool, checkpoint: Callable[..., Path]
) -> None:
    """The trace of a forward pass has a node for every attention call, and its logits are bit-equal."""
    loaded = models.load_checkpoint(
        checkpoint(architecture),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention=models.ATTENTION_NAME,
    ).model
    if architecture != "llama":
        loaded.set_experts_implementation("batched_mm")
    model = models.TransformersModel(loaded, absorb=absorb)
    lens = torch.tensor([7])
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.randint(2, 199, (7,), generator=torch.Generator().manual_seed(0)),
        positions=torch.arange(7),
        out_cache_loc=torch.zeros(7, dtype=torch.int64),
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        seq_lens=lens,
        seq_lens_cpu=lens,
        extend_seq_lens=lens,
        extend_seq_lens_cpu=lens,
    )
    graphs: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    traced = torch.compile(model, backend=keep, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        want = model(batch, None, attend).logits
        got = traced(batch, None, attend).logits
        (graph,) = graphs
        again = traced(batch, None, attend).logits
    assert torch.equal(got, want)
    assert torch.equal(again, want)
    assert len(graphs) == 1
    nodes = [node for node in graph.graph.nodes if "attend_in_a_node" in str(node.target)]
    assert len(nodes) == len(model.layers)
