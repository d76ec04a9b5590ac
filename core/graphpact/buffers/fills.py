"""`FillPlan`: the work of a fill for one set of counts, compiled once and run in every step.

A fill runs in every step. Therefore a plan keeps everything that does not depend on the contents of a batch:
the views of the heads (live rows) and tails (padding rows), their groups, and the signature (shapes and
dtypes) of the last batch that was checked.

    tails       one strided copy of pad values for slots that are in the same arena
    heads       one grouped copy for each pair of dtypes
    on the CPU  a grouped copy is a C++ loop over any tensors, so tails and heads share one

Does not: allocate, or decide the counts.
"""

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from graphpact.buffers.arenas import Arena, Place
from graphpact.buffers.slots import FIX_CALLBACK, BoundSlot, FillContext, GraphSlot, SourceFn
from graphpact.errors import SlotError
from graphpact.plugin_calls import call

_MAX_SIGNATURES = 16  # signatures kept for one plan; more than any engine has
_OPTIONAL = "{}, remove the slot, or declare it optional: an optional slot then holds its initial value"
_MISSING = object()

_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The target and the source of a copy."""
_Fields: TypeAlias = Callable[[Any], tuple[Any, ...]]
"""A function that returns some fields of a batch."""

_grouped_copy = torch._foreach_copy_


class _GroupedCopy(NamedTuple):
    """The operands of one grouped copy.

    Attributes:
        targets: The tensors that it writes.
        fields_of: Returns the sources of the first targets, which are fields of a batch.
        fixed: The sources of the other targets: pad values, the same for every batch.
    """

    targets: list[torch.Tensor]
    fields_of: _Fields
    fixed: tuple[torch.Tensor, ...]


@functools.cache
def converts_exactly(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether ``target`` represents every value of ``source`` exactly."""
    if source is target or source is torch.bool:
        return True
    if source.is_floating_point or source.is_complex:
        return torch.promote_types(source, target) is target
    held = torch.iinfo(source)
    if target.is_floating_point or target.is_complex:
        return held.max <= 2 / torch.finfo(target).eps
    limits = torch.iinfo(target) if target is not torch.bool else None
    return limits is not None and limits.min <= held.min and held.max <= limits.max


def _takes_any_group(target: torch.Tensor) -> bool:
    """Return whether one grouped copy may take any tensors of the device of ``target``.

    On a CPU a grouped copy is a loop in C++ over any tensors. On other devices it is one kernel, but only for
    dense tensors of one pair of dtypes. For other tensors torch falls back to one launch per tensor.
    """
    return target.device.type == "cpu"


