"""`declared_memory`: the memory around the graph that vLLM captures now, by its use, for the tape.

A strict tape refuses a graph that writes other memory, such as weights (GP19). It replays a new graph twice
on the same inputs, and refuses one whose second result differs (GP18).

Does not: list what graphs only read; that is any memory. Other host memory is not listed either: on a CPU
vLLM has one buffer where a GPU has two.
"""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker import workspace

from graphpact.graphs import DeclaredMemory
from graphpact.memory_names import MemoryNames
from graphpact_vllm.seams.builders import Builders

_INPUTS = ("input_buffers", "intermediate_tensors")
"""Attributes of the model runner V2 that hold static inputs."""


def declared_memory(model_runner: Any, builders: Builders) -> DeclaredMemory:
    """Return the memory that the next graph of a model runner may write.

    Args:
        model_runner: vLLM's model runner V1 or V2.
        builders: What the metadata builders made for the capture.
    """
    names = MemoryNames()
    model = model_runner.get_model()
    names.claim({"model": dict(model.named_parameters())})
    caches = names.claim({"kv_caches": model_runner.kv_caches})
    metadata = {name: built.metadata for name, built in builders.current().items()}
    drafter = getattr(model_runner, "speculator", getattr(model_runner, "drafter", None))
    drafts = {"input_buffers (drafts)": getattr(drafter, "input_buffers", None)}
    refreshed = names.claim(_inputs(model_runner) | drafts | metadata)
    holders = {
        type(holder).__name__: holder
        for holder in (getattr(model_runner, "cudagraph_manager", None), drafter)
        if holder is not None
    }
    builders_memory = {f"{name} (builder)": builder for name, builder in builders.instances().items()}
    workspaces = names.claim(holders | builders_memory | _scratch())
    return DeclaredMemory(
        refreshed=refreshed, caches=caches, workspaces=workspaces, host=_host(), name_of=names.name_of
    )


def _inputs(model_runner: Any) -> dict[str, Any]:
    """Return the objects that a step's preparation writes, by name."""
    found = {name: value for name in _INPUTS if (value := getattr(model_runner, name, None)) is not None}
    tables = getattr(model_runner, "block_tables", None)
    if tables is not None:
        return found | {"slot_mappings": tables.slot_mappings, "block_tables": tables.input_block_tables}
    for name, value in vars(model_runner).items():
        if isinstance(value, CpuGpuBuffer):
            found[name] = value.gpu
        elif isinstance(value, torch.Tensor):
            found[name] = value
    for at, table in enumerate(model_runner.input_batch.block_table.block_tables):
        found[f"block_table[{at}]"] = _device_tensors(table)
    return found


def _device_tensors(table: Any) -> Mapping[str, torch.Tensor]:
    return {name: value.gpu for name, value in vars(table).items() if isinstance(value, CpuGpuBuffer)}


def _host() -> list[torch.Tensor]:
    """Return the numbers of tokens of all ranks, which vLLM keeps on the host to read them."""
    if not is_forward_context_available():
        return []
    across = get_forward_context().dp_metadata
    return [] if across is None else [across.num_tokens_across_dp_cpu]


def _scratch() -> dict[str, Any]:
    """Return the workspaces that vLLM's layers share."""
    if not workspace.is_workspace_manager_initialized():
        return {}
    return {"workspace": workspace.current_workspace_manager()}
