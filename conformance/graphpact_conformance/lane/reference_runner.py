"""Correct runners for every mode, as the partners of a checked backend or driver.

`ReferenceRunner` captures the shapes of one mode and pads them with its own slots. `SegmentsRunner` also runs
attention as an eager call between two segments of a graph.

Does not: use the core's choice of capture sizes or, except for ``num_token_non_padded``, its declarations of
inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from graphpact.attention import GraphSupport, LayerSpec
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import FillContext, GraphSlot, PaddingPolicy
from graphpact.buffers.inputs import num_token_non_padded_slot
from graphpact.runners import GraphRunner
from graphpact.shapes import EagerReason, GraphShape
from graphpact.step import Forward, Region, RegionContext
from graphpact_conformance.draws.cases import DRAFTS, Case, static_shapes
from graphpact_conformance.draws.fields import DRAWN, GATHERED
from graphpact_conformance.draws.lanes import SCALES, Config


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
        requests = max(requests, *(batch.global_batch_sizes_cpu or (0,)))
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
        if case.tokens_per_request is None and counts is not None:
            requests = {n: bs for scale in SCALES.values() for bs, n in scale[0].items()}
            # A count that ranks can divide is a little larger than that of the scale.
            of_scale = {requests[max(n for n in requests if n <= count)]: count for count in counts}
            return tuple(static_shapes(case, of_scale))
        if case.tokens_per_request is None:
            largest = GraphShape(case.lane_mode, most, limits.max_num_tokens)
            return (*(s for s in static_shapes(case) if s.batch_size < most), largest)
        sizes = self.context.batch_sizes
        if sizes is None:
            sizes = [*(s.batch_size for s in static_shapes(case) if s.batch_size < most), most]
        return tuple(GraphShape(case.lane_mode, size, size * case.tokens_per_request) for size in sizes)

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the smallest shape that holds the batch, or an eager reason."""
        return self._of_shapes.fit(batch) if self._of_shapes.shapes else EagerReason.NO_GRAPHS

    @cached_property
    def _of_shapes(self) -> ReferenceSizes:
        return ReferenceSizes(tuple(self.shapes()))

    @property
    def _padded_seq_len(self) -> int:
        return self.context.backend.padded_seq_len(self.case.lane_mode, self.case.tokens_per_request or 1)

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
        if case.tokens_per_request is None:
            add("extend_seq_lens")
            add("extend_seq_lens_cpu")
        if case.tree:
            add("tree_mask", case.tokens_per_request or 0, pad=True, dtype=torch.bool)
        if case.mode is ForwardMode.DRAFT_EXTEND:
            add("num_correct_drafts", dtype=torch.int32)
        if self.context.mrope:
            declared.append(self._by_token("mrope_positions", torch.int64, 3))
        if self.context.input_embeds:
            declared.append(self._by_token("input_embeds", self.context.dtype, self.context.hidden_size))
        elif self.context.mrope:
            declared += [self._by_request(name, field.dtype) for name, field in _BY_REQUEST.items()]
        declared += [
            self._by_token(f"pp_proxy_tensors.{name}", self.context.dtype, width)
            for name, width in self.context.pp_proxy_tensors.items()
        ]
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
        if case.tokens_per_request is None:
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
            tree_mask=torch.ones(tokens, case.tokens_per_request or 0, dtype=torch.bool)
            if case.tree
            else None,
            num_correct_drafts=zeros[:bs].int() if case.mode is ForwardMode.DRAFT_EXTEND else None,
            num_token_non_padded=torch.tensor([tokens], dtype=torch.int32) if counts else None,
            num_token_non_padded_cpu=tokens if counts else None,
            mrope_positions=zeros.expand(3, -1).clone() if self.context.mrope else None,
            input_embeds=torch.zeros(tokens, self.context.hidden_size, dtype=self.context.dtype)
            if self.context.input_embeds
            else None,
            extra={
                f"pp_proxy_tensors.{name}": torch.zeros(tokens, width, dtype=self.context.dtype)
                for name, width in self.context.pp_proxy_tensors.items()
            },
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
