"""`FA3Backend`: FlashAttention's page tables, filled by one function at capture, replay and eager steps.

All metadata is computed on the device, so a graph can record that work, and a replay then prepares nothing.
The schedule is made once a step, in one buffer, for all layers without a window.

With top-k > 1, attention has two parts, merged by their log-sum-exp: the sequence, which all queries of a
request share, and the drafts that each token sees, one row for each token. A layer with a sliding window has
one row for each token with both, because the window begins at another key for every depth.

Does not: attend; see `graphpact_fa3.kernels`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

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
from graphpact.buffers import SlotRole
from graphpact_fa3.kernels import CompiledKernels, FA3Kernels, PortableKernels
from graphpact_fa3.metadata import FA3Metadata, KeyRows, TreeMetadata
from graphpact_fa3.native import NativeKernels
from graphpact_fa3.tree import fill_tree
from graphpact_kernels import (
    PageTableCall,
    ScoreOptions,
    fill_page_table,
    merge_states,
    schedule_size,
    write_indptr,
    write_kv_cache,
)


def _counts_blocks(backend: "FA3Backend", view: ForwardBatch, metadata: FA3Metadata) -> bool | None:
    """Return whether the schedule is of this batch's lengths; None if it is a library's."""
    num_q = torch.full_like(view.seq_lens, view.tokens_per_request)
    if view.forward_mode.is_ragged:
        num_q = view.required_extend_lens()[0]
    drafts = 0 if metadata.tree is not None else view.uncounted_keys
    return backend.kernels.counts(metadata, num_q, view.seq_lens + drafts)


class FA3Backend(AttentionBackend):
    """The attention backend with FlashAttention-3's metadata, on native or portable kernels."""

    capabilities = Capabilities(
        modes=frozenset(ForwardMode),
        graph_support=GraphSupport.ALWAYS,
        dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16}),
        devices=frozenset({"cpu", "cuda"}),
        head_layouts=frozenset({HeadLayout.MHA, HeadLayout.GQA}),
        seq_len_fill_value=1,
        sliding_window=True,
        softcap=True,
        sinks=True,
        trees=True,
    )
    # FlashAttention's kernels for MLA take a second query tensor, which this backend does not pass.
    claims = {"heads mla": "not_implemented"}  # noqa: RUF012  a ClassVar there
    plan_invariants = {  # noqa: RUF012  a ClassVar there
        "the schedule has the query blocks and the key blocks of each request": _counts_blocks
    }
    providers = (NativeKernels, CompiledKernels, PortableKernels)
    fill_is_device_only = True
    kernels: FA3Kernels

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        windows = {layer.sliding_window for layer in context.layers}
        self._windows = sorted(window for window in windows if window is not None)

    # -- memory ----------------------------------------------------------------------------------

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return the slots of the index tensors, int32; those of trees only with top-k > 1."""
        pages = limits.max_pages_per_request
        slots = [
            _slot("cu_seqlens_q", lambda bs, _: (bs + 1,), "offsets"),
            _slot("cache_seqlens", lambda bs, _: (bs,), "lengths"),
            _slot("cu_seqlens_k", lambda bs, _: (bs + 1,), "offsets"),
            _slot("page_table", lambda bs, _: (bs, pages), "table"),
            metadata_slot(
                "fa3.scheduler_metadata",
                lambda bs, _: (schedule_size(bs),),
                torch.int32,
                role="plan",
            ),
        ]
        if limits.draft.topk > 1:
            slots.append(_slot("tree.cu_seqlens_q", lambda _, tokens: (tokens + 1,), "offsets"))
            for window in (None, *self._windows):
                slots += self._declare_tree(window, limits)
        return slots

    def _declare_tree(self, window: int | None, limits: Limits) -> list[GraphSlot]:
        """Return the slots with one row for each token: its window's keys, if any, then its drafts."""
        width = max(limits.draft.num_draft_tokens, limits.draft.num_steps)
        if window is not None:
            width += min(window, limits.max_context_len)
        return [
            _slot(_of_tree("cache_seqlens", window), lambda _, tokens: (tokens,), "lengths"),
            _slot(_of_tree("page_table", window), lambda _, tokens: (tokens, width), "table"),
        ]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> FA3Metadata:
        """Return the metadata of ``shape``; its tensors are slices of the declared slots.

        The bounds of a graph hold for every replay. The bounds of an eager step come from its host lengths,
        because the work of a GPU grows with them.

        Raises:
            EngineError: A ragged batch lacks its lengths.
        """
        limits, in_tree = self.context.limits, view.is_tree
        max_q, max_k = view.tokens_per_request, limits.max_context_len
        if view.forward_mode.is_ragged:
            max_q = shape.num_tokens if buffers.in_graph else _most(view.required_extend_lens()[1])
        if not buffers.in_graph:
            max_k = _most(view.seq_lens_cpu) + (0 if in_tree else view.uncounted_keys)
        pages = -(-max_k // limits.page_size)
        return FA3Metadata(
            out_cache_loc=view.out_cache_loc,
            cu_seqlens_q=buffers("fa3.cu_seqlens_q"),
            cache_seqlens=buffers("fa3.cache_seqlens"),
            cu_seqlens_k=buffers("fa3.cu_seqlens_k"),
            page_table=buffers("fa3.page_table")[:, :pages],
            page_size=limits.page_size,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            is_ragged=view.forward_mode.is_ragged,
            scheduler_metadata=buffers("fa3.scheduler_metadata"),
            tree=self._allocate_tree(buffers) if in_tree else None,
        )

    def _allocate_tree(self, buffers: Buffers) -> TreeMetadata:
        # Called once, because in an eager step each call allocates another tensor.
        cu_seqlens_q = buffers("fa3.tree.cu_seqlens_q")

        def rows(window: int | None) -> KeyRows:
            table = buffers(f"fa3.{_of_tree('page_table', window)}")
            return KeyRows(
                cu_seqlens_q=cu_seqlens_q,
                cache_seqlens=buffers(f"fa3.{_of_tree('cache_seqlens', window)}"),
                page_table=table,
                page_size=1,
                max_seqlen_q=1,
                max_seqlen_k=table.shape[1],
            )

        return TreeMetadata(drafts=rows(None), windows={w: rows(w) for w in self._windows})

    # -- the fill --------------------------------------------------------------------------------

    def fill_metadata(self, view: ForwardBatch, metadata: FA3Metadata) -> None:
        """Fill index tensors and schedule from lengths, request rows and the tree, on the device."""
        if view.forward_mode.is_ragged:
            write_indptr(view.required_extend_lens()[0], out=metadata.cu_seqlens_q)
        else:
            # The same stride for every request, as at capture, for any number of accepted drafts.
            width = view.tokens_per_request
            torch.arange(0, view.num_tokens + width, width, out=metadata.cu_seqlens_q)
        drafts = 0 if metadata.tree is not None else view.uncounted_keys
        req_to_token = self.context.req_to_token
        fill_page_table(
            req_to_token,
            view.req_pool_indices,
            view.seq_lens,
            uncounted=drafts,
            page_size=metadata.page_size,
            cache_seqlens=metadata.cache_seqlens,
            cu_seqlens_k=metadata.cu_seqlens_k,
            page_table=metadata.page_table,
            compiled=self.kernels.compiled,
        )
        metadata.schedule_len = self.kernels.schedule(metadata, causal=metadata.tree is None)
        if metadata.tree is not None:
            fill_tree(view, req_to_token, metadata.tree)

    # -- attention -------------------------------------------------------------------------------

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: FA3Metadata,
    ) -> torch.Tensor:
        """Write new keys and values to their KV slots, if any, and return the attention over the pages."""
        cache = self.context.kv_cache
        k_cache, v_cache = cache.k[layer.cache_layer], cache.v[layer.cache_layer]
        new = new_kv(k, v, layer)
        if new is not None:
            where = metadata.out_cache_loc
            write_kv_cache(*new, k_cache, v_cache, where, compiled=self.kernels.compiled)
        tree, window, sinks = metadata.tree, layer.sliding_window, layer.sinks
        is_cascade = tree is not None and window is None
        call = PageTableCall(
            q,
            k_cache,
            v_cache,
            rows=metadata if tree is None or window is None else tree.windows[window],
            options=ScoreOptions(
                layer.scaling,
                # A tree's rows have only the keys that their queries see.
                sliding_window=0 if window is None or tree is not None else window,
                softcap=layer.softcap or 0.0,
                is_causal=tree is None,
            ),
            schedule=_schedule_of(metadata) if window is None else None,
            with_lse=is_cascade or sinks is not None,
        )
        if tree is not None and is_cascade:
            out, lse = self._attend_cascade(call, tree.drafts)
        else:
            out, lse = self.kernels.attend(call)
        if sinks is None or lse is None:
            return out
        # A sink takes its share of the weights of all keys once, so it is not passed to parts of a cascade.
        return (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype)

    def _attend_cascade(
        self, call: PageTableCall[KeyRows], drafts: KeyRows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return attention over the sequence of ``call`` and over the visible drafts."""
        shared, lse = self.kernels.attend(call)
        own, own_lse = self.kernels.attend(replace(call, rows=drafts, schedule=None))
        assert lse is not None  # noqa: S101  call.with_lse
        assert own_lse is not None  # noqa: S101
        return merge_states(shared, lse, own, own_lse), torch.logaddexp(lse, own_lse)


def _schedule_of(metadata: FA3Metadata) -> torch.Tensor | None:
    """Return the part of the schedule that kernels take, or None if they take none."""
    size = metadata.schedule_len
    return metadata.scheduler_metadata[:size] if size else None


def _slot(name: str, rows: Callable[[int, int], tuple[int, ...]], role: SlotRole) -> GraphSlot:
    """Return an int32 slot with a row for each request or token of a tree; offsets have one more."""
    return metadata_slot(
        f"fa3.{name}",
        rows,
        torch.int32,
        role=role,
        axis="tokens" if name.startswith("tree.") else "bs",
        extra_rows=int(role == "offsets"),
    )


def _of_tree(name: str, window: int | None) -> str:
    """Return the name of a tree's tensor, for the drafts or for one window."""
    return f"tree.{name}" if window is None else f"tree.window{window}.{name}"


def _most(lengths: torch.Tensor) -> int:
    """Return the largest of the host lengths, or 1 if there are none."""
    return max(lengths.tolist(), default=1)
