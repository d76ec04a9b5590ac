"""One declared buffer: `GraphSlot`, its `PaddingPolicy`, and the `FillContext` of one fill.

The names and meanings follow SGLang's buffer registry (PR 26742). A slot says what lies in the rows
that a padded batch does not use, because "empty row" is spelled differently by every kernel: the pad
value belongs to the tensor and its consumer, not to the runner.

A `GraphSlot` is frozen data, and may be registered in any number of registries. A registry answers with a
`BoundSlot`: the same declaration, with the memory that it got there.

Does not: allocate or write; `graphpact.buffers.registry` does.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args

import torch

from graphpact.errors import GraphpactError, SlotError, UnallocatedSlotError

Axis = Literal["bs", "tokens", "none"]
"""Which count a slot's rows follow: requests, tokens, or neither (then it is never padded)."""


SlotRole = Literal["offsets", "lengths", "table", "plan", "mask", "workspace", "staging"]
"""What a backend's slot is to its kernels, so that no tool guesses from names.

offsets    where each request's part of a packed axis begins: ``cu_seqlens``, ``indptr``
lengths    a count a request or token: keys, pages
table      which KV slots or pages, or which request, rows stand for
plan       how a kernel splits its work, made from lengths, often on the host
mask       which keys a query sees
workspace  memory that kernels write before they read it; no step prepares it
staging    host memory from which an asynchronous copy fills another slot
"""


class PaddingPolicy(enum.Enum):
    """What the rows between the raw and the padded count hold after a fill."""

    KEEP_PAD = "keep_pad"
    """Whatever was there. A lane asks for the reason why stale padding is safe."""
    FILL_SENTINEL = "fill_sentinel"
    """``pad_value``."""
    ZERO = "zero"
    """Zero."""
    FOREACH_COPY = "foreach_copy"
    """Whatever was there, as KEEP_PAD; the original's default for inputs. A lane asks why, too."""
    FILL_ONCE = "fill_once"
    """``pad_value`` from the start. A fill never writes it again, so a head that is copied leaves
    its rows to the tails of smaller batches; a lane asks why that is harmless."""

    @property
    def resets_tail(self) -> bool:
        """Whether every padded fill writes the tail."""
        return self in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.ZERO)

    @property
    def has_pad_value(self) -> bool:
        """Whether the policy is about ``pad_value``, so that one must be given."""
        return self in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE)


