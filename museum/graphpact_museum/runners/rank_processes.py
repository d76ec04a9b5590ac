"""Exhibits and variants of ranks as processes, which step together with real collectives: GP06, 11, 17.

Each is planted on every rank, and does what its process is the rank for. Without processes it is correct.

Does not: simulate ranks; see `graphpact_museum.runners.ranks`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.parallel import get_attention_tp_size
from graphpact.ranks.collectives import all_gather
from graphpact.shapes import EagerReason, GraphShape
from graphpact_museum.edits.override import named_after, override, overrides
from graphpact_museum.edits.runners import LONG_CONTEXT, Fit, after_fill, after_fill_of_captures
from graphpact_museum.exhibit import Make, exhibit, variant


def _rank() -> int:
    """Return the rank of this process, 0 if it has none."""
    joined = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if joined else 0


def _size() -> int:
    """Return the number of ranks, 1 if this process is alone."""
    joined = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if joined else 1


# -- which graph -------------------------------------------------------------------------------------


@exhibit("GP17", "vllm-project/vllm#25906", on="cuda_graph", lanes="decode", ranks=2)
@overrides("fit")
def process_fits_its_own_tokens(_: Any, right: Any, batch: ForwardBatch) -> Fit:
    """The process of a rank looks for a shape by its own tokens, and the others replay another graph."""
    alone = replace(batch, global_num_tokens_cpu=None, global_batch_sizes_cpu=None)
    fit: Fit = right(alone)
    return fit


@exhibit("GP17", "ROCm/ATOM#1697", on="cuda_graph", lanes="decode", ranks=2)
@overrides("fit")
def process_without_requests_runs_eagerly(_: Any, right: Any, batch: ForwardBatch) -> Fit:
    """After all ranks have agreed on a graph, the process of a rank without requests runs eagerly."""
    fit: Fit = right(batch)
    is_idle = batch.global_num_tokens_cpu is not None and not batch.batch_size
    return EagerReason.WRONG_MODE if is_idle else fit


@exhibit("GP17", "pegainfer-project/pegainfer#498", on="cuda_graph", lanes="decode", ranks=2)
@overrides("shapes")
def process_captures_one_shape_more(_: Any, right: Any) -> Any:
    """A process decides by itself what it captures: one rank captures a shape that the others do not have."""
    shapes = [*right()]
    return shapes if _size() == 1 or _rank() else shapes[1:]


def _can_replay(batch: ForwardBatch) -> bool:
    return max(batch.seq_lens_cpu.tolist(), default=0) <= 40


def _voting(groups: Callable[[], Any]) -> Make:
    """Make runners whose ranks vote in a group whether all of them can replay a graph."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.voters = groups() if _size() > 1 else None

    def fit(self: Any, right: Any, batch: ForwardBatch) -> Fit:
        found: Fit = right(batch)
        if batch.global_num_tokens_cpu is None or self.voters is None or isinstance(found, EagerReason):
            return found
        votes = torch.tensor([_can_replay(batch)], dtype=torch.int32)
        distributed.all_reduce(votes, distributed.ReduceOp.MIN, group=self.voters)
        return found if int(votes) else LONG_CONTEXT

    return lambda base: override(base, fit, __init__=init, declines=(LONG_CONTEXT,))


@exhibit("GP17", "NVIDIA/Megatron-LM#6980", on="cuda_graph", lanes="decode", ranks=2)
def processes_vote_in_another_group(base: type[Any]) -> type[Any]:
    """Ranks vote whether all can replay, but each in a group of its own and not in that of the graph."""

    def groups() -> Any:
        each = [distributed.new_group([rank]) for rank in range(_size())]
        return each[_rank()]

    return _voting(groups)(base)


@variant(on="cuda_graph", lanes="decode", ranks=2)
def processes_that_vote(base: type[Any]) -> type[Any]:
    """Ranks vote in their common group whether all can replay a graph."""
    return _voting(lambda: distributed.group.WORLD)(base)


