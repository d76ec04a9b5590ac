"""Index tensors of drafts with branches (top-k > 1): each draft token has a row of the KV slots it sees.

A sliding window counts positions. The position of a draft token is the end of the sequence plus the number
of drafts before it on its branch. So tokens of two branches share a position, and one row of slots for all of
them cannot be in the order of positions. Each row made here therefore has only the slots that its token sees.
A kernel then sees all keys of a row, in any order.

All work is on the device: the host reads nothing, and every element of the output is written.
"""

from dataclasses import dataclass

import torch

from graphpact import ForwardBatch
from graphpact_fa3.metadata import KeyRows, TreeMetadata


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The drafts of a step: ``n`` candidates for each of ``T`` tokens.

    Args:
        slots: ``[T, n]``: their KV slots.
        sees: ``[T, n]`` bool: which of them the token sees.
        depths: ``[T, n]`` or ``[n]``: their positions, relative to the end of the sequence.
        depth: ``[T]``, or one number for all tokens: the position of the token itself, relative to the end of
            the sequence.
    """

    slots: torch.Tensor
    sees: torch.Tensor
    depths: torch.Tensor
    depth: torch.Tensor | int


def _drafts_of(view: ForwardBatch) -> _Drafts:
    if view.draft_step is not None and view.draft_cache_loc is not None:
        slots = view.draft_cache_loc[:, : view.draft_step + 1]
        depths = torch.arange(view.draft_step + 1, device=view.device)
        return _Drafts(slots, torch.ones_like(slots, dtype=torch.bool), depths, view.draft_step)
    sees = view.tree_mask
    assert sees is not None  # noqa: S101  target verify with a tree has a mask
    width = sees.shape[1]
    depth = sees.sum(dim=1) - 1

    def of_request(by_token: torch.Tensor) -> torch.Tensor:
        """Return ``[T, width]``: for each token the values of all tokens of its request."""
        return by_token.view(-1, width).repeat_interleave(width, dim=0)

    return _Drafts(of_request(view.out_cache_loc), sees, of_request(depth), depth)


def fill_tree(view: ForwardBatch, req_to_token: torch.Tensor, tree: TreeMetadata) -> None:
    """Write all rows of ``tree``.

    Args:
        view: The batch, or one step of a draft.
        req_to_token: ``[rows, max_context_len]`` int32: KV slot of each position of each request row.
        tree: The index tensors to write.
    """
    drafts = _drafts_of(view)
    torch.arange(view.num_tokens + 1, out=tree.drafts.cu_seqlens_q)
    _pack(drafts.slots, drafts.sees, tree.drafts)
    if not tree.windows:
        return
    per_request = view.tokens_per_request
    lens = view.seq_lens.repeat_interleave(per_request)
    rows = view.req_pool_indices.repeat_interleave(per_request)
    for window, out in tree.windows.items():
        # Columns for the sequence come first, then those of the drafts.
        context = out.page_table.shape[1] - tree.drafts.page_table.shape[1]
        first = (lens + (drafts.depth - window + 1)).clamp_(min=0)
        position = first[:, None] + torch.arange(context, device=view.device)
        inside = position.clamp(max=req_to_token.shape[1] - 1)
        depth = drafts.depth
        last_unseen = (depth[:, None] if isinstance(depth, torch.Tensor) else depth) - window
        slots = torch.cat([req_to_token[rows[:, None], inside], drafts.slots], dim=1)
        sees = torch.cat([position < lens[:, None], drafts.sees & (drafts.depths > last_unseen)], dim=1)
        _pack(slots, sees, out)


def _pack(slots: torch.Tensor, sees: torch.Tensor, out: KeyRows) -> None:
    """Write the slots that each row sees to the front of its row of the table, followed by zeros.

    Args:
        slots: ``[T, n]``.
        sees: ``[T, n]`` bool.
        out: Every element of ``cache_seqlens`` and ``page_table`` ``[T, >= n]`` is written.
    """
    torch.sum(sees, dim=1, out=out.cache_seqlens, dtype=out.cache_seqlens.dtype)
    width = out.page_table.shape[1]
    # An extra column receives the slots that are not seen.
    table = out.page_table.new_zeros(len(slots), width + 1)
    place = torch.where(sees, sees.cumsum(dim=1) - 1, width)
    table.scatter_(1, place, slots.to(table.dtype))
    out.page_table.copy_(table[:, :width])
