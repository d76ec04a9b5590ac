"""One declared buffer: `GraphSlot`, its `PaddingPolicy`, and the `FillContext` of one fill.

Names and meanings follow SGLang's buffer registry (PR 26742). A slot declares the contents of its padding
rows, because kernels mark an empty row with different values. The tensor and the kernel that reads it
determine the pad value; the runner does not.

A `GraphSlot` is frozen data and may be registered in several registries. A registry returns a `BoundSlot`:
the same declaration with memory.

Does not: allocate or write; `graphpact.buffers.registry` does.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal, NoReturn, get_args

import torch

from graphpact.errors import SlotError, UnallocatedSlotError, named_options

Axis = Literal["bs", "tokens", "none"]
"""What a slot's rows count: requests, tokens, or neither (then it is never padded)."""

SlotRole = Literal["offsets", "lengths", "table", "plan", "mask", "workspace", "staging", "constant"]
"""How kernels use a backend's slot, so that tools need not guess it from names.

offsets    where each request's part of a packed axis begins: ``cu_seqlens``, ``indptr``
lengths    a count for each request or token: keys, pages
table      KV slots, pages or requests by row
plan       a kernel's split of its work, made from lengths, often on the host
mask       the keys that each query sees
workspace  memory that kernels write before they read it; no step prepares it
staging    host memory from which an asynchronous copy fills another slot
constant   values that no step writes, such as an ``arange``; see ``contents`` of `GraphSlot`
"""


FIX_CALLBACK = "fix the callback; GRAPHPACT_TRACEBACK=1 prints the traceback"
"""What to do when a function of a slot raises."""


class PaddingPolicy(enum.Enum):
    """The contents of padding rows, those between the raw and the padded count, after a fill.

    Attributes:
        KEEP_PAD: Not written. A lane requires a reason why stale padding is safe.
        FILL_SENTINEL: ``pad_value``.
        ZERO: Zero.
        FOREACH_COPY: Not written, as KEEP_PAD; the original's default. A lane requires a reason too.
        FILL_ONCE: ``pad_value`` in a new buffer, not written later. If a slot copies live rows, they stay in
            the padding rows of smaller batches, and a lane requires a reason why that is safe.
    """

    KEEP_PAD = "keep_pad"
    FILL_SENTINEL = "fill_sentinel"
    ZERO = "zero"
    FOREACH_COPY = "foreach_copy"
    FILL_ONCE = "fill_once"

    @property
    def resets_tail(self) -> bool:
        """Whether every padded fill writes the padding rows (the tail)."""
        return self in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.ZERO)

    @property
    def has_pad_value(self) -> bool:
        """Whether the policy requires a ``pad_value``."""
        return self in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE)


@dataclass(frozen=True, slots=True)
class FillContext:
    """The counts of one fill.

    Args:
        raw_bs: Requests in the batch.
        padded_bs: Requests in the captured shape.
        raw_num_tokens: Tokens in the batch.
        padded_num_tokens: Tokens in the captured shape.
        pp_proxy_tensors: Tensors of the previous pipeline stage, for the ``source_fn`` of a slot: an object
            whose ``tensors`` maps names to tensors. It is not a field of a batch.
    """

    raw_bs: int
    padded_bs: int
    raw_num_tokens: int
    padded_num_tokens: int
    pp_proxy_tensors: Any = field(default=None, compare=False)

    def rows(self, axis: Axis) -> tuple[int, int] | None:
        """Return (raw, padded) rows along ``axis``, or None for an axis that is never padded."""
        if axis == "bs":
            return self.raw_bs, self.padded_bs
        if axis == "tokens":
            return self.raw_num_tokens, self.padded_num_tokens
        return None


ShapeFn = Callable[[int, int], tuple[int, ...]]
PostFill = Callable[[torch.Tensor, Any, FillContext], None]
SliceFn = Callable[[torch.Tensor, int], torch.Tensor]
SourceFn = Callable[[Any, FillContext], torch.Tensor | None]


