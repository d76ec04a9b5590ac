"""`HostLengthsBackend`: attention whose kernel takes its lengths as a host list, as on an NPU.

A graph keeps host arguments by value. So every layer is a task, and its list is updated before each replay.

Does not: call an NPU's kernel; `attend_lengths` stands for it, with the same kinds of arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from graphpact import (
    AttentionBackend,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    GraphShape,
    GraphSlot,
    LayerSpec,
    Limits,
    TaskKey,
    declare_kernel,
    hookimpl,
    metadata_slot,
    updated,
)
from graphpact.attention import Buffers, GraphSupport, HeadLayout, new_kv


@declare_kernel
@torch.library.custom_op("recipes::attend_lengths", mutates_args=("out",))
def attend_lengths(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    scaling: float,
    actual_seq_lengths_kv: list[int],
) -> None:
    """Write into ``out`` the attention of each request's query to the first ``length`` of its keys."""
    lengths = torch.tensor(actual_seq_lengths_kv, device=q.device)
    seen = torch.arange(table.shape[1], device=q.device) < lengths[:, None]
    keys, values = (
        cache[table].masked_fill(~seen[:, :, None, None], 0).transpose(1, 2) for cache in (k_cache, v_cache)
    )
    mask = seen[:, None, None]
    found = scaled_dot_product_attention(
        q[:, :, None], keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    out.copy_(found[:, :, 0])


@dataclass
class HostLengths:
    """The metadata of a decode step of ``bs`` requests.

    Args:
        out_cache_loc: ``[bs]`` int64: KV slot of each new token. A tensor of the view.
        table: ``[bs, max_context_len]`` int64: KV slot of each key, zero after the last one.
        shape: The captured shape, which is part of the keys of the graph's tasks.
        lengths: ``[bs]``: keys of each request, on the host.
    """

    out_cache_loc: torch.Tensor
    table: torch.Tensor
    shape: GraphShape
    lengths: list[int] = updated()  # noqa: RUF009  a field


class HostLengthsBackend(AttentionBackend):
    """A backend for decode, with MHA or GQA heads, whose attention is a task in every layer."""

    capabilities = Capabilities(
        modes=frozenset({ForwardMode.DECODE, ForwardMode.IDLE}),
        graph_support=GraphSupport.UNIFORM_DECODE,
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        devices=frozenset({"cpu"}),
        head_layouts=frozenset({HeadLayout.MHA, HeadLayout.GQA}),
        needs_host_plan=True,  # the replay hook reads seq_lens_cpu
        seq_len_fill_value=1,  # a padding request has one key, in scratch
    )

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return the table, a row for each request."""
        width = limits.max_context_len
        table = metadata_slot("npu.table", lambda bs, _: (bs, width), torch.int64, role="table", axis="bs")
        return [table]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> HostLengths:
        """Bind the table; `fill_metadata` makes the list."""
        return HostLengths(view.out_cache_loc, buffers("npu.table"), shape, [])

    def fill_metadata(self, view: ForwardBatch, metadata: HostLengths) -> None:
        """Write the table, zero after each request's last key, and list the lengths of all requests."""
        rows = self.context.req_to_token[view.req_pool_indices, : metadata.table.shape[1]]
        position = torch.arange(rows.shape[1], device=view.device)
        metadata.table.copy_(torch.where(position < view.seq_lens[:, None], rows, 0))
        metadata.lengths = view.seq_lens_cpu.tolist()

    @hookimpl
    def init_metadata_replay(
        self, view: ForwardBatch, shape: GraphShape, captured: HostLengths
    ) -> HostLengths:
        """Refresh the metadata, and update the task of every layer, in the order of the capture."""
        fresh: HostLengths = super().init_metadata_replay(view, shape, captured)
        if self.driver is not None:  # the lane's driver
            for layer in self.context.layers:
                key = TaskKey(fresh.shape, layer.layer_id)
                self.driver.update_task(key, {"actual_seq_lengths_kv": fresh.lengths})
        return fresh

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: HostLengths,
    ) -> torch.Tensor:
        """Write new keys and values, if any, and attend: in a task, or without a driver by a plain call."""
        caches = (
            self.context.kv_cache.k[layer.cache_layer],
            self.context.kv_cache.v[layer.cache_layer],
        )
        for cache, new in zip(caches, new_kv(k, v, layer) or (), strict=False):
            cache.index_copy_(0, metadata.out_cache_loc, new)
        out = q.new_empty(q.shape[0], layer.num_q_heads, layer.v_head_dim)
        args = (q, *caches, metadata.table, out, layer.scaling)
        lengths = {"actual_seq_lengths_kv": metadata.lengths}
        if self.driver is None:  # a lane that captures nothing
            attend_lengths(*args, **lengths)
        else:
            self.driver.task(TaskKey(metadata.shape, layer.layer_id), attend_lengths, args, lengths)
        return out
