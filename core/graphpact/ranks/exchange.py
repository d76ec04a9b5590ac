"""`RankExchange`: what ranks tell each other on the CPU, before they do something together.

One exchange is one ``all_gather`` of seven int64 numbers. They say what a rank is about to do and how large
its batch is. Every rank gets the numbers of all, so what follows from them is the same everywhere. If the
ranks are about to do different things, every rank sees this in the same exchange, before a collective of the
model could hang or mix their data, and every rank raises the same error.

Does not: decide what to do with the numbers; `graphpact.ranks.agreement` does.
"""

import functools
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from graphpact.errors import RankError
from graphpact.parallel import ranks_named
from graphpact.ranks.collectives import all_gather

_HELP = (
    "all ranks of a replica have to take the same steps in the same order: derive shape, mode, capture and"
    " eager runs from the exchanged numbers, never from what one rank knows"
)

_NUMBERS = struct.Struct("=7q")


class RankStep(NamedTuple):
    """What one rank is about to do.

    Args:
        tokens: Real tokens of its batch.
        requests: Requests of its batch; 0 for a rank that takes part only because others have work.
        mode: What the rank proposes, a number that the caller defines; ranks may differ.
        wants_graph: 1 if it can replay a graph, or has no requests; 0 if it has to run eagerly.
        kind: Checksum of the action, such as ``step decode``; the same on all ranks.
        digest: Checksum of a detail, such as the requests of the batch; 0 if there is none.
        epoch: Exchanges of this rank before this one; the same on all ranks.
    """

    tokens: int
    requests: int
    mode: int
    wants_graph: int
    kind: int
    digest: int
    epoch: int


class RankExchange:
    """The exchanges of one group of ranks.

    Args:
        group: A process group connected on the CPU, such as one of gloo.

    Attributes:
        group: The argument.
        ranks: The ranks of the group among all processes.
    """

    def __init__(self, group: "dist.ProcessGroup") -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self._epoch = 0
        # Packing into the memory of the tensors takes a few microseconds less than operators on them.
        self._mine = bytearray(_NUMBERS.size)
        self._all = bytearray(_NUMBERS.size * len(self.ranks))
        with torch.inference_mode(mode=False):  # tensors made in it could not be written outside
            self._sent = torch.frombuffer(self._mine, dtype=torch.int64)
            self._received = torch.frombuffer(self._all, dtype=torch.int64)

    def tell(
        self,
        action: str,
        *,
        tokens: int = 0,
        requests: int = 0,
        mode: int = 0,
        wants_graph: bool = True,
        digest: int = 0,
        place: str = "",
        hint: str = _HELP,
    ) -> list[RankStep]:
        """Exchange what this rank is about to do; return what every rank does, in the group's order.

        Args:
            action: What it does, such as ``step decode``. It has to be the same on all ranks.
            tokens: Real tokens of its batch.
            requests: Requests of its batch.
            mode: What it proposes; ranks may differ.
            wants_graph: Whether it can replay a graph.
            digest: Checksum of a detail that the caller compares.
            place: Where in the code, for the error; it may differ.
            hint: What to do about the error.

        Raises:
            RankError: The ranks are about to do different things. All ranks raise it, with the same text.
            RuntimeError: A rank did not take part in time, or has ended; see `RankWatch.explained`.
        """
        kind, epoch = checksum(action), self._epoch
        _NUMBERS.pack_into(self._mine, 0, tokens, requests, mode, wants_graph, kind, digest, epoch)
        all_gather(self._received, self._sent, group=self.group)
        self._epoch = epoch + 1
        steps = [RankStep(*numbers) for numbers in _NUMBERS.iter_unpack(self._all)]
        for step in steps:
            if step.kind != kind or step.epoch != epoch:
                texts = self.texts(f"{action}{place and f', at {place}'}, exchange {epoch}")
                raise RankError(
                    f"the ranks are about to do different things: {texts}", hint=hint, rule="GP17"
                )
        return steps

    def objects(self, mine: Any) -> list[Any]:
        """Return what every rank gives, in the group's order. All ranks call it at the same place."""
        gathered: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(gathered, mine, group=self.group)
        return gathered

    def texts(self, mine: str) -> str:
        """Return ``rank 0: ...; rank 1: ...`` from what every rank says."""
        return said_by(self.ranks, self.objects(mine))


def said_by(ranks: Sequence[int], texts: Sequence[str]) -> str:
    """Return the texts of ranks in one line; ranks with the same text are named together."""
    of_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        of_text.setdefault(text, []).append(rank)
    return "; ".join(f"{ranks_named(who)}: {text}" for text, who in of_text.items())


@functools.lru_cache(maxsize=1024)
def checksum(text: str) -> int:
    """Return a checksum of ``text``; 0 for an empty text."""
    return zlib.crc32(text.encode()) if text else 0
