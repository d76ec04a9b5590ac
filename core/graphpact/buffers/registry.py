"""`CudaGraphBufferRegistry`: the graph-resident memory of one lane, and the fill of one step.

A fill resets the tails by policy, then copies the heads. Everything that can be computed once per
pair of raw and padded counts (views, groups, pad values) is computed once and kept, because a fill is
on the path of every step.

Does not: decide the raw and padded counts (the runner does) or write a batch.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers.slots import FillContext, GraphSlot, PaddingPolicy
from graphpact.errors import SlotError, did_you_mean

_MAX_PLANS = 1024  # pairs of raw and padded counts whose views are kept; the oldest is dropped


@dataclass(slots=True)
class _Head:
    slot: GraphSlot
    view: torch.Tensor


@dataclass(slots=True)
class _FillPlan:
    """What one (raw, padded) pair of counts does: tails to reset, heads to copy, by destination."""

    tails: list[tuple[torch.Tensor, int | float | bool]]
    device_heads: list[_Head]
    host_heads: list[_Head]


class CudaGraphBufferRegistry:
    """The declared buffers of one lane.

    Args:
        max_bs: Most requests that a captured shape may have.
        max_num_tokens: Most tokens that a captured shape may have.
        device: Where slots lie unless they say otherwise.
    """

    def __init__(self, *, max_bs: int, max_num_tokens: int, device: torch.device) -> None:
        self.max_bs = max_bs
        self.max_num_tokens = max_num_tokens
        self.device = device
        self._slots: dict[str, GraphSlot] = {}
        self._plans: OrderedDict[FillContext, _FillPlan] = OrderedDict()

    # -- declaring -------------------------------------------------------------------------------

    def register_slot(self, slot: GraphSlot, bind: torch.Tensor | None = None) -> GraphSlot:
        """Give ``slot`` its buffer: a new one, or ``bind`` where an existing tensor is adopted.

        Raises:
            SlotError: The name is taken, or ``bind`` has another shape, dtype or device than declared.
        """
        if slot.name in self._slots:
            raise SlotError(
                f"slot {slot.name!r} of {slot.owner} is already registered"
                f" by {self._slots[slot.name].owner}",
                hint="prefix a plugin's slots with the plugin's name",
            )
        shape = slot.shape_fn(self.max_bs, self.max_num_tokens)
        device = slot.device or self.device
        adopted = bind is not None
        if bind is None:
            bind = torch.full(shape, slot.initial_value, dtype=slot.dtype, device=device)
        device = torch.empty(0, device=device).device  # with its index, as tensors have it
        want, got = (tuple(shape), slot.dtype, device), (tuple(bind.shape), bind.dtype, bind.device)
        if want != got:
            raise SlotError(f"slot {slot.name!r} of {slot.owner}: declared {want}, bound {got}")
        if adopted and slot.padding_policy is PaddingPolicy.FILL_ONCE:
            bind.fill_(slot.initial_value)
        slot.buffer = bind
        self._slots[slot.name] = slot
        self._plans.clear()
        return slot

    def get_slot(self, name: str) -> GraphSlot:
        """Return the slot called ``name``.

        Raises:
            SlotError: There is none; the message names the nearest.
        """
        try:
            return self._slots[name]
        except KeyError:
            near = did_you_mean(name, self._slots)
            raise SlotError(
                f"no slot {name!r}; registered: {', '.join(self._slots) or 'none'}",
                hint=f"did you mean {near!r}?" if near else None,
            ) from None

    def has_slot(self, name: str) -> bool:
        """Return whether a slot called ``name`` is registered."""
        return name in self._slots

    def slot_names(self) -> list[str]:
        """Return the names of all slots in the order of their registration."""
        return list(self._slots)

    def __iter__(self) -> Iterator[GraphSlot]:
        return iter(self._slots.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(s.buffer.nbytes for s in self._slots.values() if s.buffer is not None)

    # -- one step --------------------------------------------------------------------------------

    def fill_from(
        self,
        batch: ForwardBatch,
        *,
        raw_bs: int,
        padded_bs: int,
        raw_num_tokens: int,
        padded_num_tokens: int,
    ) -> None:
        """Reset the tails by policy, then copy the batch's fields into the heads.

        Args:
            batch: The live batch; not written.
            raw_bs: Requests in the batch.
            padded_bs: Requests in the captured shape, ``raw_bs <= padded_bs <= max_bs``.
            raw_num_tokens: Tokens in the batch.
            padded_num_tokens: Tokens in the captured shape.

        Raises:
            SlotError: Counts out of order, or a batch that lacks a field, or has too few or too many
                rows in one, or a dtype that does not convert exactly. Nothing is written then.
        """
        ctx = FillContext(raw_bs, padded_bs, raw_num_tokens, padded_num_tokens)
        plan = self._plans.get(ctx)
        if plan is None:
            plan = self._compile(ctx)
        device_heads = self._sources(batch, plan.device_heads)
        host_heads = self._sources(batch, plan.host_heads)
        for tail, value in plan.tails:
            tail.fill_(value)
        for heads in (device_heads, host_heads):
            if heads[0]:
                torch._foreach_copy_(*heads)

    def extract_buffer(
        self, *, padded_bs: int, padded_num_tokens: int, forward_batch_template: ForwardBatch
    ) -> ForwardBatch:
        """Return the view for a shape: the template with every slotted field replaced by its slice."""
        fields = {
            slot.name: slot.slice_for(padded_bs, padded_num_tokens)
            for slot in self._slots.values()
            if slot.copy_from_fb
        }
        return replace(forward_batch_template, batch_size=padded_bs, **fields)  # type: ignore[arg-type]

    # -- inside ----------------------------------------------------------------------------------

    def _compile(self, ctx: FillContext) -> _FillPlan:
        for what, raw, padded, most in (
            ("requests", ctx.raw_bs, ctx.padded_bs, self.max_bs),
            ("tokens", ctx.raw_num_tokens, ctx.padded_num_tokens, self.max_num_tokens),
        ):
            if not 0 <= raw <= padded <= most:
                raise SlotError(
                    f"cannot fill {raw} raw {what} into {padded} padded of at most {most}",
                    hint="counts must satisfy raw <= padded <= maximum",
                )
        plan = _FillPlan([], [], [])
        for slot in self._slots.values():
            whole = slot.slice_for(ctx.padded_bs, ctx.padded_num_tokens)
            rows = ctx.rows(slot.axis)
            if rows is not None and rows[0] < rows[1] and slot.padding_policy.resets_tail:
                # The rows' axis is the one along which head and whole differ.
                kept = slot.slice_for(ctx.raw_bs, ctx.raw_num_tokens).shape
                axis = next(i for i, n in enumerate(whole.shape) if n != kept[i])
                tail = whole.narrow(axis, kept[axis], whole.shape[axis] - kept[axis])
                plan.tails.append((tail, slot.initial_value))
            if not slot.copy_from_fb:
                continue
            head = slot.slice_for(ctx.raw_bs, ctx.raw_num_tokens)
            on_host = head.device.type == "cpu" and self.device.type != "cpu"
            (plan.host_heads if on_host else plan.device_heads).append(_Head(slot, head))
        self._plans[ctx] = plan
        if len(self._plans) > _MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _sources(
        self, batch: ForwardBatch, heads: list[_Head]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Pair each head with the batch's field, having checked that the copy is exact."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for head in heads:
            source = getattr(batch, head.slot.name, None)
            if source is None:
                if head.slot.optional:
                    continue
                raise SlotError(
                    f"the batch has no {head.slot.name!r}, which slot {head.slot.name!r}"
                    f" of {head.slot.owner} copies",
                    hint="set the field, or declare the slot optional if stale rows are harmless",
                )
            if source.shape != head.view.shape or (
                source.dtype is not head.view.dtype
                and torch.promote_types(source.dtype, head.view.dtype) is not head.view.dtype
            ):
                raise SlotError(
                    f"slot {head.slot.name!r} of {head.slot.owner} takes"
                    f" {tuple(head.view.shape)} {head.view.dtype} from this batch,"
                    f" which has {tuple(source.shape)} {source.dtype}",
                )
            targets.append(head.view)
            sources.append(source)
        return targets, sources