@named_options
@dataclass(frozen=True)
class GraphSlot:
    """The declaration of one graph-resident buffer: frozen data without memory.

    Args:
        name: Unique in its registry. If the slot is copied from a batch field, it has the field's name. A
            slot with a dotted name (``flashinfer.kv_indptr``, ``eagle.hidden_states``) is copied from
            `ForwardBatch.extra`, unless it has a ``source_fn`` or its owner fills it
            (``copy_from_fb=False``).
        shape_fn: ``(max_bs, max_num_tokens) -> shape`` of the whole buffer.
        dtype: Element type.
        axis: What its rows count.
        device: Its device; None for the registry's device.
        padding_policy: The contents of padding rows after a fill.
        pad_value: Required by FILL_SENTINEL and FILL_ONCE.
        enabled: Whether the slot is used. If False, it gets no memory, no fill and no view.
        copy_from_fb: Whether a fill copies the batch field of the same name into the live rows.
        post_fill: ``(buffer, batch, context) -> None``, called after all copies to compute contents.
        slice_fn: ``(buffer, n) -> view`` for buffers whose rows are not the first axis, or not ``n``.
        source_fn: ``(batch, context) -> tensor or None``. All rows of the tensor are copied instead of the
            batch field; in a lane they must be as many as the batch has along the axis. None copies nothing.
        owner: The runner or backend that declares it, for errors and reports. A lane requires it.
        reason: Why stale padding is safe. A lane requires it if `keeps_tail`.
        optional: Whether a batch of a lane may lack the field. The live rows then hold the initial value.
        role: How kernels use it; None for the inputs of a model. See `metadata_slot`.
        narrows: Whether a fill may copy int64 values into this int32 slot. The owner guarantees that they
            fit; larger values wrap. `graphpact.buffers.inputs` sets it for int32 memory that it adopts.
        contents: A function that writes the initial values into a new buffer, which may depend only on the
            index; None to fill the buffer with the one initial value.
        extra_rows: Number of rows beyond the count of the axis, such as 1 for offsets. Not used with
            slice_fn.

    Raises:
        SlotError: The axis or role is unknown, the pad value is missing or does not fit the dtype, a
            source_fn is never called, narrows is set for a dtype other than int32, a slot without an axis or
            with a slice_fn has extra rows, or an argument has a wrong type.
    """

    name: str
    shape_fn: ShapeFn
    dtype: torch.dtype
    axis: Axis = "tokens"
    device: torch.device | None = None
    padding_policy: PaddingPolicy = PaddingPolicy.FOREACH_COPY
    pad_value: int | float | bool | None = None
    enabled: bool = True
    copy_from_fb: bool = True
    post_fill: PostFill | None = None
    slice_fn: SliceFn | None = None
    source_fn: SourceFn | None = None
    _: KW_ONLY
    owner: str | None = None
    reason: str | None = None
    optional: bool = False
    role: SlotRole | None = None
    narrows: bool = False
    contents: Callable[[torch.Tensor], object] | None = None
    extra_rows: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        if self.axis not in get_args(Axis):
            self._refuse(f"unknown axis {self.axis!r}", "an axis is 'bs', 'tokens' or 'none'")
        if self.padding_policy.has_pad_value and self.pad_value is None:
            hint = "give the value that kernels read as an empty row"
            self._refuse(f"{self.padding_policy.name} without a pad_value", hint)
        if self.pad_value is not None and not _is_value_of(self.dtype, self.pad_value):
            hint = "give a value that the dtype holds, or another dtype"
            self._refuse(f"{self.dtype} cannot hold its pad_value {self.pad_value!r}", hint)
        roles = get_args(SlotRole)
        if self.role is not None and self.role not in roles:
            self._refuse(f"unknown role {self.role!r}", f"a role is one of {', '.join(roles)}")
        if self.narrows and self.dtype is not torch.int32:
            hint = "only int64 to int32 can be narrowed; give dtype=torch.int32, or leave narrows out"
            self._refuse(f"narrows=True, and its dtype is {self.dtype}", hint)
        if self.source_fn is not None and not self.copy_from_fb:
            hint = "leave out copy_from_fb or source_fn"
            self._refuse("copy_from_fb=False, so its source_fn is never called", hint)
        if self.extra_rows < 0 or (self.extra_rows and (self.axis == "none" or self.slice_fn is not None)):
            hint = 'extra rows are 1 or more beyond axis="bs" or axis="tokens", without a slice_fn'
            self._refuse(f"extra_rows={self.extra_rows}", hint)

    def _refuse(self, fault: str, hint: str) -> NoReturn:
        raise SlotError(f"{self.label}: {fault}", hint=hint)

    def _check_types(self) -> None:
        """Raise `SlotError` for arguments of a wrong type, which would fail later or silently."""
        for what, value, kind in (
            ("name", self.name, str),
            ("dtype", self.dtype, torch.dtype),
            ("padding_policy", self.padding_policy, PaddingPolicy),
            ("pad_value", self.pad_value, int | float | None),
            ("owner", self.owner, str | None),
            ("reason", self.reason, str | None),
            ("extra_rows", self.extra_rows, int),
        ):
            if not isinstance(value, kind):
                wanted = getattr(kind, "__name__", str(kind)).replace(" | ", " or ")
                fault = f"{what} is {value!r}, a {type(value).__name__}"
                raise SlotError(f"slot {self.name!r}: {fault}", hint=f"give a {wanted}")
        if not self.name:
            self._refuse("without a name", "give the batch field that it copies, or a dotted name")

    @property
    def label(self) -> str:
        """Name and owner, for messages."""
        return f"slot {self.name!r} of {self.owner or 'an unnamed owner'}"

    @property
    def initial_value(self) -> int | float | bool:
        """The value of every element of a new buffer, and of padding rows that are reset."""
        if self.padding_policy.has_pad_value and self.pad_value is not None:
            return self.pad_value
        return 0

    @property
    def is_computed(self) -> bool:
        """Whether its contents are computed, so that views contain it even if the batch lacks the field."""
        return self.post_fill is not None or not self.copy_from_fb

    @property
    def is_refreshed(self) -> bool:
        """Whether every fill of a lane writes all live rows, so that lanes may share the memory."""
        return (self.copy_from_fb and not self.optional) or self.post_fill is not None

    @property
    def keeps_tail(self) -> bool:
        """Whether padding rows can contain rows of an earlier batch. A lane then requires a reason."""
        if self.axis == "none":
            return self.source_fn is not None  # the source may be shorter than in the fill before
        if self.padding_policy.resets_tail:
            return False
        return self.copy_from_fb or self.padding_policy is not PaddingPolicy.FILL_ONCE

    def slice_for(self, padded_bs: int, padded_num_tokens: int) -> torch.Tensor:
        """Raise `UnallocatedSlotError`: a declaration has no memory. A `BoundSlot` returns the view."""
        del padded_bs, padded_num_tokens
        hint = "use the slot that register_slot or get_slot returns"
        raise UnallocatedSlotError(f"{self.label} is a declaration, and has no buffer", hint=hint)

    def bound(self, buffer: torch.Tensor | None) -> "BoundSlot":
        """Return this declaration with memory; a registry calls it."""
        return BoundSlot(**{f.name: getattr(self, f.name) for f in fields(GraphSlot)}, buffer=buffer)


