"""`RankModel`: the suite's model with a layer that communicates, and `right_columns`, what the layer returns.

The layer does what layers of experts do. Each rank gives its share of the padded rows; an ``all_gather``
collects them, and the number of live tokens among them. Rows that these numbers call padding are masked. Each
rank is an expert for some of the rows, and an ``all_reduce`` adds up what the experts computed.

Does not: compare anything.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from graphpact.batch import ForwardBatch
from graphpact.parallel import local_num_token_non_padded
from graphpact.ranks import RankLayout
from graphpact.ranks.collectives import all_gather
from graphpact_conformance.draws.fields import GATHERED
from graphpact_conformance.experiments.real_ranks.scenes import PADDING_ID
from graphpact_conformance.model import Model

WIDTH = 4
"""Columns of attention that the layer reads, and columns that it returns."""
_HUGE = 1e6
"""The factor of the weights of `PADDING_ID`: a padding row that is not masked changes every result."""


class RankModel(Model):
    """The model on one rank.

    Args:
        arguments: As of `Model`.
        group: All ranks.
        layout: The place of this rank.
        more: As of `Model`.

    Attributes:
        is_eager: Whether the next region is an eager step, whose counts are on the host.
        is_alone: Whether the layer is left out, as in the oracle's run.
    """

    def __init__(self, *arguments: Any, group: dist.ProcessGroup, layout: RankLayout, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.counts = False  # the column of simulated ranks
        self.is_eager = self.is_alone = False
        self._group, self._layout = group, layout
        if self.config.case.num_steps == 1:  # later steps may draw any token
            for weight in itertools.chain.from_iterable(self.weights):
                weight[PADDING_ID] *= _HUGE

    @property
    def num_shared(self) -> int:
        """Columns of work across rows, the last ones."""
        return super().num_shared + (0 if self.is_alone else WIDTH)

    def _shared(self, batch: ForwardBatch, out: torch.Tensor, padded_tokens: int) -> list[torch.Tensor]:
        """Return the columns of work across rows, with those of the layer."""
        shared = super()._shared(batch, out, padded_tokens)
        return shared if self.is_alone else [*shared, self._experts(batch, out)]

    def _experts(self, batch: ForwardBatch, out: torch.Tensor) -> torch.Tensor:
        """Return ``[T, WIDTH]``: the sum of the experts' results, the same in every row of every rank."""
        layout, world = self._layout, self._group.size()
        rows = padded_rows(layout, [batch.num_tokens, *(batch.global_num_tokens_cpu or ())])
        share = rows // layout.attention_tensor
        mine = out.new_zeros(rows, WIDTH, dtype=torch.promote_types(out.dtype, torch.float32))
        mine[: len(out)].copy_(out[:, :WIDTH])
        mine = mine.narrow(0, layout.attention_rank * share, share)
        every = mine.new_empty(world * share, WIDTH)
        all_gather(every, mine, group=self._group)
        count = self._count(batch, rows)
        counts = count.new_empty(world)
        all_gather(counts, count, group=self._group)
        is_live = (torch.arange(share, device=out.device) < counts[:, None]).flatten()[:, None]
        live = torch.where(is_live, every + 1, 0)  # one more: eager attention leaves zeros in padding rows
        expert = dist.get_group_rank(self._group, layout.rank)
        result = live[expert::world].sum(dim=0, keepdim=True) * (expert + 1)
        dist.all_reduce(result, group=self._group)
        return (result / self._gathered(batch, rows)).to(out.dtype).expand(len(out), WIDTH)

    def _count(self, batch: ForwardBatch, rows: int) -> torch.Tensor:
        """Return ``[1]`` int32: the live tokens among this rank's rows."""
        if not self.is_eager:
            count = batch.num_token_non_padded
            return batch.input_ids.new_full((1,), rows, dtype=torch.int32) if count is None else count
        real = batch.num_token_non_padded_cpu
        local = local_num_token_non_padded(batch.num_tokens if real is None else real, rows)
        return batch.input_ids.new_full((1,), local, dtype=torch.int32)

    def _gathered(self, batch: ForwardBatch, rows: int) -> torch.Tensor | int:
        """Return the number of rows that each group gives; a graph reads it from slots."""
        counts = [] if self.is_eager else [getattr(batch, name) for name in GATHERED]
        known = [count for count in counts if count is not None]
        return torch.cat(known).float().mean() if known else rows


def padded_rows(layout: RankLayout, tokens: Sequence[int]) -> int:
    """Return the rows of each group: the most tokens of any, rounded up so that its ranks can divide them."""
    unit = layout.attention_tensor
    return -(-max(tokens) // unit) * unit


def right_columns(of_groups: Sequence[torch.Tensor], rows: int, world: int) -> torch.Tensor:
    """Return ``[WIDTH]`` float64: what the layer returns in every row.

    Args:
        of_groups: The right rows of attention of the live tokens, of each group.
        rows: The padded rows of each group.
        world: Number of ranks.
    """
    total = torch.zeros(WIDTH, dtype=torch.float64)
    for number, live in enumerate(of_groups):
        expert = (number * rows + torch.arange(len(live))) % world
        total += ((live[:, :WIDTH].double() + 1) * (expert + 1)[:, None]).sum(dim=0)
    return total / rows
