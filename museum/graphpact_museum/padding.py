"""Exhibits of the contents, the number and the effects of padding rows: GP03 to GP06.

Each is one edit of a correct attention backend. An edit finds live rows by the means of a real engine:
request row 0, which is reserved, or the lengths on the host.

Does not: run exhibits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpact.buffers import GraphSlot
from graphpact.hookspecs import hookimpl
from graphpact_museum.edits import Attended, after_attention, there, workspace
from graphpact_museum.exhibit import Exhibit, Make


def _live(view: Any, rows: int) -> torch.Tensor:
    """Return ``[rows]`` bool: which rows, of requests or of tokens, are a request's that is there."""
    live: torch.Tensor = view.req_pool_indices > 0
    return live.repeat_interleave(rows // max(len(live), 1), output_size=rows)


def _on_rows(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a mask of rows in as many axes as ``like`` has."""
    return mask.view(-1, *[1] * (like.dim() - 1))


def _itself(metadata: Any) -> Any:
    return metadata


# -- GP03: stale rows --------------------------------------------------------------------------------


def _skips_padded(*names: str, part: Callable[[Any], Any] = _itself) -> Make:
    """Return a factory of backends that do not write the padding rows of the named tensors."""

    def make(base: type[Any]) -> type[Any]:
        class SkipsPadded(base):  # type: ignore[misc]
            """Writes the rows of live requests alone."""

            def fill_metadata(self, view: Any, metadata: Any) -> None:
                """Write all, and put back what padded rows held."""
                tensors = [getattr(part(metadata), name) for name in names]
                before = [t.clone() for t in tensors]
                super().fill_metadata(view, metadata)
                for tensor, old in zip(tensors, before, strict=True):
                    live = _live(view, len(tensor))
                    tensor.copy_(torch.where(_on_rows(live, tensor), tensor, old))

        return SkipsPadded

    return make


def _with_new_tokens(view: Any) -> int:
    return int((view.extend_seq_lens_cpu > 0).sum())


def _copies_the_head(*names: str) -> Make:
    """Return a factory of backends whose replay writes only the live rows of the named tensors."""

    def make(base: type[Any]) -> type[Any]:
        class CopiesTheHead(base):  # type: ignore[misc]
            """Has a replay hook that keeps tails."""

            fill_is_device_only = False

            @hookimpl
            def init_metadata_replay(self, view: Any, shape: Any, captured: Any) -> Any:
                """Write the head, and keep the tail."""
                real = _with_new_tokens(view)
                tails = [getattr(captured, name)[real:] for name in names]
                before = [t.clone() for t in tails]
                fresh = super().init_metadata_replay(view, shape, captured)
                for tail, old in zip(tails, before, strict=True):
                    tail.copy_(old)
                return fresh

        return CopiesTheHead

    return make


def _keeps_pages_of_the_fake_request(base: type[Any]) -> type[Any]:
    class KeepsPagesOfTheFakeRequest(base):  # type: ignore[misc]
        """The entries behind the real requests' pages are not set to scratch."""

        def fill_metadata(self, view: Any, metadata: Any) -> None:
            """Fill, and put back what was behind the real pages."""
            sets = [metadata, *metadata.windows.values()] if view.batch_size else []
            before = [each.kv_indices.clone() for each in sets]
            super().fill_metadata(view, metadata)
            for each, old in zip(sets, before, strict=True):
                at = torch.arange(len(old), device=old.device)
                kept = torch.where(at < each.kv_indptr[-2], each.kv_indices, old)
                each.kv_indices.copy_(kept)

    return KeepsPagesOfTheFakeRequest


def _keeps_owners_of_padded_tokens(base: type[Any]) -> type[Any]:
    class KeepsOwnersOfPaddedTokens(base):  # type: ignore[misc]
        """A backend that writes the request index only for live tokens."""

        def fill_request(self, view: Any, request: torch.Tensor) -> None:
            """Fill, and put back what was behind the last request's tokens."""
            before = request.clone()
            super().fill_request(view, request)
            at = torch.arange(len(request), device=request.device)
            request.copy_(torch.where(at < view.extend_seq_lens.sum(), request, before))

    return KeepsOwnersOfPaddedTokens


_STALE = [
    Exhibit(
        name="fa3-page-table-skips-padded-requests",
        rule="GP03",
        thread="SJTU-DENG-Lab/Diffulex#44",
        planted="Rows of the page table that belong to no request keep the pages of an earlier batch.",
        base="fa3",
        lanes=("decode",),
        make=_skips_padded("page_table"),
    ),
    Exhibit(
        name="fa3-replay-hook-copies-as-many-rows-as-requests",
        rule="GP03",
        thread="vllm-project/vllm#21196",
        planted="The replay hook writes page table and lengths only for live requests, and no padding row.",
        base="fa3",
        lanes=("extend",),
        make=_copies_the_head("page_table", "cache_seqlens"),
    ),
    Exhibit(
        name="fa3-tree-rows-skip-padded-tokens",
        rule="GP03",
        thread="sgl-project/sglang#25512",
        planted="The drafts' page table keeps, for padded tokens, the slots of an earlier batch's drafts.",
        base="fa3",
        lanes=("draft_decode_tree",),
        make=_skips_padded("page_table", part=lambda m: m.tree.drafts),
    ),
    Exhibit(
        name="flashinfer-kv-indices-keep-their-tail",
        rule="GP03",
        thread="SJTU-DENG-Lab/Diffulex#44",
        planted="kv_indices is not cleared after the live pages, at the pages of the fake request.",
        base="flashinfer",
        lanes=("mixed",),
        make=_keeps_pages_of_the_fake_request,
    ),
    Exhibit(
        name="flashinfer-last-page-lengths-skip-padded-requests",
        rule="GP03",
        thread="sgl-project/sglang#10892",
        planted="kv_last_page_len is written only for live requests, and for no padding row.",
        base="flashinfer",
        lanes=("extend",),
        make=_copies_the_head("kv_last_page_len"),
    ),
    Exhibit(
        name="trtllm-block-table-skips-padded-requests",
        rule="GP03",
        thread="SJTU-DENG-Lab/Diffulex#44",
        planted="Rows of the block table that belong to no request keep the pages of an earlier batch.",
        base="trtllm_mla",
        lanes=("draft_extend",),
        make=_skips_padded("block_kv_indices"),
    ),
    Exhibit(
        name="trtllm-key-lengths-skip-padded-requests",
        rule="GP03",
        thread="sgl-project/sglang#18647",
        planted="seq_lens_k of padding requests keeps the lengths of an earlier batch.",
        base="trtllm_mla",
        lanes=("draft_decode",),
        make=_skips_padded("seq_lens_k"),
    ),
    Exhibit(
        name="reference-owners-of-padded-tokens-are-kept",
        rule="GP03",
        thread="sgl-project/sglang#23037",
        planted="The request index of a padding token is left from an earlier batch.",
        base="reference",
        lanes=("extend",),
        make=_keeps_owners_of_padded_tokens,
    ),
]


# -- GP04: sentinels ---------------------------------------------------------------------------------


def _writes(to: Callable[[Any, torch.Tensor], torch.Tensor]) -> Make:
    """Return a factory of backends in which padding tokens, those of KV slot 0, write another slot."""

    def make(base: type[Any]) -> type[Any]:
        class WritesElsewhere(base):  # type: ignore[misc]
            """Routes slot 0."""

            def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
                """Attend with other slots to write."""
                slots = metadata.out_cache_loc
                routed = torch.where(slots == 0, to(self, slots), slots)
                routed = replace(metadata, out_cache_loc=routed)
                return super().forward(q, k, v, layer, routed)

        return WritesElsewhere

    return make


def _last_slot(backend: Any, slots: torch.Tensor) -> torch.Tensor:
    num_slots: int = backend.context.kv_cache.k[0].shape[0]
    return torch.full_like(slots, -1) % num_slots


def _first_token_s(backend: Any, slots: torch.Tensor) -> torch.Tensor:
    del backend
    return slots[:1].expand_as(slots)


def _reads(of: Callable[[Any, Any, torch.Tensor], torch.Tensor], name: str) -> Make:
    """Return a factory of backends that give padding requests another row of a table."""

    def make(base: type[Any]) -> type[Any]:
        class ReadsElsewhere(base):  # type: ignore[misc]
            """Fills a table, and the rows of padded requests otherwise."""

            def fill_metadata(self, view: Any, metadata: Any) -> None:
                """Fill, and put something else into padded rows."""
                super().fill_metadata(view, metadata)
                table = getattr(metadata, name)
                live = _on_rows(_live(view, len(table)), table)
                table.copy_(torch.where(live, table, of(self, view, table)))

        return ReadsElsewhere

    return make


def _last_page(backend: Any, view: Any, table: torch.Tensor) -> torch.Tensor:
    del view
    pages: int = backend.context.kv_cache.k[0].shape[0] // backend.context.limits.page_size
    return torch.full_like(table, -1) % pages


def _first_request_s(backend: Any, view: Any, table: torch.Tensor) -> torch.Tensor:
    del backend, view
    return table[:1].expand_as(table)


def _fills_with(length: int) -> Make:
    def make(base: type[Any]) -> type[Any]:
        class FillsWith(base):  # type: ignore[misc]
            """Declares another length of padded rows."""

            capabilities = replace(base.capabilities, seq_len_fill_value=length)

        return FillsWith

    return make


def _gathers_the_last_row(base: type[Any]) -> type[Any]:
    class GathersTheLastRow(base):  # type: ignore[misc]
        """-1 stands for no request, and is used as an index."""

        def fill_metadata(self, view: Any, metadata: Any) -> None:
            """Mark padded requests by -1 and gather."""
            rows = torch.where(view.req_pool_indices > 0, view.req_pool_indices, -1)
            super().fill_metadata(replace(view, req_pool_indices=rows), metadata)

    return GathersTheLastRow


def _first_row_for_padding(base: type[Any]) -> type[Any]:
    class FirstRowForPadding(base):  # type: ignore[misc]
        """Padded requests are copies of the first one."""

        def fill_metadata(self, view: Any, metadata: Any) -> None:
            """Take the first request's row where there is none."""
            rows = view.req_pool_indices
            super().fill_metadata(
                replace(view, req_pool_indices=torch.where(rows > 0, rows, rows[:1])), metadata
            )

    return FirstRowForPadding


_SENTINELS = [
    Exhibit(
        name="fa3-padded-tokens-write-the-last-slot",
        rule="GP04",
        thread="vllm-project/vllm#43810",
        planted="-1 stands for no slot, but as an index it is the last KV slot.",
        base="fa3",
        lanes=("decode",),
        make=_writes(_last_slot),
    ),
    Exhibit(
        name="flashinfer-padded-tokens-write-a-live-slot",
        rule="GP04",
        thread="m0at/rvllm#32",
        planted="Padded tokens write where the first token of the batch does.",
        base="flashinfer",
        lanes=("target_verify",),
        make=_writes(_first_token_s),
    ),
    Exhibit(
        name="trtllm-padded-tokens-write-a-live-slot",
        rule="GP04",
        thread="sgl-project/sglang#38997",
        planted="Padded tokens of a prefill write where the first token of the batch does.",
        base="trtllm_mla",
        lanes=("extend",),
        make=_writes(_first_token_s),
    ),
    Exhibit(
        name="flashinfer-fill-length-0",
        rule="GP04",
        thread="sgl-project/sglang#1469",
        planted="seq_len_fill_value is 0, but a causal row needs at least as many keys as queries.",
        base="flashinfer",
        lanes=("decode",),
        make=_fills_with(0),
    ),
    Exhibit(
        name="trtllm-block-table-of-padding-is-the-last-page",
        rule="GP04",
        thread="vllm-project/vllm#35969",
        planted="The block table of padded requests is -1, which wraps around to the last page.",
        base="trtllm_mla",
        lanes=("target_verify",),
        make=_reads(_last_page, "block_kv_indices"),
    ),
    Exhibit(
        name="fa3-idle-rank-gathers-row-minus-one",
        rule="GP04",
        thread="vllm-project/vllm#43810",
        planted="On an idle rank all requests are padding; marked by -1, they gather the last row.",
        base="fa3",
        lanes=("idle",),
        make=_gathers_the_last_row,
    ),
    Exhibit(
        name="fa3-padded-requests-repeat-the-first",
        rule="GP04",
        thread="NVIDIA/TensorRT-LLM#9873",
        planted="The page table of padded requests is the first request's.",
        base="fa3",
        lanes=("draft_extend",),
        make=_reads(_first_request_s, "page_table"),
    ),
    Exhibit(
        name="flashinfer-padded-branches-repeat-the-first-request",
        rule="GP04",
        thread="NVIDIA/TensorRT-LLM#9873",
        planted="Padded requests have the first request's row of req_to_token.",
        base="flashinfer",
        lanes=("draft_decode_tree",),
        make=_first_row_for_padding,
    ),
    Exhibit(
        name="reference-padded-requests-gather-row-minus-one",
        rule="GP04",
        thread="vllm-project/vllm#43810",
        planted="-1 stands for no request, and gathers the last row of req_to_token.",
        base="reference",
        lanes=("draft_decode",),
        make=_gathers_the_last_row,
    ),
]


# -- GP05: extents -----------------------------------------------------------------------------------


def _no_fake_request(base: type[Any]) -> type[Any]:
    class NoFakeRequest(base):  # type: ignore[misc]
        """A backend without the fake request for padding tokens."""

        def _fill_ragged_queries(self, view: Any, metadata: Any) -> torch.Tensor:
            """End the last offset where the real tokens end."""
            num_q: torch.Tensor = super()._fill_ragged_queries(view, metadata)
            metadata.qo_indptr[-1:].copy_(metadata.qo_indptr[-2:-1])
            return torch.cat([num_q[:-1], torch.zeros_like(num_q[-1:])])

    return NoFakeRequest


def _fake_request_without_keys(base: type[Any]) -> type[Any]:
    class FakeRequestWithoutKeys(base):  # type: ignore[misc]
        """The fake request counts among the queries and not among the keys."""

        def _fill_ragged_queries(self, view: Any, metadata: Any) -> torch.Tensor:
            """Return no key for it."""
            num_q: torch.Tensor = super()._fill_ragged_queries(view, metadata)
            return torch.cat([num_q[:-1], torch.zeros_like(num_q[-1:])])

    return FakeRequestWithoutKeys


def _counts_live_queries(base: type[Any]) -> type[Any]:
    class CountsLiveQueries(base):  # type: ignore[misc]
        """Offsets of queries end, at replay, where those of live requests do."""

        fill_is_device_only = False

        @hookimpl
        def init_metadata_replay(self, view: Any, shape: Any, captured: Any) -> Any:
            """Refresh, and let padded requests bring no query."""
            fresh = super().init_metadata_replay(view, shape, captured)
            real = (view.req_pool_indices > 0).sum() * view.tokens_per_request
            fresh.qo_indptr.clamp_(max=real)
            return fresh

    return CountsLiveQueries


def _cut_by_the_batch(name: str, more: int = 0) -> Make:
    """Return a factory of backends that slice a tensor at replay to the rows of the batch."""

    def make(base: type[Any]) -> type[Any]:
        class CutByTheBatch(base):  # type: ignore[misc]
            """Cuts one tensor at replay."""

            fill_is_device_only = False

            @hookimpl
            def init_metadata_replay(self, view: Any, shape: Any, captured: Any) -> Any:
                """Refresh, and cut."""
                fresh = super().init_metadata_replay(view, shape, captured)
                rows = _with_new_tokens(view) + more
                return replace(fresh, **{name: getattr(fresh, name)[:rows]})

        return CutByTheBatch

    return make


def _padding_is_the_last_request_s(name: str) -> Make:
    """Return a factory of backends that count all padding tokens as tokens of the last request."""

    def make(base: type[Any]) -> type[Any]:
        class PaddingIsTheLastRequests(base):  # type: ignore[misc]
            """Ends the last request where the graph's rows end."""

            def fill_metadata(self, view: Any, metadata: Any) -> None:
                """Fill, and end the last request at the last row."""
                super().fill_metadata(view, metadata)
                getattr(metadata, name)[-1:].fill_(view.num_tokens)

        return PaddingIsTheLastRequests

    return make


def _positions_from_the_last_row(base: type[Any]) -> type[Any]:
    class PositionsFromTheLastRow(base):  # type: ignore[misc]
        """A backend that counts visible positions back from the last row of the graph."""

        def last_of(self, view: Any, request: torch.Tensor) -> torch.Tensor:
            """Let the last request end at the last row."""
            new = view.extend_seq_lens
            rest = view.num_tokens - new[:-1].sum()
            last: torch.Tensor = super().last_of(
                replace(view, extend_seq_lens=torch.cat([new[:-1], rest[None]])), request
            )
            return last.clamp(min=0)

    return PositionsFromTheLastRow


_EXTENTS = [
    Exhibit(
        name="flashinfer-extend-without-the-fake-request",
        rule="GP05",
        thread="sgl-project/sglang#21452",
        planted="qo_indptr[-1] counts real tokens, while q has a row for each padded one too.",
        base="flashinfer",
        lanes=("extend",),
        make=_no_fake_request,
    ),
    Exhibit(
        name="flashinfer-fake-request-has-queries-and-no-keys",
        rule="GP05",
        thread="sgl-project/sglang#21452",
        planted="The fake request is counted in qo_indptr, and has no page in kv_indptr.",
        base="flashinfer",
        lanes=("mixed",),
        make=_fake_request_without_keys,
    ),
    Exhibit(
        name="flashinfer-verify-counts-live-queries",
        rule="GP05",
        thread="ROCm/ATOM#1595",
        planted="qo_indptr counts the queries of live requests, while q has those of padded ones too.",
        base="flashinfer",
        lanes=("target_verify",),
        make=_counts_live_queries,
    ),
    Exhibit(
        name="fa3-offsets-cut-by-real-requests",
        rule="GP05",
        thread="vllm-project/vllm#28202",
        planted="The replay hook returns cu_seqlens_q for the real requests, the graph has padded ones.",
        base="fa3",
        lanes=("mixed",),
        make=_cut_by_the_batch("cu_seqlens_q", 1),
    ),
    Exhibit(
        name="trtllm-key-lengths-cut-by-real-requests",
        rule="GP05",
        thread="vllm-project/vllm#25265",
        planted="The replay hook returns seq_lens_k for the real requests, the graph has padded ones.",
        base="trtllm_mla",
        lanes=("extend",),
        make=_cut_by_the_batch("seq_lens_k"),
    ),
    Exhibit(
        name="trtllm-padded-tokens-are-the-last-request-s",
        rule="GP05",
        thread="vllm-project/vllm-ascend#7460",
        planted="cu_seqlens_q ends at the padded count, so that the last request has all padded tokens.",
        base="trtllm_mla",
        lanes=("mixed",),
        make=_padding_is_the_last_request_s("cu_seqlens_q"),
    ),
    Exhibit(
        name="reference-positions-count-from-the-last-row",
        rule="GP05",
        thread="sgl-project/sglang#1789",
        planted="Positions of the last request are counted back from the padded number of tokens.",
        base="reference",
        lanes=("extend",),
        make=_positions_from_the_last_row,
    ),
]


# -- GP06: leaks -------------------------------------------------------------------------------------


def _quantized_by_the_largest(out: torch.Tensor) -> torch.Tensor:
    """Return rows that went through the scale of all of them, as a per-tensor quantization does."""
    scale = out.abs().amax()
    return (out / scale) * scale


def _unwritten_on_scratch(_: Any, call: Attended) -> torch.Tensor:
    written = _tokens_of(call.metadata.page_table[:, 0] > 0, call)
    return _quantized_by_the_largest(_written_where(written, call.out))


def _unwritten_on_padding(_: Any, call: Attended) -> torch.Tensor:
    """Leave the rows of padding requests as they were allocated, and do no work across rows."""
    return _written_where(_tokens_of(call.metadata.page_table[:, 0] > 0, call), call.out)


def _unwritten_past_the_last_offset(_: Any, call: Attended) -> torch.Tensor:
    written = torch.arange(len(call.q), device=call.q.device) < call.metadata.cu_seqlens_q[-1]
    rows = _written_where(written, call.out)
    total = rows.abs().sum()
    return torch.where(total.isfinite(), rows, total)


def _tokens_of(requests: torch.Tensor, call: Attended) -> torch.Tensor:
    """Return for each token what ``requests`` says of its request, where all bring as many."""
    rows = len(call.out)
    return requests.repeat_interleave(rows // len(requests), output_size=rows)


def _written_where(mask: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return uninitialised memory with ``out`` written where ``mask`` is set."""
    empty = torch.empty_like(out)
    return empty.copy_(torch.where(_on_rows(mask, out), out, empty))


def _an_output(backend: Any) -> Sequence[GraphSlot]:
    """Return a buffer that is zero from the start and never again."""
    layer, most = backend.context.layers[0], backend.context.limits.max_num_tokens
    shape = (most, layer.num_q_heads, layer.v_head_dim)
    return [workspace("output", *shape, dtype=backend.context.dtype)]


def _keeps_an_output(backend: Any, call: Attended) -> torch.Tensor:
    """Write the rows that are not on scratch into one buffer, and scale by its largest."""
    out = call.out
    if backend._registry is None or len(out) > len(there(backend, "output")):  # noqa: SLF001  as there()
        return out
    live = _tokens_of(call.metadata.block_kv_indices[:, 0] > 0, call)
    kept = there(backend, "output")[: len(out)]
    kept.copy_(torch.where(_on_rows(live, out), out, kept))
    return _quantized_by_the_largest(kept)


def _centred(_: Any, call: Attended) -> torch.Tensor:
    mean = call.out.mean(dim=0)
    return (call.out - mean) + mean


def _scaled(_: Any, call: Attended) -> torch.Tensor:
    return _quantized_by_the_largest(call.out)


def _spreads_what_is_no_number(_: Any, call: Attended) -> torch.Tensor:
    total = call.out.sum()
    return torch.where(total.isfinite(), call.out, total)


_LEAKS = [
    Exhibit(
        name="fa3-empty-output-and-one-scale",
        rule="GP06",
        thread="vllm-project/vllm#37442",
        planted="The output is allocated by empty, not written for padding rows, and scaled by its maximum.",
        base="fa3",
        lanes=("decode",),
        make=after_attention(_unwritten_on_scratch),
    ),
    Exhibit(
        name="fa3-output-of-padding-is-unwritten",
        rule="GP06",
        thread="vllm-project/vllm#37442",
        planted="The kernel does not write the rows of padding requests; a model that takes one scale of all"
        " rows reads them.",
        base="fa3",
        lanes=("decode", "target_verify"),
        make=after_attention(_unwritten_on_padding),
    ),
    Exhibit(
        name="fa3-rows-past-the-last-offset-are-unwritten",
        rule="GP06",
        thread="vllm-project/vllm#56922",
        planted="Rows after the last offset are left uninitialised, and a sum over rows includes them.",
        base="fa3",
        lanes=("extend",),
        make=after_attention(_unwritten_past_the_last_offset),
    ),
    Exhibit(
        name="trtllm-output-buffer-keeps-padded-rows",
        rule="GP06",
        thread="vllm-project/vllm#37442",
        planted="An output buffer keeps earlier values in padding rows, and the output is scaled by its"
        " maximum.",
        base="trtllm_mla",
        lanes=("target_verify",),
        make=after_attention(_keeps_an_output, _an_output),
    ),
    Exhibit(
        name="trtllm-one-scale-for-all-rows",
        rule="GP06",
        thread="vllm-project/vllm#37442",
        planted="Live rows are quantized by one scale of all rows, including padding rows.",
        base="trtllm_mla",
        lanes=("draft_extend",),
        make=after_attention(_scaled),
    ),
    Exhibit(
        name="flashinfer-mean-over-all-branches",
        rule="GP06",
        thread="sgl-project/sglang#35766",
        planted="The mean over rows includes padding branches.",
        base="flashinfer",
        lanes=("draft_decode_tree",),
        make=after_attention(_centred),
    ),
    Exhibit(
        name="flashinfer-one-bad-padded-row-spoils-all",
        rule="GP06",
        thread="vllm-project/vllm#39391",
        planted="A sum over all rows spreads the NaN of a padding row.",
        base="flashinfer",
        lanes=("mixed",),
        make=after_attention(_spreads_what_is_no_number),
    ),
    Exhibit(
        name="reference-one-scale-for-all-drafts",
        rule="GP06",
        thread="sgl-project/sglang#31838",
        planted="Drafts of all requests, including padding requests, are quantized by one scale.",
        base="reference",
        lanes=("target_verify_tree",),
        make=after_attention(_scaled),
    ),
]

EXHIBITS = [*_STALE, *_SENTINELS, *_EXTENTS, *_LEAKS]
"""All exhibits of this room, in the order of their rules."""
