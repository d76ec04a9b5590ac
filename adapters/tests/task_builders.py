"""Builders whose kernels are tasks, like Ascend's: right ones, and ones with planted public bugs.

The kernel takes lengths as host lists and a block table by its address. `AscendBuilder.build` makes new ones
in each step; `update_graph_params` gives them to the tasks of the graph that is replayed.

Does not: contain code of vLLM-Ascend.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sglang_backends import PagedBackend
from vllm_builders import AttentionCGSupport

from graphpact_adapters.sglang import Backends
from graphpact_adapters.vllm import (
    Builders,
    CommonAttentionMetadata,
    PagedReads,
    Part,
    Tasks,
    UpdatableGraph,
)

ARGUMENTS = ("actual_seq_lengths_q", "seq_lens_list", "block_tables")


@dataclass
class AscendMetadata:
    """The arguments of a fused attention kernel: host lists, and a table."""

    num_actual_tokens: int
    actual_seq_lengths_q: list[int]
    seq_lens_list: list[int]
    block_tables: torch.Tensor
    causal: bool


class AscendBuilder:
    """The right builder: everything is new in each step, and nothing is kept."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        del kv_cache_spec, layer_names, vllm_config
        self.device = device

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the declared support."""
        del vllm_config, kv_cache_spec
        return AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> AscendMetadata:
        """Return the metadata of a step."""
        del common_prefix_len, fast_build
        return AscendMetadata(
            num_actual_tokens=common.num_actual_tokens,
            actual_seq_lengths_q=common.query_start_loc_cpu[1:].tolist(),
            seq_lens_list=common.seq_lens.tolist(),
            block_tables=torch.cat([common.block_table_tensor]),
            causal=common.causal,
        )

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> AscendMetadata:
        """Return the metadata of a capture."""
        return self.build(0, common)


def read(metadata: AscendMetadata, slot_mapping: torch.Tensor) -> PagedReads:
    """Return what the kernel takes."""
    part = Part(
        seq_lens=tuple(metadata.seq_lens_list),
        block_table=metadata.block_tables,
        query_start_loc=(0, *metadata.actual_seq_lengths_q),
        num_tokens=metadata.num_actual_tokens,
        causal=metadata.causal,
        names={
            "seq_lens": "seq_lens_list",
            "block_table": "block_tables",
            "query_start_loc": "actual_seq_lengths_q",
        },
    )
    return PagedReads((part,), slot_mapping, metadata.num_actual_tokens)


def _arguments(metadata: AscendMetadata) -> dict[str, Any]:
    return {
        "actual_seq_lengths_q": (0, *metadata.actual_seq_lengths_q),
        "seq_lens_list": metadata.seq_lens_list,
        "block_tables": metadata.block_tables,
    }


def update_graph_params(graph: UpdatableGraph, attn_metadata: Mapping[str, AscendMetadata]) -> None:
    """Update each task with the metadata of its own layer."""
    for task in graph:
        task.update(**_arguments(attn_metadata[task.layer]))


# -- planted bugs ------------------------------------------------------------------------------------------


def of_the_first_layer_alone(graph: UpdatableGraph, attn_metadata: Mapping[str, AscendMetadata]) -> None:
    """Update one task."""
    graph[0].update(**_arguments(attn_metadata[graph[0].layer]))


def never(graph: UpdatableGraph, attn_metadata: Mapping[str, AscendMetadata]) -> None:
    """Update no task."""


def by_place(graph: UpdatableGraph, attn_metadata: Mapping[str, AscendMetadata]) -> None:
    """Pair tasks and metadata by index, although metadata comes group by group."""
    for task, metadata in zip(graph, attn_metadata.values(), strict=True):
        task.update(**_arguments(metadata))


def backwards(graph: UpdatableGraph, attn_metadata: Mapping[str, AscendMetadata]) -> None:
    """Update in another order than that of the capture."""
    for task in reversed(graph):
        task.update(**_arguments(attn_metadata[task.layer]))


def by_an_old_name(graph: UpdatableGraph, attn_metadata: Mapping[str, AscendMetadata]) -> None:
    """Update under the name of an earlier kernel, for all tasks."""
    metadata = attn_metadata[graph[0].layer]
    graph.update([{"context_lens": metadata.seq_lens_list}])


def with_a_table_of_its_own(graph: UpdatableGraph, attn_metadata: Mapping[str, AscendMetadata]) -> None:
    """Give each task a copy of the table, and keep no reference to it."""
    for task in graph:
        arguments = _arguments(attn_metadata[task.layer])
        task.update(**{**arguments, "block_tables": arguments["block_tables"].clone()})


def one_step_late() -> Callable[[UpdatableGraph, Mapping[str, AscendMetadata]], None]:
    """Return an update that uses the metadata of the previous step."""
    before: dict[Any, Mapping[str, AscendMetadata]] = {}

    def update(graph: UpdatableGraph, attn_metadata: Mapping[str, AscendMetadata]) -> None:
        update_graph_params(graph, before.get(graph.key, attn_metadata))
        before[graph.key] = attn_metadata

    return update


def under_test(update: Any = None, arguments: tuple[str, ...] = ARGUMENTS, **more: Any) -> Builders:
    """Return the right builder with an update."""
    return Builders(AscendBuilder, read=read, tasks=Tasks(arguments, update, **more))


# -- SGLang ------------------------------------------------------------------------------------------------


@dataclass
class ListedMetadata:
    """A page table in memory of the backend, and lengths as a list."""

    page_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    actual_seq_lengths_kv: list[int]


class ListedBackend(PagedBackend):
    """A backend with SGLang's interface, whose kernel takes lengths as a host list."""

    def init_forward_metadata(self, batch: Any) -> None:
        """Prepare an eager step."""
        super().init_forward_metadata(batch)
        self.forward_metadata = self.listed(batch)

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay."""
        super().init_forward_metadata_out_graph(batch, in_capture=in_capture)
        self.forward_metadata = self.listed(batch)

    def listed(self, batch: Any) -> ListedMetadata:
        """Return the metadata with a list of lengths."""
        made = self.forward_metadata
        return ListedMetadata(made.page_table, made.cu_seqlens_q, self.keys(batch).tolist())


def read_listed(metadata: ListedMetadata, batch: Any) -> PagedReads:
    """Return what the kernel takes."""
    part = Part(
        seq_lens=tuple(metadata.actual_seq_lengths_kv),
        block_table=metadata.page_table,
        query_start_loc=metadata.cu_seqlens_q,
        num_tokens=len(batch.out_cache_loc),
        names={"seq_lens": "actual_seq_lengths_kv", "block_table": "page_table"},
    )
    return PagedReads((part,), batch.out_cache_loc, len(batch.out_cache_loc))


def update_input(graph: UpdatableGraph, batch: Any) -> None:
    """Update all tasks at once, as SGLang's runner does."""
    width = batch.spec_info.draft_token_num if batch.forward_mode.is_target_verify() else 0
    lens = [length + width for length in batch.seq_lens.tolist()]
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lens}])


def update_input_of_v1(graph: UpdatableGraph, batch: Any) -> None:
    """Update under the name that another kernel has for its lengths."""
    graph.update(cpu_update_input=[{"actual_seq_lengths": batch.seq_lens.tolist()}])


def listed_under_test(update: Any = None, *, has_tasks: bool = True) -> Backends:
    """Return the backend of lists with an update."""
    tasks = Tasks(("actual_seq_lengths_kv",), update) if has_tasks else None
    return Backends(ListedBackend, read=read_listed, tasks=tasks)
