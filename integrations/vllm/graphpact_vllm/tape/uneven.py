"""`lend_uneven_collectives`: the two collectives by which ranks of data parallelism share experts, on a CPU.

vLLM's layers of experts gather the tokens of all ranks, and give each rank its sums back. Its communicator
for CPUs has no form of both for ranks with different numbers of tokens, so a model with experts ends at its
first step, eagerly too.

Does not: replace a method that vLLM has.
"""

from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def lend_uneven_collectives() -> None:
    """Give vLLM's communicator for CPUs the methods that it lacks."""
    lacking: Any = CpuCommunicator
    for name, method in (("all_gatherv", all_gatherv), ("reduce_scatterv", reduce_scatterv)):
        if getattr(lacking, name) is getattr(DeviceCommunicatorBase, name):
            setattr(lacking, name, method)


def all_gatherv(communicator: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Return the rows of all ranks, in the order of ranks.

    Args:
        communicator: vLLM's communicator of a group.
        input_: ``[rows, ...]`` any dtype, or a list of them.
        dim: 0.
        sizes: Rows of each rank; None if all have as many.

    Raises:
        NotImplementedError: ``dim`` is another one.
    """
    if dim != 0:
        raise NotImplementedError(f"all_gatherv of dimension {dim}; it gathers rows, dimension 0")
    if not isinstance(input_, torch.Tensor):
        return [all_gatherv(communicator, each, dim, sizes) for each in input_]
    most = len(input_) if sizes is None else max(sizes)
    rows = input_.new_zeros(most, *input_.shape[1:])  # gloo gathers as many rows of each rank
    rows[: len(input_)] = input_
    gathered = input_.new_empty(communicator.world_size * most, *input_.shape[1:])
    distributed.all_gather_into_tensor(gathered, rows, group=communicator.device_group)
    if sizes is None:
        return gathered
    return torch.cat([gathered[at * most :][:size] for at, size in enumerate(sizes)])


def reduce_scatterv(
    communicator: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Return the sum over all ranks of the rows of this rank.

    Args:
        communicator: vLLM's communicator of a group.
        input_: The rows of all ranks, in the order of ranks, along ``dim``.
        dim: The dimension of rows.
        sizes: Rows of each rank; None if all have as many.
    """
    rows = input_.movedim(dim, 0).contiguous().clone()
    distributed.all_reduce(rows, group=communicator.device_group)
    its = [len(rows) // communicator.world_size] * communicator.world_size if sizes is None else sizes
    rank = communicator.rank_in_group
    begin = sum(its[:rank])
    return rows[begin : begin + its[rank]].movedim(0, dim)