# -- which collectives -------------------------------------------------------------------------------


def _gathered(flag: torch.Tensor) -> torch.Tensor:
    every = flag.new_empty(_size())
    all_gather(every, flag)
    return every.amax(dim=0, keepdim=True)


def _reduced(flag: torch.Tensor) -> torch.Tensor:
    most = flag.clone()
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return most


Calls = Callable[[Any, torch.Tensor], torch.Tensor]
"""``(layer, flag) -> factor``: the collectives of a layer."""


def _agreeing(calls: Calls) -> Make:
    """Make backends whose ranks agree on a factor of attention in each layer; it is always 1."""

    def forward(_: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> torch.Tensor:
        if _size() == 1:
            out: torch.Tensor = right(q, k, v, layer, metadata)
            return out
        if _rank():  # work of one rank alone may come in another order
            flag = q.new_ones(1)
            out = right(q, k, v, layer, metadata)
        else:
            out = right(q, k, v, layer, metadata)
            flag = q.new_ones(1)
        return out * calls(layer, flag)

    return named_after(calls, lambda base: override(base, forward))


@variant(on="fa3", lanes="decode", ranks=2)
@_agreeing
def processes_that_agree_in_each_layer(_: Any, flag: torch.Tensor) -> torch.Tensor:
    """Ranks do local work in other orders, and then call the same collectives in the same order."""
    return _gathered(flag) * _reduced(flag)


@exhibit("GP17", "vllm-project/vllm#43547", on="fa3", lanes="decode", ranks=2)
@_agreeing
def process_skips_a_collective(layer: Any, flag: torch.Tensor) -> torch.Tensor:
    """A rank that has nothing to add leaves the last reduction out, and the others wait for it."""
    gathered = _gathered(flag)
    return gathered if _rank() and layer.layer_id else gathered * _reduced(flag)


@exhibit("GP17", "NVIDIA/TensorRT-LLM#15518", on="fa3", lanes="decode", ranks=2)
@_agreeing
def process_swaps_two_collectives(_: Any, flag: torch.Tensor) -> torch.Tensor:
    """One rank calls its reduction before its gather, the others after it."""
    calls = (_reduced, _gathered) if _rank() else (_gathered, _reduced)
    return calls[0](flag) * calls[1](flag)


# -- which rows --------------------------------------------------------------------------------------


def _set_count(registry: CudaGraphBufferRegistry, count: int) -> None:
    """Write the count of live tokens on all ranks but the first, in a lane that has it."""
    if registry.has_slot("num_token_non_padded") and _rank():
        registry.get_slot("num_token_non_padded").slice_for(0, 0).fill_(count)


@exhibit("GP17", "vllm-project/vllm#32625", on="reference_runner", lanes="decode", ranks=2)
@after_fill
def process_fills_the_vector_of_all_ranks_with_its_own_tokens(
    _: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """The tokens of the gathered buffer are filled with the tokens of this rank, in memory that all read."""
    del shape
    if _size() > 1 and registry.has_slot("global_num_tokens_gpu"):
        registry.get_slot("global_num_tokens_gpu").slice_for(0, 0).fill_(max(batch.num_tokens, 1))


@exhibit("GP06", "sgl-project/sglang#35766", on="cuda_graph", lanes="decode", ranks=2)
@after_fill
def process_counts_its_padding_as_live(
    _: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """One rank counts its padding rows as live tokens, so they reach the experts of all ranks."""
    del batch
    _set_count(registry, shape.num_tokens // get_attention_tp_size())


@exhibit("GP11", "sgl-project/sglang#22404", on="cuda_graph", lanes="decode", ranks=2)
@after_fill_of_captures
def process_captures_the_count_of_all_ranks(
    _: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """One rank captures with the live tokens of all ranks of its group; its replays have its own share."""
    del batch
    _set_count(registry, shape.num_tokens)
