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
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape
from graphpact_museum.edits import after_replay_hook, not_refreshed, with_spare
from graphpact_museum.exhibit import Exhibit

# -- GP01: rebound -----------------------------------------------------------------------------------


def _made_anew(base: type[Any]) -> type[Any]:
    class MadeAnew(base):  # type: ignore[misc]
        """A replay fills new tensors, made like the captured ones."""

        fill_is_device_only = False

        @hookimpl
        def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
            """Make, and fill."""
            del shape
            names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
            anew = replace(captured, **{n: torch.empty_like(getattr(captured, n)) for n in names})
            self.fill_metadata(view, anew)
            self.plan_metadata(view, anew)
            return anew

    return MadeAnew


def _cast(base: type[Any]) -> type[Any]:
    class Cast(base):  # type: ignore[misc]
        """Lengths are cast to the kernel's type, which makes a tensor."""

        fill_is_device_only = False

        def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Fill, and bind the cast lengths."""
            super().fill_metadata(view, metadata)
            lens = view.seq_lens + view.uncounted_keys
            metadata.cache_seqlens = lens.to(torch.int32)

    return Cast


def _reassign_offsets(_: Any, view: ForwardBatch, metadata: Any) -> None:
    ends = view.required_extend_lens()[0].cumsum(0).to(torch.int32)
    metadata.cu_seqlens_q = torch.nn.functional.pad(ends, (1, 0))


def _eager_at_replay(base: type[Any]) -> type[Any]:
    class EagerAtReplay(base):  # type: ignore[misc]
        """A backend that makes metadata for eager steps and replays by one function, in new memory."""

        fill_is_device_only = False

        @hookimpl
        def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
            """Make what an eager step would have."""
            del shape, captured
            return self.init_metadata_eager(view)

    return EagerAtReplay


def _held_lengths(base: type[Any]) -> type[Any]:
    class HeldLengths(base):  # type: ignore[misc]
        """Attention reads lengths from a tensor that the backend makes in every step."""

        fill_is_device_only = False
        lens: torch.Tensor

        def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Fill, and keep the lengths."""
            super().fill_metadata(view, metadata)
            self.lens = (view.seq_lens + view.uncounted_keys).to(torch.int32)

        def forward(self, *args: Any) -> torch.Tensor:
            """Attend by the lengths that are kept."""
            *rest, metadata = args
            return super().forward(*rest, replace(metadata, seq_lens_k=self.lens))  # type: ignore[no-any-return]

    return HeldLengths