class FillPlan:
    """The compiled fill of ``slots`` for the counts in ``context``. Some slots are in ``arenas``.

    If ``strict``, a batch must have the fields of all slots that are not optional.
    """

    def __init__(
        self, context: FillContext, slots: Iterable[BoundSlot], arenas: Sequence[Arena], *, strict: bool
    ) -> None:
        slots = list(slots)
        heads = [_Head(slot, context, strict=strict) for slot in slots if slot.copy_from_fb]
        self._context = context
        self._heads = [head for head in heads if head.source_fn is None]
        self._sourced = [head for head in heads if head.source_fn is not None]
        self._computed = [
            (f"the post_fill of {slot.label}", slot.post_fill, slot.buffer)
            for slot in slots
            if slot.post_fill is not None
        ]
        self._resets, self._fixed = _plan_tails(slots, context, arenas)
        self._only_copies = not (self._sourced or self._computed or self._resets)
        self._compiled: dict[tuple[object, ...], _CompiledCopies] = {}
        self._last = _CompiledCopies(lambda _: (), (None,), ())  # matches no batch

    def run(self, batch: Any, pp_proxy_tensors: Any = None) -> None:
        """Reset the tails, copy the heads, call the ``post_fill`` functions.

        Raises `SlotError` if a field or the result of a ``source_fn`` does not fit. Nothing is written then.
        """
        last = self._last
        try:
            known = last.signature_of(batch) == last.signature
        except AttributeError:  # a field that was a tensor is None now
            known = False
        if not known:
            last = self._check(batch)
        if self._only_copies:  # as in most lanes; testing each part below would take a sixth of such a fill
            for targets, fields_of, fixed in last.copies:
                _grouped_copy(targets, fields_of(batch) + fixed)
            return
        context = self._context
        if pp_proxy_tensors is not None:
            context = replace(context, pp_proxy_tensors=pp_proxy_tensors)
        pairs = [pair for slot in self._sourced if (pair := slot.pair(batch, context)) is not None]
        for reset in self._resets:
            reset()
        for targets, fields_of, fixed in last.copies:
            _grouped_copy(targets, fields_of(batch) + fixed)
        for group in _by_kernel(pairs):
            _grouped_copy([target for target, _ in group], [source for _, source in group])
        for what, post_fill, buffer in self._computed:
            call(what, post_fill, buffer, batch, context, error=SlotError, hint=FIX_CALLBACK)

    def _check(self, batch: Any) -> "_CompiledCopies":
        """Check the batch's fields one by one, and return the copies for batches of its signature."""
        pairs = [pair for head in self._heads if (pair := head.pair(batch, self._context)) is not None]
        key = tuple(head.kind(batch) for head in self._heads)
        compiled = self._compiled.get(key)
        if compiled is None:
            if len(self._compiled) == _MAX_SIGNATURES:
                self._compiled.clear()
            compiled = self._compiled[key] = self._compile(batch, pairs)
        self._last = compiled
        return compiled

    def _compile(self, batch: Any, pairs: Iterable[_Pair]) -> "_CompiledCopies":
        """Return the copies for batches with the signature of ``batch``.

        ``pairs`` are the targets and sources for ``batch``.

        A later batch has other tensors in the same fields. Therefore a source that is a field is read from
        the batch by name in each step, while the pad values of tails are the same tensors in all steps. A
        target is identified by object identity, because each is the view of exactly one head.
        """
        field_of = {id(h.view): h.slot.name for h in self._heads if isinstance(h.kind(batch), torch.dtype)}
        absent = [head for head in self._heads if id(head.view) not in field_of]
        signature_of = facts_of = _getter(
            [f"{name}.{fact}" for name in field_of.values() for fact in ("shape", "dtype")]
        )
        if absent:

            def signature_of(batch: Any) -> tuple[Any, ...]:
                """Return the fields' shapes and dtypes, and whether absent fields are still absent."""
                return (facts_of(batch), *(head.kind(batch) for head in absent))

        copies = []
        fields_first = sorted(pairs, key=lambda pair: id(pair[0]) not in field_of)
        for group in _by_kernel([*fields_first, *self._fixed]):
            fields = [field_of[id(target)] for target, _ in group if id(target) in field_of]
            fixed = tuple(source for target, source in group if id(target) not in field_of)
            copies.append(_GroupedCopy([target for target, _ in group], _getter(fields), fixed))
        return _CompiledCopies(signature_of, signature_of(batch), tuple(copies))


@dataclass(frozen=True, slots=True)
class _CompiledCopies:
    """The copies for batches of one signature, that is, with fields of the same shapes and dtypes."""

    signature_of: _Fields
    signature: tuple[Any, ...]
    copies: tuple[_GroupedCopy, ...]


def _from_extra(name: str, batch: Any, _: FillContext) -> torch.Tensor | None:
    tensor: torch.Tensor | None = (getattr(batch, "extra", None) or {}).get(name)
    return tensor


