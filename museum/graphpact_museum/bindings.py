"""Exhibits of binding, refresh and layout of metadata: GP01, GP02, GP07.

Each is an edit of a correct backend. If the bug is in a hook, the graph makes no metadata
(``fill_is_device_only = False``); otherwise the bug is in the recorded work.

Does not: contain exhibits of recorded work (see `graphpact_museum.recordings`), or of plans,
streams and host reads (see `graphpact_museum.plans`).
"""

from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.shapes import GraphShape
from graphpact_museum.edits.backends import after_replay_hook, not_refreshed, with_spare
from graphpact_museum.edits.override import override, overrides
from graphpact_museum.exhibit import exhibit

# -- GP01: rebound -----------------------------------------------------------------------------------


@exhibit("GP01", "alibaba/rtp-llm#1259", on="flashinfer", lanes="decode")
@overrides("init_metadata_replay", fill_is_device_only=False)
def flashinfer_metadata_made_anew(
    self: Any, _: Any, view: ForwardBatch, shape: GraphShape, captured: Any
) -> Any:
    """The replay hook allocates new index tensors and fills them."""
    del shape
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
    anew = replace(captured, **{n: torch.empty_like(getattr(captured, n)) for n in names})
    self.fill_metadata(view, anew)
    self.plan_metadata(view, anew)
    return anew