@dataclass(frozen=True, slots=True)
class FillContext:
    """The counts of one fill: raw ones are the batch's, padded ones the captured shape's.

    Args:
        raw_bs: Requests in the batch.
        padded_bs: Requests in the shape.
        raw_num_tokens: Tokens in the batch.
        padded_num_tokens: Tokens in the shape.
        pp_proxy_tensors: What the previous pipeline stage sent, for the ``source_fn`` of a slot: an
            object whose ``tensors`` maps names to tensors. It is no field of a batch.
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


@dataclass(frozen=True)
class GraphSlot:
    """The declaration of one graph-resident buffer: frozen data without memory.

    Args:
        name: Unique in its registry: the batch field that it is copied from, if any. A dotted name
            (``flashinfer.kv_indptr``, ``eagle.hidden_states``) is taken from `ForwardBatch.extra`, unless the
            slot has a ``source_fn``, or an owner that fills it (``copy_from_fb=False``).
        shape_fn: ``(max_bs, max_num_tokens) -> shape`` of the whole buffer.
        dtype: Element type.
        axis: Which count its rows follow.
        device: Where it lies; None means the registry's device.
        padding_policy: What unused rows hold after a fill.
        pad_value: Required by FILL_SENTINEL and FILL_ONCE.
        enabled: False keeps the declaration and nothing else: no memory, no fill, no view.
        copy_from_fb: Whether a fill copies the batch field of the same name into the head.
        post_fill: ``(buffer, batch, context)``, called after all copies: computes what is no copy.
        slice_fn: ``(buffer, n) -> view`` for buffers whose rows are not the first axis, or not ``n``.
        source_fn: ``(batch, context) -> tensor or None``: what is copied instead of the batch field,
            as many rows as it has (in a lane, as many as the batch's along its axis); None copies
            nothing this time.
        owner: Who declared it; shown in errors and reports. A lane asks for it.
        reason: Why stale padding is safe. A lane asks for it where `keeps_tail`.
        optional: Whether a batch of a lane may lack the field; the head then holds the initial value.
        role: What it is to kernels; None for the inputs of a model. See `metadata_slot`.
        narrows: Whether a fill may copy int64 into this int32 slot. The owner knows that every value is one
            of int32; a value that is not wraps. The presets set it for int32 memory that they adopt.

    Raises:
        SlotError: An unknown axis or role, a pad value that is missing or is none of the dtype's, a source_fn
            that nothing calls, narrows of another dtype than int32, or an argument of another type.
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

    def __post_init__(self) -> None:
        self._check_types()
        if self.axis not in ("bs", "tokens", "none"):
            raise SlotError(
                f"{self.label}: unknown axis {self.axis!r}",
                hint="an axis is 'bs', 'tokens' or 'none'",
            )
        if self.padding_policy.has_pad_value and self.pad_value is None:
            raise SlotError(
                f"{self.label}: {self.padding_policy.name} without a pad_value",
                hint="give the value that the consumer reads as an empty row",
            )
        if self.pad_value is not None and not _is_value_of(self.dtype, self.pad_value):
            raise SlotError(
                f"{self.label}: {self.dtype} cannot hold its pad_value {self.pad_value!r}",
                hint="give a value that the dtype holds, or another dtype",
            )
        if self.role is not None and self.role not in get_args(SlotRole):
            raise SlotError(
                f"{self.label}: unknown role {self.role!r}",
                hint=f"a role is one of {', '.join(get_args(SlotRole))}",
            )
        if self.narrows and self.dtype is not torch.int32:
            raise SlotError(
                f"{self.label}: narrows=True, and its dtype is {self.dtype}",
                hint="only int64 into int32 is narrowed; give dtype=torch.int32, or leave narrows out",
            )
        if self.source_fn is not None and not self.copy_from_fb:
            raise SlotError(
                f"{self.label}: its source_fn would never be called, with copy_from_fb=False",
                hint="leave copy_from_fb out, or the source_fn",
            )

    def _check_types(self) -> None:
        """Refuse arguments of a kind that would be noticed late, or never."""
        for what, value, kind in (
            ("name", self.name, str),
            ("dtype", self.dtype, torch.dtype),
            ("padding_policy", self.padding_policy, PaddingPolicy),
            ("pad_value", self.pad_value, (int, float, type(None))),
            ("owner", self.owner, (str, type(None))),
            ("reason", self.reason, (str, type(None))),
        ):
            if not isinstance(value, kind):
                kinds = kind if isinstance(kind, tuple) else (kind,)
                wanted = " or ".join(k.__name__ for k in kinds).replace("NoneType", "None")
                raise SlotError(
                    f"slot {self.name!r}: {what} is {value!r}, a {type(value).__name__}",
                    hint=f"give a {wanted}",
                )
        if not self.name:
            raise SlotError(
                f"{self.label}: a slot without a name",
                hint="give the batch field that it is copied from, or a dotted name of its owner's",
            )

    @property
    def label(self) -> str:
        """Name and owner, for messages."""
        return f"slot {self.name!r} of {self.owner or 'an unnamed owner'}"

    @property
    def initial_value(self) -> int | float | bool:
        """What a new buffer holds everywhere, and what a tail that is reset holds again."""
        if self.padding_policy.has_pad_value and self.pad_value is not None:
            return self.pad_value
        return 0

    @property
    def is_computed(self) -> bool:
        """Whether its content is more than a copy, so that views show it whatever the batch has."""
        return self.post_fill is not None or not self.copy_from_fb

    @property
    def is_refreshed(self) -> bool:
        """Whether every fill of a lane writes its head, so that another lane may use it in between."""
        return (self.copy_from_fb and not self.optional) or self.post_fill is not None

    @property
    def is_workspace(self) -> bool:
        """Whether it is memory that kernels pass through: one serves every step, whatever it holds."""
        return self.role == "workspace"

    @property
    def keeps_tail(self) -> bool:
        """Whether rows of an earlier batch can be left in the tail, so that a reason is owed."""
        if self.axis == "none":
            return self.source_fn is not None  # a source may be shorter than the one before
        if self.padding_policy.resets_tail:
            return False
        return self.copy_from_fb or self.padding_policy is not PaddingPolicy.FILL_ONCE

    def bound(self, buffer: torch.Tensor | None) -> "BoundSlot":
        """Return this declaration with memory; a registry calls it."""
        return BoundSlot(
            **{f.name: getattr(self, f.name) for f in fields(GraphSlot)}, buffer=buffer
        )


@dataclass(frozen=True)
class BoundSlot(GraphSlot):
    """A slot of one registry: a declaration, and the memory that it has there.

    Args:
        buffer: The memory; None for a slot that is not enabled.
    """

    buffer: torch.Tensor | None = field(default=None, repr=False, compare=False, kw_only=True)

    def slice_for(self, padded_bs: int, padded_num_tokens: int) -> torch.Tensor:
        """Return the view of this slot that a graph of the given padded counts reads.

        Raises:
            UnallocatedSlotError: The slot is not enabled, so it has no buffer.
        """
        if self.buffer is None:
            raise UnallocatedSlotError(
                f"{self.label} has no buffer", hint="declare it with enabled=True"
            )
        if self.axis == "none":
            n = self.buffer.shape[0] if self.buffer.dim() else 0
        else:
            n = padded_bs if self.axis == "bs" else padded_num_tokens
        if self.slice_fn is not None:
            return self.slice_fn(self.buffer, n)
        return self.buffer if self.axis == "none" else self.buffer[:n]


_WRITTEN = "every row of the padded extent is written in every step"


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
) -> GraphSlot:
    """Return the declaration of a slot that a backend fills: of its metadata, or a workspace.

    The backend writes every row of the padded extent in every step, so no fill resets a tail. Two roles
    differ: a workspace is written by kernels alone, and staging lies on the host.

    Args:
        name: ``owner.what``: the part before the first dot is the owner.
        rows: ``(bs, num_tokens) -> shape``: of the whole buffer for the largest counts, of an eager step for
            its own.
        dtype: Element type.
        role: What it is to kernels.
        axis: Which count its rows follow; ``"none"`` for packed indices, plans and workspaces.
        extra_rows: Rows beyond that count: 1 for offsets.
        slice_fn: See `GraphSlot`; instead of ``extra_rows``.
        pad_value: What a new buffer holds.

    Raises:
        SlotError: A name without an owner, or what `GraphSlot` refuses.
    """
    owner, dot, what = name.partition(".")
    if not (owner and dot and what):
        raise SlotError(
            f"slot {name!r}: a metadata slot is named owner.what",
            hint="prefix it with the plugin's name, such as 'flashinfer.kv_indptr'",
        )
    if extra_rows:
        slice_fn = partial(_head, extra_rows)
    once = role == "workspace"
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
        reason=None if once else _WRITTEN,
        role=role,
    )


def _head(extra_rows: int, buffer: torch.Tensor, n: int) -> torch.Tensor:
    return buffer[: n + extra_rows]


def call(
    slot: GraphSlot, what: str, function: Callable[..., Any], *args: Any, hint: str | None = None
) -> Any:
    """Call what the slot's owner wrote; whatever it raises, but an error of ours, is told as the slot's.

    Args:
        slot: Whose it is.
        what: For the message; ``{}`` is the slot's label.
        function: What is called.
        args: Its arguments.
        hint: What to do; by default, where to look.

    Raises:
        SlotError: ``function`` raised.
    """
    try:
        return function(*args)
    except GraphpactError:
        raise
    except Exception as error:
        raise SlotError(
            f"{what.format(slot.label)} raised {type(error).__name__}: {error}",
            hint=hint or "mend it; GRAPHPACT_TRACEBACK=1 shows where it fails",
        ) from error


def _is_value_of(dtype: torch.dtype, value: float) -> bool:
    """Return whether ``dtype`` holds ``value``; a float rounds, as always, but does not overflow."""
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    if dtype.is_complex:
        return True
    limits = torch.iinfo(dtype)
    return math.isfinite(value) and limits.min <= value <= limits.max and value == int(value)
