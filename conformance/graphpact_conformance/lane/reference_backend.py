"""A correct backend for every mode, as the partner of a checked runner or driver.

`ReferenceBackend` computes attention with plain torch operations. Its metadata contains a table of KV slots
by position for every request, the request and the last visible position of every token, and extra columns for
drafts. The number of key chunks is planned on the host, so that lengths on the host are read too. It has no
custom kernel and no pages.

Does not: run fast. Every request reads a whole context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graphpact.attention import (
    AttentionBackend,
    BackendContext,
    Buffers,
    Capabilities,
    GraphSupport,
    HeadLayout,
    LayerSpec,
    Limits,
    new_kv,
)
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import GraphSlot, SlotRole, metadata_slot
from graphpact.graphs import Event
from graphpact.shapes import GraphShape

CHUNK = 16
"""Number of keys in a chunk. The host plans the number of chunks."""


@dataclass(slots=True)
class ReferenceMetadata:
    """The metadata of one step.

    Args:
        out_cache_loc: ``[T]`` int64: the KV slot that each token writes.
        table: ``[bs, max_context_len]`` int64: slot of each position of each request.
        request: ``[T]`` int64: index of each token's request.
        last: ``[T]`` int64: the last position of the table that the token sees.
        drafts: ``[T, n]`` int64: slots of drafts that it may also see.
        draft_mask: ``[T, n]`` bool: the drafts that it sees; None for all.
        most: ``[bs]`` int64: number of keys of each request, including drafts, from the host.
        staging: Host memory that is copied to `most`; None in an eager step.
        width: Tokens that are next to each other and have the same slots, those of one request.
    """

    out_cache_loc: torch.Tensor
    table: torch.Tensor
    request: torch.Tensor
    last: torch.Tensor
    drafts: torch.Tensor
    draft_mask: torch.Tensor | None
    most: torch.Tensor
    staging: torch.Tensor | None = None
    width: int = 1


class ReferenceBackend(AttentionBackend):
    """A backend for every mode and head layout, with trees, windows, softcap and sinks."""

    capabilities = Capabilities(
        modes=frozenset(ForwardMode),
        graph_support=GraphSupport.ALWAYS,
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        devices=frozenset({"cpu"}),
        head_layouts=frozenset(HeadLayout),
        seq_len_fill_value=2,
        sliding_window=True,
        softcap=True,
        sinks=True,
        trees=True,
        needs_host_plan=True,
    )
    fill_is_device_only = True

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._copied: dict[int, Event] = {}
        """Events of the last copies, by the address of their host memory."""

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return slots of the five index tensors, and host memory for one."""
        width = max(limits.draft.num_steps, limits.draft.num_draft_tokens)

        def slot(name: str, role: SlotRole, *row: int, by_request: bool = False) -> GraphSlot:
            return metadata_slot(
                f"reference.{name}",
                lambda bs, tokens: (bs if by_request else tokens, *row),
                torch.int64,
                role=role,
                axis="bs" if by_request else "tokens",
            )

        return [
            slot("table", "table", limits.max_context_len, by_request=True),
            slot("request", "table"),
            slot("last", "lengths"),
            slot("drafts", "table", width),
            slot("most", "lengths", by_request=True),
            slot("staging", "staging", by_request=True),
        ]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> ReferenceMetadata:
        """Return the slices of the slots, with the draft columns of the step."""
        del shape  # the slices have it
        columns, is_alike = 0, view.extend_seq_lens is None and view.draft_step is None
        if view.draft_step is not None:
            columns = view.draft_step + 1
        elif view.tree_mask is not None:
            columns = view.tree_mask.shape[1]
        return ReferenceMetadata(
            out_cache_loc=view.out_cache_loc,
            table=buffers("reference.table"),
            request=buffers("reference.request"),
            last=buffers("reference.last"),
            drafts=buffers("reference.drafts")[:, :columns],
            draft_mask=view.tree_mask,
            most=buffers("reference.most"),
            staging=buffers("reference.staging") if buffers.in_graph else None,
            width=view.tokens_per_request if is_alike else 1,
        )

    def fill_metadata(self, view: ForwardBatch, metadata: ReferenceMetadata) -> None:
        """Derive all tensors except `most` on the device."""
        metadata.table.copy_(self.context.req_to_token[view.req_pool_indices])
        self.fill_request(view, metadata.request)
        metadata.last.copy_(self.last_of(view, metadata.request))
        if metadata.drafts.shape[1]:
            metadata.drafts.copy_(self.drafts_of(view))

    def fill_request(self, view: ForwardBatch, request: torch.Tensor) -> None:
        """Write the request of every token; padding tokens get an additional request on scratch."""
        torch.arange(view.num_tokens, out=request)
        if view.extend_seq_lens is None:
            request.div_(view.tokens_per_request, rounding_mode="floor")
        else:
            ends = view.extend_seq_lens.cumsum(0)
            request.copy_(torch.searchsorted(ends, request.clone(), right=True))

    def last_of(self, view: ForwardBatch, request: torch.Tensor) -> torch.Tensor:
        """Return ``[T]``: the last position that each token sees in its request's table."""
        at = torch.arange(view.num_tokens, device=view.device)
        if view.extend_seq_lens is not None:
            ends = view.extend_seq_lens.cumsum(0)
            ends = _with_one_more(ends, 0)[request]
            lens = _with_one_more(view.seq_lens, 1)[request]
            return torch.minimum(lens - ends + at, lens - 1)
        lens = view.seq_lens[request]
        if view.draft_step is not None or view.tree_mask is not None:
            return lens - 1
        width = view.tokens_per_request
        return lens + view.uncounted_keys - width + at % width

    def drafts_of(self, view: ForwardBatch) -> torch.Tensor:
        """Return ``[T, n]``: the slots of a branch up to this step, or of all drafts of a request."""
        if view.draft_cache_loc is not None and view.draft_step is not None:
            return view.draft_cache_loc[:, : view.draft_step + 1]
        assert view.tree_mask is not None  # noqa: S101  there are no other drafts
        width = view.tree_mask.shape[1]  # an idle batch has no tokens to derive it from
        return view.out_cache_loc.view(-1, width).repeat_interleave(width, dim=0)

    def plan_metadata(self, view: ForwardBatch, metadata: ReferenceMetadata) -> None:
        """Count every request's keys from its length on the host."""
        keys = view.seq_lens_cpu + view.uncounted_keys
        staging = metadata.staging
        if self.driver is None:
            metadata.most.copy_(keys)
            return
        if staging is None:  # these lengths are not written again
            self.driver.copy_async(metadata.most, keys)
            return
        copied = self._copied.setdefault(staging.data_ptr(), self.driver.event())
        copied.synchronize()  # the last step's copy may still read the staging memory
        staging.copy_(keys)
        self.driver.copy_async(metadata.most, staging)
        copied.record()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: ReferenceMetadata,
    ) -> torch.Tensor:
        """Write new keys and values, gather the keys of every request, and attend.

        Sums are float32, or float64 for queries of float64.
        """
        kv_cache = self.context.kv_cache
        k_cache, v_cache = kv_cache.k[layer.cache_layer], kv_cache.v[layer.cache_layer]
        new = new_kv(k, v, layer)
        if new is not None:
            k_cache.index_copy_(0, metadata.out_cache_loc, new[0])
            if layer.kv_lora_rank is None:
                v_cache.index_copy_(0, metadata.out_cache_loc, new[1])
        slots, seen = self.keys_of(metadata)
        if layer.sliding_window is not None:
            seen = seen & (seen.flip(1).cumsum(1).flip(1) <= layer.sliding_window)
        heads = layer.num_kv_heads, layer.num_q_heads // layer.num_kv_heads
        # Of each request: its tokens by its keys. Scores of keys that a token does not see are replaced.
        requests, width, count = len(slots) // metadata.width, metadata.width, slots.shape[1]
        hidden = ~seen.view(requests, width, count)
        unused = hidden.all(dim=1)
        slots = slots.view(requests, width, count)[:, 0].masked_fill(unused, 0)
        keys, values = _rows_in(k_cache, slots), _rows_in(v_cache, slots)
        values.masked_fill_(unused[:, :, None, None], 0)  # scratch may hold NaN, and 0 * NaN is NaN
        wide = torch.promote_types(q.dtype, torch.float32)
        queries = q.to(wide).view(requests, width, *heads, q.shape[-1]) * layer.scaling
        scores = torch.einsum("rthgd,rnhd->rthgn", queries, keys.to(wide))
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        scores.masked_fill_(hidden[:, :, None, None], float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks.to(wide).view(*heads, 1).expand(requests, width, *heads, 1)
            scores = torch.cat([scores, sinks], dim=4)
        weights = torch.softmax(scores, dim=4)[..., :count]
        weights = weights.masked_fill(hidden[:, :, None, None], 0)  # NaN for a query without keys
        out = torch.einsum("rthgn,rnhd->rthgd", weights, values.to(wide))
        return out.flatten(2, 3).flatten(0, 1).to(q.dtype)

    def keys_of(self, metadata: ReferenceMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two ``[T, n]``: the slots of all keys in order, and whether the token sees them."""
        position = torch.arange(metadata.table.shape[1], device=metadata.table.device)
        chunks = (_with_one_more(metadata.most, 1)[metadata.request] + CHUNK - 1) // CHUNK
        seen = (position <= metadata.last[:, None]) & (position < (chunks * CHUNK)[:, None])
        slots = _with_one_more(metadata.table, 0)[metadata.request]
        if not metadata.drafts.shape[1]:
            return slots, seen
        mask = metadata.draft_mask
        if mask is None:
            mask = torch.ones_like(metadata.drafts, dtype=torch.bool)
        return torch.cat([slots, metadata.drafts], dim=1), torch.cat([seen, mask], dim=1)


def _rows_in(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return a copy of the rows of a cache ``[S, H, D]`` in ``slots`` ``[T, n]``: ``[T, n, H, D]``."""
    return cache.index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[1:])


def _with_one_more(rows: torch.Tensor, value: int) -> torch.Tensor:
    """Return rows of requests, with an additional row for padding tokens."""
    return torch.nn.functional.pad(rows, [0] * (2 * rows.dim() - 1) + [1], value=value)


class PaddedReferenceBackend(ReferenceBackend):
    """The same backend with padding tokens in the metadata of eager calls, after those of live requests."""

    capabilities = replace(ReferenceBackend.capabilities, eager_rows="padded")
