"""`FlashInferBackend`: FlashInfer's index tensors, filled by one function at capture, replay and eager steps.

Index tensors and masks are computed on the device only, so a graph can record that work. Plans are made on
the host before every replay, from host lengths.

Does not: attend; see `graphpact_flashinfer.kernels`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpact import (
    AttentionBackend,
    BackendContext,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    GraphShape,
    GraphSlot,
    LayerSpec,
    Limits,
    metadata_slot,
)
from graphpact.attention import Buffers, GraphSupport, HeadLayout, new_kv
from graphpact.errors import EngineError
from graphpact_flashinfer.kernels import CompiledKernels, FlashInferKernels, PortableKernels, max_chunks
from graphpact_flashinfer.metadata import FlashInferMetadata, PagedIndices, PlanArguments
from graphpact_flashinfer.native import NativeKernels
from graphpact_flashinfer.rows import Rows, num_rows
from graphpact_kernels import (
    AttendCall,
    ScoreOptions,
    fill_paged_indices,
    first_page,
    pack_tree_mask,
    write_indptr,
    write_kv_cache,
)


def _covers_keys(
    backend: "FlashInferBackend", view: ForwardBatch, metadata: FlashInferMetadata
) -> bool | None:
    """Return whether every plan covers the keys on the device; None if the kernels' plans are opaque."""
    here = replace(view, seq_lens_cpu=view.seq_lens.cpu())
    if view.forward_mode.is_ragged:
        here = replace(here, extend_seq_lens_cpu=view.required_extend_lens()[0].cpu())
    rows = Rows.of(here, metadata.page_size)
    sets = [(None, metadata), *metadata.windows.items()]
    said = [
        backend.kernels.covers(indices.plan, rows.within(window, indices.page_size))
        for window, indices in sets
    ]
    return None if None in said else all(said)


