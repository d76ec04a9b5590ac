"""`CudaGraphBufferRegistry`: the graph-resident memory of one lane, and the fill of a step.

A registry without a lane behaves like the original (SGLang PR 26742): it skips fields that a batch lacks. The
registry of a lane enforces the contract: every slot has an owner, stale padding has a reason, and a batch
that lacks a slot's field is refused unless the slot is optional.

Does not: decide the raw and padded counts (the runner does) or write a batch.
"""

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers.arenas import Arena, Arenas
from graphpact.buffers.description import RegistryDescription, SlotRow
from graphpact.buffers.fills import FillPlan
from graphpact.buffers.sharing import PROCESS_WIDE, SharedBuffers
from graphpact.buffers.slots import BoundSlot, FillContext, GraphSlot
from graphpact.errors import SlotError, UnknownSlotError, did_you_mean
from graphpact.plugin_calls import call
from graphpact.shapes import GraphShape
from graphpact.tensors import address_range, storage_id

_MAX_PLANS = 1024  # largest number of plans that are kept; the oldest is dropped

_SHAPE = "a shape_fn takes (max_bs, max_num_tokens) and returns a tuple of sizes"
_SLICE = "a slice_fn takes (buffer, n) and returns a view of the first n rows along one axis"

B = TypeVar("B")


