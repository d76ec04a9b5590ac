"""Write FlashInfer's packed mask for drafts with branches (top-k > 1)."""

import torch

from graphpact.errors import KernelRefusal
from graphpact_kernels import _library
from graphpact_kernels._library import define_kernel

__tracebackhide__ = True  # a driver names the line that calls a kernel


def _bits(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    first_key: torch.Tensor,
    kv_lens: torch.Tensor,
    sliding_window: int,
    request: torch.Tensor,
    bit: torch.Tensor,
) -> torch.Tensor:
    """Return whether bit number ``bit`` of each ``request`` is set; bits past the last query are zero."""
    width = tree_mask.shape[1]
    length = kv_lens[request].clamp(min=1)
    row = bit // length
    there = row < width
    query = request * width + row.clamp(max=width - 1)
    draft = bit % length + first_key[request] - seq_lens[request]  # negative inside the sequence
    inside = draft.clamp(min=0, max=width - 1)
    seen = (draft < 0) | tree_mask[query, inside]
    if sliding_window:
        depth = tree_mask.sum(dim=1)  # of each draft token, itself included
        depth_of_key = torch.where(draft < 0, draft + 1, depth[request * width + inside])
        seen = seen & (depth_of_key > depth[query] - sliding_window)
    return seen & there


def _pack_tree_mask(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    first_key: torch.Tensor,
    kv_lens: torch.Tensor,
    sliding_window: int,
    mask_indptr: torch.Tensor,
    out: torch.Tensor,
) -> None:
    num_bytes = (kv_lens * tree_mask.shape[1] + 7) // 8
    mask_indptr[:1].zero_()
    torch.cumsum(num_bytes, dim=0, dtype=mask_indptr.dtype, out=mask_indptr[1:])
    if not len(seq_lens):
        return
    size = out.shape[0]
    if _library.may_read(out):
        size = int(mask_indptr[-1])
        if size > out.shape[0]:
            raise KernelRefusal(f"the mask has {out.shape[0]} bytes, this batch needs {size}", rule="GP13")
    byte = torch.arange(size, dtype=mask_indptr.dtype, device=out.device)
    request = torch.searchsorted(mask_indptr[1:], byte, right=True)
    request = request.clamp_(max=len(seq_lens) - 1)
    lane = torch.arange(8, device=out.device)
    bit = (byte - mask_indptr[request])[:, None] * 8 + lane
    seen = _bits(tree_mask, seq_lens, first_key, kv_lens, sliding_window, request[:, None].expand(-1, 8), bit)
    out[:size].copy_((seen.to(torch.uint8) << lane.to(torch.uint8)).sum(dim=1))


_pack = define_kernel(
    "pack_tree_mask(Tensor tree_mask, Tensor seq_lens, Tensor first_key, Tensor kv_lens,"
    " int sliding_window, Tensor(a!) mask_indptr, Tensor(b!) out) -> ()",
    _pack_tree_mask,
)


def pack_tree_mask(
    tree_mask: torch.Tensor,
    *,
    seq_lens: torch.Tensor,
    first_key: torch.Tensor,
    kv_lens: torch.Tensor,
    mask_indptr: torch.Tensor,
    out: torch.Tensor,
    sliding_window: int | None = None,
) -> None:
    """Write which keys each draft token sees, as FlashInfer's ``packed_custom_mask``.

    A draft token sees the whole sequence before the drafts, and the drafts that ``tree_mask`` allows. A
    sliding window counts positions: the position of a draft token after the sequence is the number of drafts
    that it sees.

    Args:
        tree_mask: ``[bs * w, w]`` bool: which drafts of its request each draft token sees, itself included.
        seq_lens: ``[bs]`` int64: keys of each sequence, without drafts.
        first_key: ``[bs]`` int64: the position of the first key that the kernel gets.
        kv_lens: ``[bs]`` int64: how many keys it gets, drafts included.
        mask_indptr: ``[bs + 1]`` int32, written: where each request's bytes begin.
        out: ``[capacity]`` uint8, written: ``w * kv_lens`` bits of each request, lowest bit first.
        sliding_window: Keys that a query sees, its own included; None for all.

    Raises:
        KernelRefusal: ``out`` is too small (checked on a CPU).
    """
    _pack(tree_mask, seq_lens, first_key, kv_lens, sliding_window or 0, mask_indptr, out)