class FlashInferBackend(AttentionBackend):
    """The attention backend with FlashInfer's metadata, on native or portable kernels."""

    capabilities = Capabilities(
        modes=frozenset(ForwardMode),
        graph_support=GraphSupport.ALWAYS,
        dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16}),
        devices=frozenset({"cpu", "cuda"}),
        head_layouts=frozenset({HeadLayout.MHA, HeadLayout.GQA}),
        # A padding row has one key, in scratch, because FlashInfer refuses a causal row with fewer keys
        # than queries; a length of 0 would be an error.
        seq_len_fill_value=1,
        sliding_window=True,
        softcap=True,
        sinks=True,
        trees=True,
        needs_host_plan=True,
        eager_rows="padded",  # FlashInfer checks qo_indptr[-1] == q.shape[0]
    )
    # FlashInfer serves MLA through another wrapper, with other index tensors.
    claims = {"heads mla": "not_implemented"}  # noqa: RUF012  a ClassVar there
    plan_invariants = {  # noqa: RUF012  a ClassVar there
        "the chunks of each row hold all its keys, and no plan has more chunks than its grid": _covers_keys
    }
    providers = (NativeKernels, CompiledKernels, PortableKernels)
    fill_is_device_only = True
    kernels: FlashInferKernels

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._layer_of = {layer.sliding_window: layer for layer in reversed(context.layers)}
        """One layer for each set of indices; all layers of a set share a plan."""
        self._windows = sorted(window for window in self._layer_of if window is not None)

    # -- memory ----------------------------------------------------------------------------------

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return the slots of the index tensors, int32 as FlashInfer requires, and of the plans."""
        slots = [self._by_row(_name("qo_indptr"), limits, extra=1)]
        for window in (None, *self._windows):
            slots += self._declare_set(window, limits)
        return slots

    def _by_row(self, name: str, limits: Limits, *, extra: int = 0) -> GraphSlot:
        """Return a slot with one int32 for each row, and ``extra`` more."""
        topk, mode = limits.draft.topk, self.context.mode

        def rows(bs: int) -> int:
            if mode.is_ragged:
                return bs + 1  # the fake request
            return bs * topk if mode is ForwardMode.DRAFT_DECODE else bs

        return metadata_slot(
            name,
            lambda bs, _: (max(bs + 1, bs * topk) + extra,),  # for eager steps of any mode
            torch.int32,
            role="offsets" if extra else "lengths",
            axis="bs",
            slice_fn=lambda buffer, bs: buffer[: rows(bs) + extra],
        )

    def _declare_set(self, window: int | None, limits: Limits) -> list[GraphSlot]:
        """Return the slots of one set of indices."""
        page_size, topk = limits.page_size, limits.draft.topk
        context = _most_keys(limits)
        if window is not None:  # the keys that a request's first query sees, in whole pages
            context = min(context, window + limits.max_num_tokens + page_size)
        pages = -(-context // page_size)

        def num_indices(bs: int, num_tokens: int) -> tuple[int, ...]:
            fake = -(-num_tokens // page_size)
            return (max(bs * pages + fake, bs * topk * context if topk > 1 else 0),)

        def num_mask_bytes(bs: int, num_tokens: int) -> tuple[int, ...]:
            return (num_tokens * context // 8 + bs,)

        slots = [
            self._by_row(_name("kv_indptr", window), limits, extra=1),
            metadata_slot(_name("kv_indices", window), num_indices, torch.int32, role="table"),
            self._by_row(_name("kv_last_page_len", window), limits),
        ]
        if topk > 1:
            slots += [
                self._by_row(_name("mask_indptr", window), limits, extra=1),
                metadata_slot(_name("mask", window), num_mask_bytes, torch.uint8, role="mask"),
            ]
        return [*slots, *self.kernels.declare_slots(_name("", window), limits)]

    def allocate_metadata(
        self, view: ForwardBatch, shape: GraphShape, buffers: Buffers
    ) -> FlashInferMetadata:
        """Return the metadata of ``shape``; its tensors are slices of the declared slots.

        The bounds hold for every batch of the shape. The bounds of an eager extend come from its host
        lengths, because the work of a GPU grows with them.
        """
        page_size = 1 if view.is_branched else self.context.limits.page_size
        is_own = view.forward_mode.is_ragged and not buffers.in_graph
        counted = Rows.of(view, page_size) if is_own else None
        qo_indptr = buffers(_name("qo_indptr"))[: num_rows(view) + 1]
        max_q_len = self._max_q_len(view, shape, counted)

        def indices(window: int | None) -> dict[str, Any]:
            """Return the fields of a set of indices."""
            tensors = {"qo_indptr": qo_indptr, **self._bind_set(view, window, buffers)}
            arguments = self._arguments(view, window, page_size)
            plan = self.kernels.make_plan(_name("", window), arguments, buffers, tensors)
            most = self._max_kv_len(view, shape, window)
            if counted is not None:
                most = max(counted.within(window, page_size).num_kv, default=1)
            numbers = {"page_size": page_size, "max_q_len": max_q_len, "max_kv_len": most}
            return {**tensors, **numbers, "plan": plan}

        return FlashInferMetadata(
            **indices(None),
            out_cache_loc=view.out_cache_loc,
            windows={window: PagedIndices(**indices(window)) for window in self._windows},
        )

    def _bind_set(self, view: ForwardBatch, window: int | None, buffers: Buffers) -> dict[str, torch.Tensor]:
        """Return the tensors of one set of indices, by the names of the metadata's fields."""
        rows = num_rows(view)
        tensors = {
            "kv_indptr": buffers(_name("kv_indptr", window))[: rows + 1],
            "kv_indices": buffers(_name("kv_indices", window)),
            "kv_last_page_len": buffers(_name("kv_last_page_len", window))[:rows],
        }
        if view.tree_mask is not None:
            tensors["mask"] = buffers(_name("mask", window))
            tensors["mask_indptr"] = buffers(_name("mask_indptr", window))[: rows + 1]
        return tensors

    def _max_q_len(self, view: ForwardBatch, shape: GraphShape, counted: Rows | None) -> int:
        """Return the most queries of a row in any batch of ``shape``, or of the ``counted`` rows."""
        if counted is not None:
            return max(counted.num_q, default=1)
        if view.forward_mode.is_ragged:
            return shape.num_tokens
        return 1 if view.is_branched else view.tokens_per_request

    def _max_kv_len(self, view: ForwardBatch, shape: GraphShape, window: int | None) -> int:
        """Return the most keys that a row of any batch of ``shape`` can have."""
        limits = self.context.limits
        is_ragged = view.forward_mode.is_ragged
        most = _most_keys(limits) if view.is_branched else limits.max_context_len
        if window is not None:
            queries = shape.num_tokens if is_ragged else view.tokens_per_request
            most = min(most, window + queries + limits.page_size)
        return max(most, shape.num_tokens) if is_ragged else most  # for the fake request

    def _arguments(self, view: ForwardBatch, window: int | None, page_size: int) -> PlanArguments:
        """Return the host numbers of a plan for this view."""
        layer = self._layer_of.get(window) or self.context.layers[0]
        rows = num_rows(view)
        is_masked = view.tree_mask is not None
        return PlanArguments(
            num_requests=rows,
            num_rows=view.num_tokens,
            num_qo_heads=layer.num_q_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            page_size=page_size,
            window_left=-1 if window is None or is_masked else window - 1,
            scaling=layer.scaling,
            softcap=layer.softcap or 0.0,
            is_masked=is_masked,
            max_chunks=max_chunks(rows),
        )

    def fill_metadata(self, view: ForwardBatch, metadata: FlashInferMetadata) -> None:
        """Fill index tensors and masks from lengths, request rows and the tree, on the device."""
        width = view.tokens_per_request
        lens = view.seq_lens + view.uncounted_keys if view.uncounted_keys else view.seq_lens
        requests = view.req_pool_indices
        num_q: torch.Tensor | int = width
        if view.forward_mode.is_ragged:
            num_q = self._fill_ragged_queries(view, metadata)
            # The fake request has as many keys as queries, all of them in scratch.
            lens = torch.cat([lens, num_q[-1:]])
        elif view.is_branched:
            num_q = 1
            torch.arange(view.num_tokens + 1, out=metadata.qo_indptr)
            lens = lens.repeat_interleave(width, output_size=view.num_tokens)
            requests = requests.repeat_interleave(width, output_size=view.num_tokens)
        else:
            # Uniform as at capture, for any number of accepted drafts (SGLang PR 19807).
            torch.arange(0, view.num_tokens + width, width, out=metadata.qo_indptr)
        self._fill_set(view, metadata, None, requests, lens, num_q)
        for window, indices in metadata.windows.items():
            self._fill_set(view, indices, window, requests, lens, num_q)

    def _fill_ragged_queries(self, view: ForwardBatch, metadata: FlashInferMetadata) -> torch.Tensor:
        """Fill ``qo_indptr`` of an extend; return ``[bs + 1]`` query counts, with the fake request's last."""
        num_q, _ = view.required_extend_lens()
        offsets = metadata.qo_indptr
        write_indptr(num_q, out=offsets[:-1])
        offsets[-1:].fill_(view.num_tokens)
        return torch.cat([num_q, offsets[-1:] - offsets[-2:-1]])

    def _fill_set(
        self,
        view: ForwardBatch,
        indices: PagedIndices,
        window: int | None,
        requests: torch.Tensor,
        lens: torch.Tensor,
        num_q: torch.Tensor | int,
    ) -> None:
        """Fill one set of indices: the pages that the last ``num_q`` of ``lens`` tokens see."""
        size = indices.page_size
        fill_paged_indices(
            self.context.req_to_token,
            requests,
            lens,
            num_q=num_q,
            page_size=size,
            kv_indptr=indices.kv_indptr,
            kv_indices=indices.kv_indices,
            kv_last_page_len=indices.kv_last_page_len,
            sliding_window=window,
            compiled=self.kernels.compiled,
        )
        if view.is_branched:
            _put_branches(view, indices, window)
        if view.tree_mask is not None and indices.mask is not None:
            first = torch.zeros_like(lens)
            if window is not None:
                first = first_page(lens, num_q, window, size) * size
            pack_tree_mask(
                view.tree_mask,
                seq_lens=view.seq_lens,
                first_key=first,
                kv_lens=lens - first,
                mask_indptr=_required(indices.mask_indptr),
                out=indices.mask,
                sliding_window=window,
            )

    def plan_metadata(self, view: ForwardBatch, metadata: FlashInferMetadata) -> None:
        """Make every plan again from the host lengths."""
        rows = Rows.of(view, metadata.page_size)
        self._plan(view, metadata, None, rows)
        for window, indices in metadata.windows.items():
            self._plan(view, indices, window, rows)

    def _plan(self, view: ForwardBatch, indices: PagedIndices, window: int | None, rows: Rows) -> None:
        size = indices.page_size
        indices.plan.arguments = self._arguments(view, window, size)
        self.kernels.plan(indices.plan, rows.within(window, size), self.driver)

    # -- attention -------------------------------------------------------------------------------

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: FlashInferMetadata,
    ) -> torch.Tensor:
        """Write new keys and values to their KV slots, if any, and return the attention over the pages."""
        cache = self.context.kv_cache
        k_cache, v_cache = cache.k[layer.cache_layer], cache.v[layer.cache_layer]
        new = new_kv(k, v, layer)
        if new is not None:
            where = metadata.out_cache_loc
            write_kv_cache(*new, k_cache, v_cache, where, compiled=self.kernels.compiled)
        window = layer.sliding_window
        indices = metadata if window is None else metadata.windows[window]
        return self.kernels.attend(AttendCall(q, k_cache, v_cache, indices, ScoreOptions.of(layer)))


def _most_keys(limits: Limits) -> int:
    """Return the most keys of a row; with top-k > 1, a branch adds its drafts to its sequence."""
    return limits.max_context_len + (limits.draft.num_steps if limits.draft.topk > 1 else 0)


def _name(name: str, window: int | None = None) -> str:
    """Return the name of a slot; each window has its own slots."""
    return f"flashinfer.{name}" if window is None else f"flashinfer.window{window}.{name}"


def _put_branches(view: ForwardBatch, indices: PagedIndices, window: int | None) -> None:
    """Write the KV slots of each branch after those of its sequence; the page size is 1 here."""
    slots = view.draft_cache_loc
    steps = view.uncounted_keys
    seen = steps if window is None else min(window, steps)
    mine = _required(slots)[:, steps - seen : steps]
    at = indices.kv_indptr[1:, None] - seen + torch.arange(seen, device=mine.device)
    indices.kv_indices.index_copy_(0, at.flatten().long(), mine.flatten().to(torch.int32))


def _required(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise EngineError("the metadata or batch of a draft lacks a tensor; it was made for another mode")
    return tensor
