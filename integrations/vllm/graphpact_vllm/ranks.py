"""The place of this process among the ranks of its model.

Does not: find faults.
"""

from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group


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
