"""`RankAgreement`: the graphs that one rank refuses are refused by all ranks that take the same steps.

Ranks that take different paths in a step wait for each other forever, or read what a peer left in the buffer
of the other path.

Does not: find faults, or know which ranks take the same steps; the integration of an engine does.
"""

import torch

from graphpact_guard.faults import GraphKey


class RankAgreement:
    """The graphs that were refused, the same on all ranks of a group.

    Args:
        group: Ranks that take the same steps, in a process group that is connected on the CPU, as one of gloo
            is. None for a process that takes its steps alone.
    """

    def __init__(self, group: "torch.distributed.ProcessGroup | None") -> None:
        self._group = group
        self._size = 1 if group is None else group.size()
        self._agreed = 0  # how many are refused on all ranks

    def update(self, refused: set[GraphKey]) -> set[GraphKey]:
        """Return the graphs that any rank refused. All ranks call it, in each step at the same place.

        Args:
            refused: The graphs that this rank refused, and those of earlier calls.
        """
        if self._size > 1:
            news = torch.tensor(len(refused) > self._agreed, dtype=torch.int32)
            torch.distributed.all_reduce(news, torch.distributed.ReduceOp.MAX, group=self._group)
            if news:
                gathered: list[set[GraphKey]] = [set() for _ in range(self._size)]
                torch.distributed.all_gather_object(gathered, refused, group=self._group)
                refused = set().union(*gathered)
        self._agreed = len(refused)
        return refused
