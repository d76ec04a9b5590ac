"""The place of this process among the ranks of its model, and the graphs that all ranks refuse alike.

Ranks that take different paths in a step wait for each other forever, or read what a peer left in the buffer
of the other path.

Does not: find faults.
"""

from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from graphpact.errors import ConfigError
from graphpact_guard import GraphKey


def rank_name() -> str:
    """Return the name of this process among those of the model, such as ``tp1``; empty for one alone."""
    parallel = get_parallel()
    ranks = (
        ("dp", parallel.dp_rank, parallel.dp_size),
        ("pp", parallel.pp_rank, parallel.pp_size),
        ("tp", parallel.tp_rank, parallel.tp_size),
    )
    return ".".join(f"{name}{rank}" for name, rank, size in ranks if size > 1 and rank is not None)


def rank_labels() -> dict[str, str]:
    """Return the labels of this process, by the names that SGLang's own metrics have."""
    names = ("tp_rank", "pp_rank", "dp_rank")
    return {name: str(getattr(get_parallel(), name, None) or 0) for name in names}


def rank_of_all() -> str:
    """Return the rank of this process in tensor parallelism, for reports."""
    return f"{get_parallel().tp_rank} of {get_parallel().tp_size}"


class Agreement:
    """The graphs that were refused, the same on all ranks of tensor parallelism.

    Args:
        server_args: SGLang's arguments.

    Raises:
        ConfigError: There are ranks with other steps, with which nothing can be agreed in a step.
    """

    def __init__(self, server_args: Any) -> None:
        if server_args.pp_size > 1 or server_args.enable_dp_attention:
            raise ConfigError(
                "GRAPHPACT asks for eager, and ranks of pipeline parallelism and of data parallel attention"
                " cannot agree in a step on the graphs that they refuse",
                hint="write raise or log",
            )
        self._agreed = 0  # how many are refused on all ranks

    def update(self, refused: set[GraphKey]) -> set[GraphKey]:
        """Return the graphs that any rank refused. All ranks call it, in each step at the same place."""
        group = get_parallel().tp_group
        if group.world_size > 1:
            news = torch.tensor(len(refused) > self._agreed, dtype=torch.int32)
            torch.distributed.all_reduce(news, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
            if news:
                gathered: list[set[GraphKey]] = [set() for _ in range(group.world_size)]
                torch.distributed.all_gather_object(gathered, refused, group=group.cpu_group)
                refused = set().union(*gathered)
        self._agreed = len(refused)
        return refused
