"""A correct backend and a correct runner for every mode, as partners of the checked plugin.

`ReferenceBackend` computes attention with plain torch operations. Its metadata contains a table of KV slots
by position for every request, the request and the last visible position of every token, and extra columns for
drafts. The number of key chunks is planned on the host, so that lengths on the host are read too. It has no
custom kernel and no pages. `ReferenceRunner` captures the shapes of one mode and pads them.

Does not: run fast. Every query reads a whole context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
from graphpact.buffers import FillContext, GraphSlot, PaddingPolicy, SlotRole, metadata_slot
from graphpact.buffers.inputs import num_token_non_padded_slot
from graphpact.graphs import Event
from graphpact.runners import GraphRunner
from graphpact.shapes import EagerReason, GraphShape
from graphpact.step import Forward, Region, RegionContext
from graphpact_conformance.draws.cases import DRAFTS, Case, static_shapes
from graphpact_conformance.draws.fields import DRAWN, GATHERED
from graphpact_conformance.draws.lanes import SCALES, Config

CPU = torch.device("cpu")
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
    """

    out_cache_loc: torch.Tensor
    table: torch.Tensor
    request: torch.Tensor
    last: torch.Tensor
    drafts: torch.Tensor
    draft_mask: torch.Tensor | None
    most: torch.Tensor
    staging: torch.Tensor | None = None


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
        columns = 0
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
        """Write new keys and values, gather the visible keys of every token, and attend in float32."""
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
        hidden = ~seen
        slots = slots.masked_fill(hidden, 0)
        keys, values = _rows_in(k_cache, slots), _rows_in(v_cache, slots)
        # scratch may hold NaN, and 0 * NaN is NaN; scores of hidden keys are replaced
        values.masked_fill_(hidden[:, :, None, None], 0)
        heads = layer.num_kv_heads, layer.num_q_heads // layer.num_kv_heads
        queries = q.float().view(-1, *heads, q.shape[-1]) * layer.scaling
        scores = torch.einsum("thgd,tnhd->thgn", queries, keys.float())
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        scores.masked_fill_(hidden[:, None, None], float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks.float().view(1, *heads, 1).expand(q.shape[0], *heads, 1)
            scores = torch.cat([scores, sinks], dim=3)
        weights = torch.softmax(scores, dim=3)[..., : slots.shape[1]]
        weights = weights.masked_fill(hidden[:, None, None], 0)  # NaN for a query without keys
        out = torch.einsum("thgn,tnhd->thgd", weights, values.float())
        return out.flatten(1, 2).to(q.dtype)

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


# -- the runners -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceSizes:
    """The shapes of one mode; an implementation of `CaptureSizes` that is independent of the core's.

    Args:
        shapes: The smallest first.
    """

    shapes: tuple[GraphShape, ...]

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the smallest shape that holds the batch, or that of the largest rank if it is known."""
        mode = self.shapes[0].mode
        if batch.forward_mode not in (mode, ForwardMode.IDLE):
            return EagerReason.WRONG_MODE
        width = self.shapes[0].num_tokens // self.shapes[0].batch_size
        if not mode.is_ragged and batch.num_tokens != batch.batch_size * width:
            return EagerReason.OTHER_WIDTH
        requests, tokens = batch.batch_size, batch.num_tokens
        if batch.global_num_tokens_cpu is not None and mode.is_ragged:
            tokens = max(batch.global_num_tokens_cpu)
        elif batch.global_num_tokens_cpu is not None:
            requests = max(-(-n // width) for n in batch.global_num_tokens_cpu)
        for shape in self.shapes:
            if requests <= shape.batch_size and tokens <= shape.num_tokens:
                return shape
        return EagerReason.OVER_LARGEST


class ReferenceRunner(GraphRunner):
    """A runner that captures the shapes of one mode, with its own padding.

    A padding request has request row 0 and the length that the backend declares, and no token in a ragged
    batch. A padding token writes KV slot 0. In a tree, a padding token sees all draft tokens of its request,
    including itself. So no row of its scores is empty, and it sees only scratch.

    Where batches carry ``mrope_positions`` and no embeddings, they carry the optional fields of
    `graphpact_conformance.draws.fields.DRAWN` too.
    """

    modes: ClassVar = frozenset(ForwardMode)
    needs = GraphSupport.UNIFORM_DECODE

    @classmethod
    def of(cls, config: Config) -> type["ReferenceRunner"]:
        """Return a runner class that always uses the shapes and the draft of ``config``."""

        class OfConfig(cls):  # type: ignore[misc, valid-type]
            """The reference runner with given shapes."""

            case = config.case

            def shapes(self) -> Sequence[GraphShape]:
                """Return the given shapes; none if the backend cannot be captured in the mode."""
                return config.shapes if self.context.backend.graph_support.covers(config.case.needs) else ()

        return OfConfig

    @property
    def case(self) -> Case:
        """The kind of the lane's steps."""
        draft, mode = self.context.limits.draft, self.context.mode
        if mode is ForwardMode.TARGET_VERIFY:
            case = Case(mode, tree=draft.topk > 1)
        else:
            case = Case(mode, topk=draft.topk if mode is ForwardMode.DRAFT_DECODE else 1)
        named = (name for name, sizes in DRAFTS.items() if sizes.num_steps == draft.num_steps)
        return case.sized(next(named, "plain"))

    def shapes(self) -> Sequence[GraphShape]:
        """Return the configured sizes or token counts, otherwise default shapes up to the largest step.

        Empty if the backend cannot be captured in the mode.
        """
        case, limits = self.case, self.context.limits
        if not self.context.backend.graph_support.covers(case.needs):
            return ()
        most = limits.max_bs
        counts = self.context.token_counts
        if case.width is None and counts is not None:
            every = static_shapes(case, {**SCALES["middle"][0], **SCALES["tall"][0]})
            return tuple(s for s in every if s.num_tokens in counts)
        if case.width is None:
            largest = GraphShape(case.lane_mode, most, limits.max_num_tokens)
            return (*(s for s in static_shapes(case) if s.batch_size < most), largest)
        sizes = self.context.batch_sizes
        if sizes is None:
            sizes = [*(s.batch_size for s in static_shapes(case) if s.batch_size < most), most]
        return tuple(GraphShape(case.lane_mode, size, size * case.width) for size in sizes)

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the smallest shape that holds the batch, or an eager reason."""
        shapes = self.shapes()
        return ReferenceSizes(tuple(shapes)).fit(batch) if shapes else EagerReason.NO_GRAPHS

    @property
    def _padded_seq_len(self) -> int:
        return self.context.backend.padded_seq_len(self.case.lane_mode, self.case.width or 1)

    def slots(self) -> Sequence[GraphSlot]:
        """Return a slot for every field of the mode's batches."""
        case, declared = self.case, []

        def add(name: str, *row: int, pad: int | bool = 0, dtype: torch.dtype = torch.int64) -> None:
            by_token = name in ("input_ids", "positions", "out_cache_loc", "tree_mask")
            declared.append(
                GraphSlot(
                    name,
                    lambda bs, tokens: (tokens if by_token else bs, *row),
                    dtype,
                    axis="tokens" if by_token else "bs",
                    device=torch.device("cpu") if name.endswith("_cpu") else None,
                    padding_policy=PaddingPolicy.FILL_SENTINEL,
                    pad_value=pad,
                    owner="the reference runner",
                )
            )

        add("input_ids")
        add("positions")
        add("out_cache_loc", *[case.num_steps][: case.mode is ForwardMode.DRAFT_DECODE])
        add("req_pool_indices")
        add("seq_lens", pad=self._padded_seq_len)
        add("seq_lens_cpu", pad=self._padded_seq_len)
        if case.width is None:
            add("extend_seq_lens")
            add("extend_seq_lens_cpu")
        if case.tree:
            add("tree_mask", case.width or 0, pad=True, dtype=torch.bool)
        if case.mode is ForwardMode.DRAFT_EXTEND:
            add("num_correct_drafts", dtype=torch.int32)
        if self.context.mrope:
            declared.append(self._by_token("mrope_positions", torch.int64, 3))
        if self.context.input_embeds:
            declared.append(self._by_token("input_embeds", self.context.dtype, self.context.hidden_size))
        elif self.context.mrope:
            declared += [self._by_request(name, field.dtype) for name, field in _BY_REQUEST.items()]
        if self.context.require_gathered_buffer:
            declared += map(_gathered, GATHERED)
        if self.context.num_token_non_padded:
            declared.append(
                num_token_non_padded_slot(
                    "the reference runner", is_local=self.context.require_gathered_buffer
                )
            )
        return declared

    def _by_request(self, name: str, dtype: torch.dtype) -> GraphSlot:
        """Return the slot ``[bs]`` of an optional field, padded by zeros; ``encoder_lens`` may be absent."""
        return GraphSlot(
            name,
            lambda bs, _: (bs,),
            dtype,
            axis="bs",
            padding_policy=PaddingPolicy.ZERO,
            optional=name == "encoder_lens",
            owner="the reference runner",
        )

    def _by_token(self, name: str, dtype: torch.dtype, numbers: int) -> GraphSlot:
        """Return a slot with several numbers for each token: ``[3, T]`` positions, ``[T, n]`` embeddings."""
        is_first = name != "mrope_positions"
        return GraphSlot(
            name,
            lambda _, tokens: (tokens, numbers) if is_first else (numbers, tokens),
            dtype,
            padding_policy=PaddingPolicy.ZERO,
            slice_fn=None if is_first else lambda buffer, tokens: buffer[:, :tokens],
            owner="the reference runner",
        )

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return a batch of padding rows on scratch; in a ragged mode the first request has most tokens."""
        case, bs, tokens = self.case, shape.batch_size, shape.num_tokens
        most = self.context.limits.max_context_len
        lens = torch.full((bs,), self._padded_seq_len)
        extend = None
        if case.width is None:
            # The first requests have as many tokens as a sequence may have; the others have one.
            before = torch.arange(bs) * (most - 1)
            extend = 1 + (tokens - bs - before).clamp(0, most - 1)
            lens = lens.maximum(extend)
        zeros = torch.zeros(tokens, dtype=torch.int64)
        drafts = case.mode is ForwardMode.DRAFT_DECODE
        counts = self.context.num_token_non_padded
        batch = ForwardBatch(
            forward_mode=shape.mode,
            batch_size=bs,
            input_ids=zeros,
            positions=zeros,
            out_cache_loc=zeros[:, None].expand(-1, case.num_steps).clone() if drafts else zeros,
            req_pool_indices=zeros[:bs],
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            extend_seq_lens=extend,
            extend_seq_lens_cpu=None if extend is None else extend.clone(),
            tree_mask=torch.ones(tokens, case.width or 0, dtype=torch.bool) if case.tree else None,
            num_correct_drafts=zeros[:bs].int() if case.mode is ForwardMode.DRAFT_EXTEND else None,
            num_token_non_padded=torch.tensor([tokens], dtype=torch.int32) if counts else None,
            num_token_non_padded_cpu=tokens if counts else None,
            mrope_positions=zeros.expand(3, -1).clone() if self.context.mrope else None,
            input_embeds=torch.zeros(tokens, self.context.hidden_size, dtype=self.context.dtype)
            if self.context.input_embeds
            else None,
        )
        if self.context.mrope and not self.context.input_embeds:
            for name, field in _BY_REQUEST.items():
                setattr(batch, name, torch.zeros(bs, dtype=field.dtype))
        return batch.to(self.context.device)


_BY_REQUEST = {name: field for name, field in DRAWN.items() if field.axis == "bs"}


def _gathered(name: str) -> GraphSlot:
    """Return the slot ``[1]`` of a count over ranks that gather; it counts padding tokens too."""

    def post_fill(buffer: torch.Tensor, _: ForwardBatch, context: FillContext) -> None:
        buffer.fill_(context.padded_num_tokens)

    return GraphSlot(
        name,
        lambda *_: (1,),
        torch.int32,
        axis="none",
        padding_policy=PaddingPolicy.ZERO,
        copy_from_fb=False,
        post_fill=post_fill,
        owner="the reference runner",
    )


class SegmentsRunner(ReferenceRunner):
    """A runner whose attention leaves the graphs: an eager call between two segments in every layer.

    The backend therefore makes metadata as for an eager step, for the rows that ``eager_rows`` declares.
    """

    modes: ClassVar = frozenset({ForwardMode.EXTEND, ForwardMode.MIXED})
    needs = GraphSupport.NEVER
    eager_attention: ClassVar[bool] = True

    @property
    def case(self) -> Case:
        """The kind of the lane's steps."""
        return replace(super().case, segments=True)

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return one forward pass, broken at every attention call."""
        return broken_at_attention(forward, step)


def broken_at_attention(forward: Forward, step: RegionContext) -> Region:
    """Return a forward pass whose attention is an eager call between two segments, in every layer."""

    def attend(q: Any, k: Any, v: Any, layer: LayerSpec, metadata: Any) -> torch.Tensor:
        del metadata  # the metadata of the capture, which the eager call does not use
        return step.driver.eager_call(step.attend, q, k, v, layer)

    return lambda: forward(step.view, step.metadata, attend)