class CudaGraphBufferRegistry:
    """The declared buffers of one lane.

    Args:
        device: Default device of slots.
        max_bs: Largest request count of a captured shape.
        max_num_tokens: Largest token count of a captured shape.
        share_pool: Memory that registries share for slots that every fill refreshes: True for the
            process-wide pool, or a `SharedBuffers`.
        lane: Name of the lane that it belongs to; None if it belongs to no lane and enforces no contract.
    """

    def __init__(
        self,
        *,
        device: torch.device | str,
        max_bs: int,
        max_num_tokens: int,
        share_pool: bool | SharedBuffers | None = False,
        lane: str | None = None,
    ) -> None:
        for what, most in (("max_bs", max_bs), ("max_num_tokens", max_num_tokens)):
            if not isinstance(most, int) or most < 0:
                raise SlotError(f"{what} is {most!r}", hint="give an integer, 0 or more")
        if not isinstance(share_pool, (bool, SharedBuffers, type(None))):
            raise SlotError(f"share_pool is {share_pool!r}", hint="give True, False or a SharedBuffers")
        self.device = torch.empty(0, device=device).device  # with an index, as the devices of tensors have
        self.max_bs = max_bs
        self.max_num_tokens = max_num_tokens
        self.share_pool = PROCESS_WIDE if share_pool is True else share_pool or None
        self.lane = lane
        self._slots: dict[str, BoundSlot] = {}
        self._memory = Arenas(pins=self.device.type == "cuda")
        self._plans: dict[tuple[int, int, int, int], FillPlan] = {}
        self._static_inputs: dict[GraphShape, ForwardBatch] = {}

    # -- declaring -------------------------------------------------------------------------------

    def register_slot(self, slot: GraphSlot, bind: torch.Tensor | None = None) -> BoundSlot:
        """Return ``slot`` with a buffer: a new one, or the existing tensor ``bind``.

        A new buffer contains the slot's initial value; ``bind`` keeps its contents. A disabled slot gets no
        buffer. The declaration is not changed and may be registered in other registries too.

        Raises:
            SlotError: The name is taken, ``bind`` has another shape, dtype or device than declared, the slot
                breaks the lane's contract, or it conflicts with the shared slot of another lane. The registry
                is unchanged.
        """
        if slot.name in self._slots:
            owner = self._slots[slot.name].owner or "an unnamed owner"
            hint = "prefix a plugin's slots with the plugin's name"
            raise SlotError(f"{slot.label} is already registered by {owner}", hint=hint)
        buffer = None
        if slot.enabled:
            shape = self._shape(slot)
            if self.lane is not None:
                self._require_contract(slot, shape, self.lane)
            self._check_slices(slot, shape)
            buffer = self._allocate(slot, shape) if bind is None else self._adopt(slot, shape, bind)
            self._plans.clear()
            self._static_inputs.clear()
        bound = self._slots[slot.name] = slot.bound(buffer)
        return bound

    def get_slot(self, name: str) -> BoundSlot:
        """Return the slot called ``name``, enabled or not; raise `UnknownSlotError` if there is none."""
        if name in self._slots:
            return self._slots[name]
        near, registered = did_you_mean(name, self._slots), ", ".join(self._slots) or "none"
        hint = f"did you mean {near!r}?" if near else None
        raise UnknownSlotError(f"no slot {name!r}; registered: {registered}", hint=hint)

    def has_slot(self, name: str) -> bool:
        """Return whether an enabled slot is called ``name``."""
        return name in self._slots and self._slots[name].enabled

    def slot_names(self) -> list[str]:
        """Return the names of all enabled slots in the order of registration."""
        return [slot.name for slot in self]

    def __iter__(self) -> Iterator[BoundSlot]:
        return (slot for slot in self._slots.values() if slot.enabled)

    # -- one step --------------------------------------------------------------------------------

    def fill_from(
        self,
        batch: Any,
        *,
        raw_bs: int,
        padded_bs: int,
        raw_num_tokens: int,
        padded_num_tokens: int,
        pp_proxy_tensors: Any = None,
    ) -> None:
        """Reset padding rows by policy, copy the batch's fields to live rows, then call each ``post_fill``.

        ``batch`` is the live batch, usually a `graphpact.ForwardBatch`, and is not written. The other
        arguments are those of `FillContext`, with ``raw <= padded <= maximum``.

        Raises:
            SlotError: Counts are out of order, or a field has another number of rows, has a dtype that does
                not convert exactly, or (in a lane) is missing. Nothing is written then.
        """
        counts = (raw_bs, padded_bs, raw_num_tokens, padded_num_tokens)
        plan = self._plans.get(counts) or self._compile(counts)
        plan.run(batch, pp_proxy_tensors)

    def extract_buffer(self, *, padded_bs: int, padded_num_tokens: int, forward_batch_template: B) -> B:
        """Return the view of a captured shape: the template with slices for the fields that have slots.

        A field that is None in the template stays None, unless its slot is computed. Slots with dotted names
        replace entries of the template's ``extra``. Slots that are not a field of the template, such as those
        of a backend, are not part of the view.

        The template is a dataclass with ``batch_size``; it is not written.
        """
        fields: dict[str, Any] = {"batch_size": padded_bs}
        names = {field.name for field in dataclasses.fields(forward_batch_template)}  # type: ignore[arg-type]
        for slot in self:
            if slot.name not in names:
                continue
            field = getattr(forward_batch_template, slot.name)
            if not isinstance(field, (torch.Tensor, type(None))):
                continue  # a mode or a count; no tensor replaces it
            if field is not None or slot.is_computed or slot.source_fn is not None:
                fields[slot.name] = slot.slice_for(padded_bs, padded_num_tokens)
        extra = getattr(forward_batch_template, "extra", None)
        if extra:
            slots = (slot for slot in self if slot.name in extra)
            fields["extra"] = {**extra, **{s.name: s.slice_for(padded_bs, padded_num_tokens) for s in slots}}
        return dataclasses.replace(forward_batch_template, **fields)  # type: ignore[type-var]

    def static_inputs(self, batch: ForwardBatch, shape: GraphShape) -> ForwardBatch:
        """Return the view of ``shape``: always the same object for one shape.

        ``batch`` is the template if the shape is new. Host numbers of later batches do not reach the view,
        because a graph cannot read them.
        """
        view = self._static_inputs.get(shape)  # only one look-up in each step
        if view is None:
            view = self._static_inputs[shape] = self.extract_buffer(
                padded_bs=shape.batch_size, padded_num_tokens=shape.num_tokens, forward_batch_template=batch
            )
        return view

    # -- inspection ------------------------------------------------------------------------------

    def declared(self) -> list[BoundSlot]:
        """Return every slot in the order of registration, disabled ones included."""
        return list(self._slots.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on all devices."""
        return sum(slot.buffer.nbytes for slot in self if slot.buffer is not None)

    @property
    def allocated_nbytes(self) -> int:
        """Bytes that the registry allocated, including alignment and unused rows of arenas."""
        return self._memory.nbytes

    def slot_of(self, tensor: torch.Tensor) -> BoundSlot | None:
        """Return the slot in whose memory ``tensor`` begins, or None."""
        address = tensor.data_ptr()
        for slot in self:
            buffer = slot.buffer
            if buffer is None or buffer.data_ptr() > address or buffer.device != tensor.device:
                continue
            if address < address_range(buffer)[1]:
                return slot
        return None

    def template_of(self, slot: BoundSlot) -> torch.Tensor | None:
        """Return the template for the padding rows of ``slot``, or None if the slot is not in an arena."""
        if slot.buffer is None:
            return None
        for arena in self._arenas():
            place = arena.place(slot.buffer, slot.initial_value)
            if place is not None:
                return arena.block(place)[1]
        return None

    def describe(self) -> RegistryDescription:
        """Return the registry's contents, for a table or JSON."""
        return RegistryDescription(
            lane=self.lane,
            device=str(self.device),
            max_bs=self.max_bs,
            max_num_tokens=self.max_num_tokens,
            slots=tuple(SlotRow.of(slot) for slot in self.declared()),
            nbytes=self.nbytes,
            allocated_nbytes=self.allocated_nbytes,
        )

    def _arenas(self) -> list[Arena]:
        return [*self._memory, *(self.share_pool.arenas if self.share_pool else ())]

    def _device(self, slot: GraphSlot) -> torch.device:
        return self.device if slot.device is None else torch.empty(0, device=slot.device).device

    def _shape(self, slot: GraphSlot) -> tuple[int, ...]:
        """Return the result of the slot's ``shape_fn``, checked."""
        what, counts = f"{slot.label}: its shape_fn", (self.max_bs, self.max_num_tokens)
        shape: Any = call(what, slot.shape_fn, *counts, error=SlotError, hint=_SHAPE)
        if isinstance(shape, (tuple, list)) and all(isinstance(n, int) and n >= 0 for n in shape):
            return tuple(shape)
        raise SlotError(f"{slot.label}: its shape_fn returned {shape!r}", hint=_SHAPE)

    def _adopt(self, slot: GraphSlot, shape: tuple[int, ...], bind: torch.Tensor) -> torch.Tensor:
        declared = (shape, slot.dtype, str(self._device(slot)))
        bound = (tuple(bind.shape), bind.dtype, str(bind.device))
        if declared != bound:
            hint = "bind a tensor of the declared shape, dtype and device"
            raise SlotError(f"{slot.label}: declared {declared}, bound {bound}", hint=hint)
        for other in self:
            overlaps = other.buffer is not None and other.buffer.data_ptr() == bind.data_ptr()
            if overlaps and bind.numel():
                raise SlotError(
                    f"{slot.label} is bound to the memory of {other.label}: each fill would write both",
                    hint="bind memory that no other slot of the registry uses",
                )
        return bind

    def _allocate(self, slot: GraphSlot, shape: tuple[int, ...]) -> torch.Tensor:
        device = self._device(slot)
        if self.share_pool is not None and slot.is_refreshed:
            return self.share_pool.buffer_for(slot, shape, device, self.lane)
        return self._memory.allocate(slot, shape, device)

    def _most(self, slot: GraphSlot) -> int:
        """Return the largest count of the slot's axis."""
        return self.max_bs if slot.axis == "bs" else self.max_num_tokens

    def _check_slices(self, slot: GraphSlot, shape: tuple[int, ...]) -> None:
        """Raise `SlotError` unless the slot's slices begin where its buffer begins and cut only one axis."""
        if slot.slice_fn is None or slot.axis == "none":
            return
        buffer = torch.empty(shape, dtype=slot.dtype, device="meta")  # slices of a meta tensor cost nothing
        most = self._most(slot)
        slices = []
        for n in (most, min(1, most)):
            view: Any = call(
                f"{slot.label}: its slice_fn", slot.slice_fn, buffer, n, error=SlotError, hint=_SLICE
            )
            if not isinstance(view, torch.Tensor):
                raise SlotError(f"{slot.label}: its slice_fn returned {view!r}", hint=_SLICE)
            own = storage_id(view) == storage_id(buffer) and view.storage_offset() == 0
            if view.numel() and not own:
                where = f"for {n} rows does not begin where its buffer does"
                raise SlotError(f"{slot.label}: its slice_fn {where}", hint=_SLICE)
            slices.append(tuple(view.shape))
        if len(slices[0]) != len(slices[1]) or sum(map(operator.ne, *slices)) > 1:
            cuts = f"{slices[1]} for one row, {slices[0]} for {most}"
            raise SlotError(f"{slot.label}: its slice_fn cuts more than one axis: {cuts}", hint=_SLICE)

    def _require_contract(self, slot: GraphSlot, shape: tuple[int, ...], lane: str) -> None:
        """Raise `SlotError` for a lane's slot that has no owner, lacks a required reason, or is too small."""
        if not (slot.owner or "").strip():
            hint = "declare it with owner=, the name of the runner or backend"
            raise SlotError(f"{slot.label}: lane {lane!r} requires an owner for every slot", hint=hint)
        if slot.keeps_tail and not (slot.reason or "").strip():
            raise SlotError(
                f"{slot.label}: {slot.padding_policy.name} without a reason, which lane {lane!r} requires",
                hint="state with reason= why stale padding is safe, or reset it with ZERO or FILL_SENTINEL",
            )
        if slot.axis == "none" or slot.slice_fn is not None:
            return
        rows, most = (shape or (0,))[0], self._most(slot)
        if rows < most + slot.extra_rows:
            raise SlotError(
                f"{slot.label} has {rows} rows; its axis {slot.axis!r} has up to {most} in lane {lane!r}"
                + f", and extra_rows is {slot.extra_rows}" * bool(slot.extra_rows),
                hint="let shape_fn return that axis's argument plus extra_rows first, or give a slice_fn",
            )

    def _compile(self, counts: tuple[int, int, int, int]) -> FillPlan:
        context = FillContext(*counts)
        for what, raw, padded, most in (
            ("requests", context.raw_bs, context.padded_bs, self.max_bs),
            ("tokens", context.raw_num_tokens, context.padded_num_tokens, self.max_num_tokens),
        ):
            if not 0 <= raw <= padded <= most:
                raise SlotError(
                    f"cannot fill {raw} raw {what} into {padded} padded of at most {most}",
                    hint="counts must satisfy raw <= padded <= maximum",
                )
        plan = FillPlan(context, self, self._arenas(), strict=self.lane is not None)
        if len(self._plans) >= _MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[counts] = plan
        return plan