@dataclass(frozen=True)
class BoundSlot(GraphSlot):
    """A slot of one registry: a declaration with its ``buffer``, which is None if it is not enabled."""

    buffer: torch.Tensor | None = field(default=None, repr=False, compare=False, kw_only=True)

    def slice_for(self, padded_bs: int, padded_num_tokens: int) -> torch.Tensor:
        """Return the view for graphs of the padded counts; raise `UnallocatedSlotError` without a buffer."""
        if self.buffer is None:
            raise UnallocatedSlotError(f"{self.label} has no buffer", hint="declare it with enabled=True")
        if self.axis == "none":
            n = self.buffer.shape[0] if self.buffer.dim() else 0
        else:
            n = padded_bs if self.axis == "bs" else padded_num_tokens
        if self.slice_fn is not None:
            return self.slice_fn(self.buffer, n)
        return self.buffer if self.axis == "none" else self.buffer[: n + self.extra_rows]


@named_options
def metadata_slot(
    name: str,
    rows: ShapeFn,
    dtype: torch.dtype,
    *,
    role: SlotRole,
    axis: Axis = "none",
    extra_rows: int = 0,
    slice_fn: SliceFn | None = None,
    pad_value: float | bool = 0,
    contents: Callable[[torch.Tensor], object] | None = None,
) -> GraphSlot:
    """Return the declaration of a slot that a backend fills: metadata, or a workspace.

    The backend writes every row of the padded extent in every step, and fills do not write the slot. Three
    roles differ: only kernels write a workspace, nothing writes a constant, and staging is on the host.

    Args:
        name: ``owner.what``. The part before the first dot is the owner.
        rows: ``(bs, num_tokens) -> shape``: called with the largest counts for the whole buffer, and with
            those of the batch for an eager step.
        dtype: Element type.
        role: How kernels use it.
        axis: What its rows count; ``"none"`` for packed indices, plans and workspaces.
        extra_rows: See `GraphSlot`.
        slice_fn: See `GraphSlot`. It replaces ``extra_rows``.
        pad_value: Initial value of a workspace or a constant.
        contents: See `GraphSlot`; for a constant, such as ``lambda t: torch.arange(len(t), out=t)``.

    Raises:
        SlotError: The name has no owner, or `GraphSlot` refuses an argument.
    """
    owner, dot, what = name.partition(".")
    if not (owner and dot and what):
        hint = "prefix it with the plugin's name, such as 'flashinfer.kv_indptr'"
        raise SlotError(f"slot {name!r}: a metadata slot is named owner.what", hint=hint)
    once = role in ("workspace", "constant")
    return GraphSlot(
        name,
        rows,
        dtype,
        axis=axis,
        device=torch.device("cpu") if role == "staging" else None,
        padding_policy=PaddingPolicy.FILL_ONCE if once else PaddingPolicy.KEEP_PAD,
        pad_value=pad_value if once else None,
        copy_from_fb=False,
        slice_fn=slice_fn,
        owner=owner,
        reason=None if once else "every row of the padded extent is written in every step",
        role=role,
        contents=contents,
        extra_rows=extra_rows,
    )


def _is_value_of(dtype: torch.dtype, value: float) -> bool:
    """Return whether ``dtype`` can hold ``value``. A float may be rounded but must not overflow."""
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    if dtype.is_complex:
        return True
    limits = torch.iinfo(dtype)
    return math.isfinite(value) and limits.min <= value <= limits.max and value == int(value)
