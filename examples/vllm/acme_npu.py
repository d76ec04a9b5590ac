"""A builder for an NPU, whose kernel takes lengths as a host list that the engine updates in graphs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from acme_attention import GraphSupport

from graphpact_adapters.vllm import Builders, PagedReads, Part, Tasks, UpdatableGraph


@dataclass
class NpuMetadata:
    """The kernel's arguments: a host list, and tensors by their addresses."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens_list: list[int]
    block_tables: torch.Tensor


class NpuMetadataBuilder:
    """Makes a new list and a new table in each step, and keeps nothing."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        del kv_cache_spec, layer_names, vllm_config, device

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> GraphSupport:
        """Return which batches the kernel can serve in a full graph."""
        del vllm_config, kv_cache_spec
        return GraphSupport.ALWAYS

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **_: Any) -> NpuMetadata:
        """Return the metadata of a step."""
        del common_prefix_len
        common = common_attn_metadata
        return NpuMetadata(
            common.num_actual_tokens,
            common.query_start_loc,
            common.seq_lens_cpu.tolist(),
            common.block_table_tensor.clone(),
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> NpuMetadata:
        """Return the metadata of a capture."""
        return self.build(0, common_attn_metadata)


def read(metadata: NpuMetadata, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the kernel's arguments; a tuple is a host list."""
    launch = Part(
        seq_lens=tuple(metadata.seq_lens_list),
        block_table=metadata.block_tables,
        query_start_loc=metadata.query_start_loc,
        num_tokens=metadata.num_actual_tokens,
        names={"seq_lens": "seq_lens_list", "block_table": "block_tables"},
    )
    return PagedReads((launch,), slot_mapping, metadata.num_actual_tokens)


def update_graph_params(graph: UpdatableGraph, attn_metadata: Mapping[str, NpuMetadata]) -> None:
    """Update each recorded kernel with the metadata of its own layer, in the order of the capture."""
    for task in graph:
        metadata = attn_metadata[task.layer]
        task.update(seq_lens_list=metadata.seq_lens_list, block_tables=metadata.block_tables)


checked = Builders(
    NpuMetadataBuilder,
    read=read,
    tasks=Tasks(("seq_lens_list", "block_tables"), update_graph_params),
)
