"""The place of this process among the ranks of its model, and the graphs that all ranks take or refuse alike.

Does not: find faults.
"""

from typing import Any

from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group, get_world_group

from graphpact.errors import ConfigError
from graphpact_guard import RankAgreement, RankComparison


def rank_name(vllm_config: Any) -> str:
    """Return the name of this process among those of the model, such as ``dp1.tp3.ep7``; empty for one alone.

    The parts are those of vLLM's own names of workers, such as ``Worker_DP1_TP3_EP7``. A replica of a model
    without experts runs alone, and is named by its number from 1 on: vLLM does not tell it of the others.
    """
    parallel = vllm_config.parallel_config
    experts = parallel_state._EP if parallel.enable_expert_parallel else None  # noqa: SLF001  None if dense
    places = [
        (name, group.rank_in_group, group.world_size)
        for name, group in (
            ("pp", get_pp_group()),
            ("pcp", get_pcp_group()),
            ("tp", get_tp_group()),
            *((("ep", experts),) if experts is not None else ()),
        )
    ]
    replica = parallel.data_parallel_index
    names = [f"dp{replica}"] if parallel.data_parallel_size > 1 or replica > 0 else []
    return ".".join([*names, *(f"{name}{rank}" for name, rank, size in places if size > 1)])


def rank_of_all(vllm_config: Any) -> str:
    """Return the rank of this process in its world, for reports: ``7 of 16 (dp1.tp3.ep7)``."""
    world, name = get_world_group(), rank_name(vllm_config)
    return f"{world.rank_in_group} of {world.world_size}{f' ({name})' if name else ''}"


def comparison_of_ranks(vllm_config: Any) -> RankComparison:
    """Return the comparison of the ranks that run the same layers in the same steps.

    With experts these are the ranks of data and of tensor parallelism in one stage of a pipeline, which vLLM
    has as a group of experts; without, those of tensor parallelism.
    """
    experts = parallel_state._EP  # noqa: SLF001  None for a model without experts
    group = get_tp_group() if experts is None else experts
    return RankComparison(group.cpu_group, rank_name(vllm_config) or "rank 0")


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
