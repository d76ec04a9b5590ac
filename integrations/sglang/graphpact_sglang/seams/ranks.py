"""The place of this process among the ranks of its model, and which ranks refuse the same graphs.

Does not: find faults, or exchange them; `graphpact_guard.RankAgreement` does.
"""

from typing import Any

from sglang.srt.runtime_context import get_parallel

from graphpact.errors import ConfigError
from graphpact_guard import RankAgreement


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


def agreement_of_ranks(server_args: Any) -> RankAgreement:
    """Return the agreement of the ranks of tensor parallelism on the graphs that they refuse.

    Args:
        server_args: SGLang's arguments.

    Raises:
        ConfigError: There are ranks with other steps, with which nothing can be agreed in a step.
    """
    if server_args.pp_size > 1 or server_args.enable_dp_attention:
        raise ConfigError(
            "GRAPHPACT asks for eager, and ranks of pipeline parallelism and of data parallel attention"
            " cannot agree in a step on the graphs that they refuse",
            hint="write raise or log",
        )
    group = get_parallel().tp_group
    return RankAgreement(group.cpu_group if group.world_size > 1 else None)
