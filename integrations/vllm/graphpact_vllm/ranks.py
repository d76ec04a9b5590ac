"""The place of this process among the ranks of its model, and the graphs that all ranks refuse alike.

Does not: find faults.
"""

from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from graphpact.errors import ConfigError
from graphpact_guard import RankAgreement


def rank_name(vllm_config: Any) -> str:
    """Return the name of this process among those of the model, such as ``tp1``; empty for one alone."""
    parallel = vllm_config.parallel_config
    ranks = (
        ("dp", parallel.data_parallel_rank, parallel.data_parallel_size),
        ("pp", get_pp_group().rank_in_group, get_pp_group().world_size),
        ("tp", get_tp_group().rank_in_group, get_tp_group().world_size),
    )
    return ".".join(f"{name}{rank}" for name, rank, size in ranks if size > 1)


def rank_of_all(vllm_config: Any) -> str:
    """Return the rank of this process in its world, for reports."""
    parallel = vllm_config.parallel_config
    name = rank_name(vllm_config)
    return f"{parallel.rank} of {parallel.world_size}{f' ({name})' if name else ''}"


def agreement_of_ranks(vllm_config: Any) -> RankAgreement:
    """Return the agreement of the ranks of tensor parallelism on the graphs that they refuse.

    Raises:
        ConfigError: There are ranks with other steps, with which nothing can be agreed in a step.
    """
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        raise ConfigError(
            "GRAPHPACT asks for eager, and ranks of pipeline and of data parallelism cannot agree in a step"
            " on the graphs that they refuse",
            hint="write raise or log",
        )
    group = get_tp_group()
    return RankAgreement(group.cpu_group if group.world_size > 1 else None)