def _tables_by_size(base: type[Any]) -> type[Any]:
    class TablesBySize(base):  # type: ignore[misc]
        """Tables are kept in a dictionary, and replaced there in every step."""

        fill_is_device_only = False

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.tables: dict[int, torch.Tensor] = {}

        def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Fill, and keep a table for batches of this size."""
            super().fill_metadata(view, metadata)
            self.tables[view.batch_size] = self.context.req_to_token[view.req_pool_indices].long()

        def forward(self, *args: Any) -> torch.Tensor:
            """Attend over the table of the size."""
            *rest, metadata = args
            table = self.tables[len(metadata.table)]
            return super().forward(*rest, replace(metadata, table=table))  # type: ignore[no-any-return]

    return TablesBySize


_REBOUND = [
    Exhibit(
        name="flashinfer-metadata-made-anew",
        rule="GP01",
        thread="alibaba/rtp-llm#1259",
        planted="The replay hook allocates new index tensors and fills them.",
        base="flashinfer",
        lanes=("decode",),
        make=_made_anew,
    ),
    Exhibit(
        name="fa3-lengths-cast",
        rule="GP01",
        thread="vllm-project/vllm#51994",
        planted="Every step casts lengths to int32 and binds the new tensor as cache_seqlens.",
        base="fa3",
        lanes=("target_verify",),
        make=_cast,
    ),
    Exhibit(
        name="trtllm-mla-offsets-reassigned",
        rule="GP01",
        thread="PaddlePaddle/FastDeploy#7864",
        planted="The replay hook assigns a padded cumsum to cu_seqlens_q instead of copying it.",
        base="trtllm_mla",
        lanes=("extend",),
        make=after_replay_hook(_reassign_offsets),
    ),
    Exhibit(
        name="fa3-eager-metadata-at-replay",
        rule="GP01",
        thread="sgl-project/sglang#26019",
        planted="The replay hook runs the eager path, which allocates new tensors.",
        base="fa3",
        lanes=("draft_decode",),
        make=_eager_at_replay,
    ),
    Exhibit(
        name="trtllm-mla-lengths-held",
        rule="GP01",
        thread="kekzl/imp#1648",
        planted="Attention reads a tensor of lengths that the backend replaces in every step.",
        base="trtllm_mla",
        lanes=("decode",),
        make=_held_lengths,
    ),
    Exhibit(
        name="reference-tables-by-size",
        rule="GP01",
        thread="flashinfer-ai/flashinfer#2511",
        planted="Attention reads a table from a dictionary entry that every step replaces.",
        base="reference",
        lanes=("mixed",),
        make=_tables_by_size,
    ),
]


# -- GP02: not refreshed -----------------------------------------------------------------------------


def _prefix_only(_: Any, view: ForwardBatch, metadata: Any) -> None:
    metadata.cache_seqlens.copy_(view.seq_lens - view.tokens_per_request)


def _without_windows(metadata: Any) -> Any:
    return replace(metadata, windows={})


def _without_tree(metadata: Any) -> Any:
    spare = with_spare("cache_seqlens", "page_table")
    windows = {window: spare(rows) for window, rows in metadata.tree.windows.items()}
    tree = replace(metadata.tree, drafts=spare(metadata.tree.drafts), windows=windows)
    return replace(metadata, tree=tree)


_MISSED = [
    Exhibit(
        name="fa3-prefix-only",
        rule="GP02",
        thread="sgl-project/sglang#26512",
        planted="The replay hook sets cache_seqlens without the keys of this step.",
        base="fa3",
        lanes=("draft_extend",),
        make=after_replay_hook(_prefix_only),
    ),
    Exhibit(
        name="trtllm-mla-table-not-populated",
        rule="GP02",
        thread="sgl-project/sglang#26019",
        planted="The block table is bound at capture, and no replay writes it.",
        base="trtllm_mla",
        lanes=("target_verify",),
        make=not_refreshed(with_spare("block_kv_indices"), in_graph=False),
    ),
    Exhibit(
        name="flashinfer-window-not-populated",
        rule="GP02",
        thread="sgl-project/sglang#39088",
        planted="The recorded body does not write the indices of sliding-window layers.",
        base="flashinfer",
        lanes=("draft_extend",),
        make=not_refreshed(_without_windows, in_graph=True),
    ),
    Exhibit(
        name="fa3-lengths-beside-the-buffer",
        rule="GP02",
        thread="sgl-project/sglang#26655",
        planted="The replay hook writes the lengths of a draft to a buffer that the graph does not read.",
        base="fa3",
        lanes=("draft_decode",),
        make=not_refreshed(with_spare("cache_seqlens"), in_graph=False),
    ),
    Exhibit(
        name="fa3-tree-of-capture",
        rule="GP02",
        thread="sgl-project/sglang#22832",
        planted="The recorded body does not write the rows of the draft tree.",
        base="fa3",
        lanes=("target_verify_tree",),
        make=not_refreshed(_without_tree, in_graph=True),
    ),
    Exhibit(
        name="reference-branches-of-capture",
        rule="GP02",
        thread="sgl-project/sglang#22832",
        planted="The replay hook does not write the KV slots of the branches.",
        base="reference",
        lanes=("draft_decode_tree",),
        make=not_refreshed(with_spare("drafts"), in_graph=False),
    ),
]


# -- GP07: laid out otherwise ------------------------------------------------------------------------


def _pack(view: ForwardBatch, out: torch.Tensor) -> None:
    """Write offsets of the accepted tokens alone, one request after another."""
    assert view.num_correct_drafts is not None  # noqa: S101  of a draft extend
    out[:1].zero_()
    torch.cumsum(view.num_correct_drafts + 1, 0, out=out[1 : view.batch_size + 1])


def _pack_cu_seqlens_q(_: Any, view: ForwardBatch, metadata: Any) -> None:
    _pack(view, metadata.cu_seqlens_q)


def _pack_qo_indptr(_: Any, view: ForwardBatch, metadata: Any) -> None:
    _pack(view, metadata.qo_indptr)


def _narrower_rows(_: Any, __: ForwardBatch, metadata: Any) -> None:
    table = metadata.block_kv_indices
    rows, columns = table.shape
    pages = table[:, : columns - 1].clone()
    table.zero_()
    table.view(-1)[: rows * (columns - 1)].copy_(pages.view(-1))


def _wide_numbers(_: Any, __: ForwardBatch, metadata: Any) -> None:
    table = metadata.page_table
    flat = table.clone().view(-1).long().view(torch.int32)
    table.view(-1).copy_(flat[: table.numel()])


def _column_major(_: Any, __: ForwardBatch, metadata: Any) -> None:
    table = metadata.table
    table.view(-1).copy_(table.t().reshape(-1))


_DRIFTED = [
    Exhibit(
        name="trtllm-mla-packed-queries",
        rule="GP07",
        thread="sgl-project/sglang#21987",
        planted="The replay hook packs cu_seqlens_q by accepted lengths; capture uses a uniform stride.",
        base="trtllm_mla",
        lanes=("draft_extend",),
        make=after_replay_hook(_pack_cu_seqlens_q),
    ),
    Exhibit(
        name="fa3-packed-queries",
        rule="GP07",
        thread="sgl-project/sglang#25002",
        planted="The replay hook packs cu_seqlens_q by accepted lengths; capture uses a uniform stride.",
        base="fa3",
        lanes=("draft_extend",),
        make=after_replay_hook(_pack_cu_seqlens_q),
    ),
    Exhibit(
        name="flashinfer-packed-queries",
        rule="GP07",
        thread="sgl-project/sglang#19807",
        planted="The replay hook packs qo_indptr by accepted lengths; capture uses a uniform stride.",
        base="flashinfer",
        lanes=("draft_extend",),
        make=after_replay_hook(_pack_qo_indptr),
    ),
    Exhibit(
        name="trtllm-mla-narrower-table",
        rule="GP07",
        thread="sgl-project/sglang#28028",
        planted="The replay hook writes rows of the block table with another stride than capture.",
        base="trtllm_mla",
        lanes=("target_verify",),
        make=after_replay_hook(_narrower_rows),
    ),
    Exhibit(
        name="fa3-wide-page-numbers",
        rule="GP07",
        thread="sgl-project/sglang#14654",
        planted="The replay hook writes 64-bit page numbers into memory that the kernel reads as 32-bit.",
        base="fa3",
        lanes=("decode",),
        make=after_replay_hook(_wide_numbers),
    ),
    Exhibit(
        name="reference-column-major-table",
        rule="GP07",
        thread="sgl-project/sglang#28028",
        planted="The replay hook writes the table column by column; capture writes it row by row.",
        base="reference",
        lanes=("target_verify_tree",),
        make=after_replay_hook(_column_major),
    ),
]


EXHIBITS: list[Exhibit] = [*_REBOUND, *_MISSED, *_DRIFTED]
