"""`RankComparison`: what each rank of a group is about to do, compared before it does it.

Ranks whose graphs have collectives wait for each other forever if one of them takes another graph. A
comparison on the CPU comes before that wait, and tells all ranks what each one chose.

Does not: find a rank that takes no part; the comparison itself waits for it then.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

_FEW = 4
"""So many ranks are named one by one in a message."""


class RankComparison:
    """The choices of the ranks of a group.

    Args:
        group: Ranks that take the same steps, in a process group that is connected on the CPU, as one of gloo
            is. None for a process that takes its steps alone.
        name: The name of this rank, such as ``dp1.tp0``.
    """

    def __init__(self, group: "torch.distributed.ProcessGroup | None", name: str) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._name = name

    def differing(self, choice: str, about: Any) -> dict[str, Any] | None:
        """Return what all ranks say of their choices, by name, if these differ; None if all are equal.

        All ranks call it, at the same place. They exchange 16 bytes, and more only if choices differ.

        Args:
            choice: What this rank is about to do, equal on ranks that may do it together.
            about: What it says of it, which can be pickled.
        """
        if self._group is None:
            return None
        number = int.from_bytes(hashlib.blake2b(choice.encode(), digest_size=6).digest())
        largest = torch.tensor([number, -number])
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self._group)
        if int(largest[0]) == -int(largest[1]):
            return None
        said: list[Any] = [None] * self._group.size()
        torch.distributed.all_gather_object(said, (self._name, about), group=self._group)
        return dict(said)


def describe_ranks(said: Mapping[str, str]) -> str:
    """Return what each rank said in one line, the rarest first: ``dp3: eager; dp0, dp1: X``."""
    ranks: dict[str, list[str]] = {}
    for name, text in said.items():
        ranks.setdefault(text, []).append(name)
    texts = sorted(ranks, key=lambda text: len(ranks[text]))
    parts = []
    for text in texts:
        names = ranks[text]
        who = ", ".join(names) if len(names) <= _FEW else f"{len(names)} ranks from {names[0]} to {names[-1]}"
        parts.append(f"{who}: {text}")
    return "; ".join(parts)