@exhibit("GP01", "vllm-project/vllm#51994", on="fa3", lanes="target_verify")
@overrides("fill_metadata", fill_is_device_only=False)
def fa3_lengths_cast(_: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
    """Every step casts lengths to int32 and binds the new tensor as cache_seqlens."""
    right(view, metadata)
    lens = view.seq_lens + view.uncounted_keys
    metadata.cache_seqlens = lens.to(torch.int32)


@exhibit("GP01", "PaddlePaddle/FastDeploy#7864", on="trtllm_mla", lanes="extend")
@after_replay_hook
def trtllm_mla_offsets_reassigned(_: Any, view: ForwardBatch, metadata: Any) -> None:
    """The replay hook assigns a padded cumsum to cu_seqlens_q instead of copying it."""
    ends = view.required_extend_lens()[0].cumsum(0).to(torch.int32)
    metadata.cu_seqlens_q = torch.nn.functional.pad(ends, (1, 0))


@exhibit("GP01", "sgl-project/sglang#26019", on="fa3", lanes="draft_decode")
@overrides("init_metadata_replay", fill_is_device_only=False)
def fa3_eager_metadata_at_replay(
    self: Any, _: Any, view: ForwardBatch, shape: GraphShape, captured: Any
) -> Any:
    """The replay hook runs the eager path, which allocates new tensors."""
    del shape, captured
    return self.init_metadata_eager(view)


@exhibit("GP01", "kekzl/imp#1648", on="trtllm_mla", lanes="decode")
def trtllm_mla_lengths_held(base: type[Any]) -> type[Any]:
    """Attention reads a tensor of lengths that the backend replaces in every step."""

    def fill_metadata(self: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
        right(view, metadata)
        self.lens = (view.seq_lens + view.uncounted_keys).to(torch.int32)

    def forward(self: Any, right: Any, *args: Any) -> Any:
        *rest, metadata = args
        return right(*rest, replace(metadata, seq_lens_k=self.lens))

    return override(base, fill_metadata, forward, fill_is_device_only=False)


@exhibit("GP01", "flashinfer-ai/flashinfer#2511", on="reference", lanes="mixed")
def reference_tables_by_size(base: type[Any]) -> type[Any]:
    """Attention reads a table from a dictionary entry that every step replaces."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.tables = {}

    def fill_metadata(self: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
        right(view, metadata)
        self.tables[view.batch_size] = self.context.req_to_token[view.req_pool_indices].long()

    def forward(self: Any, right: Any, *args: Any) -> Any:
        *rest, metadata = args
        table = self.tables[len(metadata.table)]
        return right(*rest, replace(metadata, table=table))

    return override(base, fill_metadata, forward, __init__=init, fill_is_device_only=False)


# -- GP02: not refreshed -----------------------------------------------------------------------------


@exhibit("GP02", "sgl-project/sglang#26512", on="fa3", lanes="draft_extend")
@after_replay_hook
def fa3_prefix_only(_: Any, view: ForwardBatch, metadata: Any) -> None:
    """The replay hook sets cache_seqlens without the keys of this step."""
    metadata.cache_seqlens.copy_(view.seq_lens - view.tokens_per_request)


def _without_windows(metadata: Any) -> Any:
    return replace(metadata, windows={})


def _without_tree(metadata: Any) -> Any:
    spare = with_spare("cache_seqlens", "page_table")
    windows = {window: spare(rows) for window, rows in metadata.tree.windows.items()}
    tree = replace(metadata.tree, drafts=spare(metadata.tree.drafts), windows=windows)
    return replace(metadata, tree=tree)


@exhibit("GP02", "sgl-project/sglang#26019", on="trtllm_mla", lanes="target_verify")
def trtllm_mla_table_not_populated(base: type[Any]) -> type[Any]:
    """The block table is bound at capture, and no replay writes it."""
    return not_refreshed(base, with_spare("block_kv_indices"), in_graph=False)


@exhibit("GP02", "sgl-project/sglang#39088", on="flashinfer", lanes="draft_extend")
def flashinfer_window_not_populated(base: type[Any]) -> type[Any]:
    """The recorded body does not write the indices of sliding-window layers."""
    return not_refreshed(base, _without_windows, in_graph=True)


@exhibit("GP02", "sgl-project/sglang#26655", on="fa3", lanes="draft_decode")
def fa3_lengths_beside_the_buffer(base: type[Any]) -> type[Any]:
    """The replay hook writes the lengths of a draft to a buffer that the graph does not read."""
    return not_refreshed(base, with_spare("cache_seqlens"), in_graph=False)


@exhibit("GP02", "sgl-project/sglang#22832", on="fa3", lanes="target_verify_tree")
def fa3_tree_of_capture(base: type[Any]) -> type[Any]:
    """The recorded body does not write the rows of the draft tree."""
    return not_refreshed(base, _without_tree, in_graph=True)


@exhibit("GP02", "sgl-project/sglang#22832", on="reference", lanes="draft_decode_tree")
def reference_branches_of_capture(base: type[Any]) -> type[Any]:
    """The replay hook does not write the KV slots of the branches."""
    return not_refreshed(base, with_spare("drafts"), in_graph=False)


# -- GP07: another layout ----------------------------------------------------------------------------


def _pack(view: ForwardBatch, out: torch.Tensor) -> None:
    """Write offsets that count only the accepted tokens of each request."""
    assert view.num_correct_drafts is not None  # noqa: S101  of a draft extend
    out[:1].zero_()
    torch.cumsum(view.num_correct_drafts + 1, 0, out=out[1 : view.batch_size + 1])


@exhibit("GP07", "sgl-project/sglang#21987", on="trtllm_mla", lanes="draft_extend", prefix="trtllm-mla")
@exhibit("GP07", "sgl-project/sglang#25002", on="fa3", lanes="draft_extend", prefix="fa3")
@after_replay_hook
def packed_queries(_: Any, view: ForwardBatch, metadata: Any) -> None:
    """The replay hook packs cu_seqlens_q by accepted lengths; capture uses a uniform stride."""
    _pack(view, metadata.cu_seqlens_q)


@exhibit("GP07", "sgl-project/sglang#19807", on="flashinfer", lanes="draft_extend")
@after_replay_hook
def flashinfer_packed_queries(_: Any, view: ForwardBatch, metadata: Any) -> None:
    """The replay hook packs qo_indptr by accepted lengths; capture uses a uniform stride."""
    _pack(view, metadata.qo_indptr)


@exhibit("GP07", "sgl-project/sglang#28028", on="trtllm_mla", lanes="target_verify")
@after_replay_hook
def trtllm_mla_narrower_table(_: Any, __: ForwardBatch, metadata: Any) -> None:
    """The replay hook writes rows of the block table with another stride than capture."""
    table = metadata.block_kv_indices
    rows, columns = table.shape
    pages = table[:, : columns - 1].clone()
    table.zero_()
    table.view(-1)[: rows * (columns - 1)].copy_(pages.view(-1))


@exhibit("GP07", "sgl-project/sglang#14654", on="fa3", lanes="decode")
@after_replay_hook
def fa3_wide_page_numbers(_: Any, __: ForwardBatch, metadata: Any) -> None:
    """The replay hook writes 64-bit page numbers into memory that the kernel reads as 32-bit."""
    table = metadata.page_table
    flat = table.clone().view(-1).long().view(torch.int32)
    table.view(-1).copy_(flat[: table.numel()])


@exhibit("GP07", "sgl-project/sglang#28028", on="reference", lanes="target_verify_tree")
@after_replay_hook
def reference_column_major_table(_: Any, __: ForwardBatch, metadata: Any) -> None:
    """The replay hook writes the table column by column; capture writes it row by row."""
    table = metadata.table
    table.view(-1).copy_(table.t().reshape(-1))
