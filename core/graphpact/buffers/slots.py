"""One declared buffer: `GraphSlot`, its `PaddingPolicy`, and the `FillContext` of one fill.

The names and meanings follow SGLang's buffer registry (PR 26742). A slot says what lies in the rows
that a padded batch does not use, because "empty row" is spelled differently by every kernel: the pad
value belongs to the tensor and its consumer, not to the runner.

Does not: allocate or write; `graphpact.buffers.registry` does.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch

from graphpact.errors import GraphpactError, SlotError, UnallocatedSlotError

Axis = Literal["bs", "tokens", "none"]
"""Which count a slot's rows follow: requests, tokens, or neither (then it is never padded)."""


class PaddingPolicy(enum.Enum):
    """What the rows between the raw and the padded count hold after a fill."""

    KEEP_PAD = "keep_pad"
    """Whatever was there. A lane asks for the reason: who guarantees that nobody is misled by it."""
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


@dataclass(slots=True)
class GraphSlot:
    """The declaration of one graph-resident buffer. Once registered it does not change.

    Args:
        name: Unique in its registry: the batch field that it is copied from, if any. A dotted name
            (``flashinfer.kv_indptr``, ``ngram_embedding_info.req_lens``) is no field of a batch: such
            a slot has a ``source_fn``, or an owner that fills it.
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
        buffer: The memory, once registered.
        owner: Who declared it; shown in errors and reports. A lane asks for it.
        reason: Why earlier rows in the tail mislead nobody. A lane asks for it where `keeps_tail`.
        optional: Whether a batch of a lane may lack the field; the head then holds the initial value.

    Raises:
        SlotError: An unknown axis, a pad value that is missing or is none of the dtype's, a dotted name
            that nothing fills, a source_fn that nothing calls, or an argument of another type.
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
    buffer: torch.Tensor | None = field(default=None, repr=False)
    _: KW_ONLY
    owner: str | None = None
    reason: str | None = None
    optional: bool = False
    _registered: bool = field(default=False, init=False, repr=False, compare=False)

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "_registered", False):
            raise SlotError(
                f"{self.label} is registered, so its {name!r} cannot change: graphs may read its memory,"
                " and fills were made for what it declares",
                hint="copy into slot.buffer, or declare another slot before anything is captured",
            )
        object.__setattr__(self, name, value)

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
        if "." in self.name and self.copy_from_fb and self.source_fn is None:
            raise SlotError(
                f"{self.label}: a dotted name is no batch field, so nothing would be copied into it",
                hint="give a source_fn, or copy_from_fb=False where its owner fills it",
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
    def is_registered(self) -> bool:
        """Whether a registry has it, or it was declared with memory of its own."""
        return self._registered or self.buffer is not None

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
    def keeps_tail(self) -> bool:
        """Whether rows of an earlier batch can be left in the tail, so that a reason is owed."""
        if self.axis == "none":
            return self.source_fn is not None  # a source may be shorter than the one before
        if self.padding_policy.resets_tail:
            return False
        return self.copy_from_fb or self.padding_policy is not PaddingPolicy.FILL_ONCE

    def registered(self, buffer: torch.Tensor | None) -> "GraphSlot":
        """Take ``buffer`` for good, and return this slot; a registry calls it."""
        self.buffer = buffer
        self._registered = True
        return self

    def slice_for(self, padded_bs: int, padded_num_tokens: int) -> torch.Tensor:
        """Return the view of this slot that a graph of the given padded counts reads.

        Raises:
            UnallocatedSlotError: The slot is not registered, or not enabled, so it has no buffer.
        """
        if self.buffer is None:
            raise UnallocatedSlotError(
                f"{self.label} has no buffer",
                hint="register it, enabled, with a CudaGraphBufferRegistry first",
            )
        if self.axis == "none":
            n = self.buffer.shape[0] if self.buffer.dim() else 0
        else:
            n = padded_bs if self.axis == "bs" else padded_num_tokens
        if self.slice_fn is not None:
            return self.slice_fn(self.buffer, n)
        return self.buffer if self.axis == "none" else self.buffer[:n]


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
