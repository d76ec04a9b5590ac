"""`gathered`: the answers to all prompts, on every rank, after the last step.

Does not: stream tokens of other ranks while they are generated.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from graphpact_engine.ranks.processes import EngineRanks


class Indexed(Protocol):
    """Something about one prompt."""

    @property
    def index(self) -> int:
        """Index of the prompt among all prompts."""


T = TypeVar("T", bound=Indexed)


def gathered(ranks: EngineRanks, mine: Sequence[T]) -> list[T]:
    """Return what all processes have about their prompts, in the order of the prompts.

    All processes call it. Ranks that share requests have the same, which is returned once.

    Args:
        ranks: The ranks.
        mine: What this process has. Several things about one prompt keep their order.
    """
    ranks.wait_for_world()
    of_each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_each, list(mine))
    of_prompt: dict[int, list[T]] = {}
    for theirs in of_each:
        own: dict[int, list[T]] = {}
        for each in theirs:
            own.setdefault(each.index, []).append(each)
        of_prompt |= own
    return [each for index in sorted(of_prompt) for each in of_prompt[index]]