class _Head:
    """The live rows of a slot, which a fill copies from a batch.

    Attributes:
        slot: The slot.
        source_fn: Returns the source: the slot's function, or a look-up in ``extra`` for a dotted name. It is
            None if the source is the batch field of the slot's name.
        view: The rows to copy to. If the source is shorter, it fills the first of them.
    """

    def __init__(self, slot: BoundSlot, context: FillContext, *, strict: bool) -> None:
        self.slot = slot
        self.source_fn: SourceFn | None = slot.source_fn
        self._what = f"the source_fn of {slot.label}"  # made once and not in each step
        if slot.source_fn is None and "." in slot.name:
            self.source_fn = functools.partial(_from_extra, slot.name)
        self.view = slot.slice_for(context.raw_bs, context.raw_num_tokens)
        # In a lane the source of a slot with an axis must have all rows; otherwise it may have fewer.
        is_exact = slot.slice_fn is not None or (strict and slot.axis != "none")
        self._may_be_short = self.source_fn is not None and not is_exact
        if self._may_be_short:
            self.view = slot.slice_for(context.padded_bs, context.padded_num_tokens)
        self._strict = strict

    def kind(self, batch: Any) -> torch.dtype | type:
        """Return the dtype of the batch's field, or its type if it is not a tensor."""
        field = getattr(batch, self.slot.name, _MISSING)
        return field.dtype if isinstance(field, torch.Tensor) else type(field)

    def pair(self, batch: Any, context: FillContext) -> _Pair | None:
        """Return the target and source of the copy, if any; raise `SlotError` if they do not fit."""
        slot, target, by_name = self.slot, self.view, self.source_fn is None
        source: Any = getattr(batch, slot.name, None)
        if self.source_fn is not None:
            source = call(self._what, self.source_fn, batch, context, error=SlotError, hint=FIX_CALLBACK)
        if isinstance(source, torch.Tensor):
            if self._may_be_short and source.dim():
                target = target[: source.shape[0]]
            return target, _fitting(slot, target, source, strict=self._strict)
        if not self._strict and (source is None or by_name):
            return None
        if source is None and slot.optional:
            return target, _initial_rows(slot, target)
        none = f"a {type(source).__name__} instead of a tensor"
        if by_name:
            what = "no" if source is None else f"{none} for"
            fault, remedy = f"the batch has {what} {slot.name!r}, which {slot.label} copies", "set the field"
        else:
            what = "nothing" if source is None else none
            whose = "ForwardBatch.extra, the source of" if slot.source_fn is None else "the source_fn of"
            fault, remedy = f"{whose} {slot.label} found {what} in this batch", "give the batch its source"
        raise SlotError(fault, hint=_OPTIONAL.format(remedy))


def _initial_rows(slot: GraphSlot, view: torch.Tensor) -> torch.Tensor:
    """Return the slot's initial value in the shape of ``view``."""
    value = torch.full((), slot.initial_value, dtype=view.dtype, device=view.device)
    return value.expand_as(view)


def _fitting(slot: GraphSlot, target: torch.Tensor, source: torch.Tensor, *, strict: bool) -> torch.Tensor:
    """Return ``source``; raise `SlotError` if it does not fit ``target``.

    A source does not fit if it has another shape, a dtype that does not convert exactly (int64 into a slot
    that narrows is allowed), is a meta tensor, or (in a lane) is on another device.
    """
    if source.device != target.device and (strict or source.is_meta):
        raise SlotError(
            f"{slot.label} is on {target.device}, but its source in this batch is on {source.device}",
            hint="move the field to that device before the step: a copy between devices blocks the host",
        )
    fits = source.shape == target.shape or (not source.dim() and target.numel() == 1)
    narrows = slot.narrows and source.dtype is torch.int64
    if fits and (narrows or converts_exactly(source.dtype, target.dtype)):
        return source
    raise SlotError(
        f"{slot.label} takes {tuple(target.shape)} {target.dtype} from this batch,"
        f" which has {tuple(source.shape)} {source.dtype}",
        hint="give one row for each request or token, in a dtype that converts to the slot's dtype exactly",
    )


def _getter(names: Sequence[str]) -> _Fields:
    """Return a function ``batch -> (field, ...)``, implemented in C if there is more than one field."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    if names:
        only = operator.attrgetter(names[0])
        return lambda batch: (only(batch),)
    return lambda _: ()


def _by_kernel(pairs: Iterable[_Pair]) -> Iterator[list[_Pair]]:
    """Yield groups of pairs, each for one grouped copy, in the order of their first members."""
    groups: dict[Hashable, list[_Pair]] = {}
    for target, source in pairs:
        key: Hashable = target.device
        if not _takes_any_group(target):
            key = (target.device, target.dtype, source.dtype, target.is_contiguous())
        groups.setdefault(key, []).append((target, source))
    yield from groups.values()


# -- tails -----------------------------------------------------------------------------------------


def _plan_tails(
    slots: Iterable[BoundSlot], context: FillContext, arenas: Sequence[Arena]
) -> tuple[list[Callable[[], object]], list[_Pair]]:
    """Return the calls that reset tails, and the copies that reset tails where a group takes any tensors."""
    loose: list[tuple[BoundSlot, torch.Tensor]] = []
    placed: dict[Arena, list[Place]] = {}
    for slot in slots:
        tail = _tail(slot, context)
        if tail is None:
            continue
        for arena in arenas:
            place = arena.place(tail, slot.initial_value)
            if place is not None:
                placed.setdefault(arena, []).append(place)
                break
        else:
            loose.append((slot, tail))
    blocks = [arena.block(place) for arena, places in placed.items() for place in _merged(places)]
    fixed = [block for block in blocks if _takes_any_group(block[0])]
    fixed += [(tail, _initial_rows(slot, tail)) for slot, tail in loose if _takes_any_group(tail)]
    resets = _reset_loose([(slot, tail) for slot, tail in loose if not _takes_any_group(tail)])
    resets += _reset_blocks([block for block in blocks if not _takes_any_group(block[0])])
    return resets, fixed


def _reset_loose(tails: Iterable[tuple[BoundSlot, torch.Tensor]]) -> list[Callable[[], object]]:
    """Return the calls that reset tails outside arenas: one per device for zeros, one per other tail."""
    resets: list[Callable[[], object]] = []
    zeroed: dict[torch.device, list[torch.Tensor]] = {}
    for slot, tail in tails:
        dense = tail.is_contiguous() and tail.stride(-1) == 1  # these can be viewed as bytes
        if slot.initial_value == 0 and dense:
            zeroed.setdefault(tail.device, []).append(tail.view(torch.uint8))
        else:
            resets.append(functools.partial(tail.fill_, slot.initial_value))
    return resets + [functools.partial(torch._foreach_zero_, group) for group in zeroed.values()]


def _reset_blocks(blocks: Sequence[_Pair]) -> list[Callable[[], object]]:
    """Return the call that resets tails in arenas: one strided copy, or one grouped copy of bytes."""
    if len(blocks) == 1:
        target, template = blocks[0]
        return [functools.partial(target.copy_, template)]
    if not blocks:
        return []
    # Rows as bytes are dense and of one dtype, for any dtypes and extents.
    rows, values = ([row.view(torch.uint8) for b in blocks for row in b[side]] for side in (0, 1))
    return [functools.partial(_grouped_copy, rows, values)]


def _tail(slot: BoundSlot, context: FillContext) -> torch.Tensor | None:
    """Return the padding rows of ``slot`` that a fill of these counts resets, or None."""
    rows = context.rows(slot.axis)
    if rows is None or rows[0] == rows[1] or not slot.padding_policy.resets_tail:
        return None
    whole = slot.slice_for(context.padded_bs, context.padded_num_tokens)
    head = slot.slice_for(context.raw_bs, context.raw_num_tokens)
    for axis, (live, all_rows) in enumerate(zip(head.shape, whole.shape, strict=True)):
        if (
            live != all_rows
        ):  # there is one axis, because `register_slot` refuses a slice_fn that cuts several
            return whole.narrow(axis, live, all_rows - live)
    return None


def _merged(places: Iterable[Place]) -> list[Place]:
    """Return the places in one arena, after joining adjacent rows of the same columns."""
    joined: list[Place] = []
    for place in sorted(places):
        if joined and joined[-1][1:] == (place[0], *place[2:]):
            joined[-1] = (joined[-1][0], *place[1:])
        else:
            joined.append(place)
    return joined
