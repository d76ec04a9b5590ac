"""One declared buffer: `GraphSlot`, its `PaddingPolicy`, and the `FillContext` of one fill.

The names and meanings follow SGLang's buffer registry (PR 26742). A slot says what lies in the rows
that a padded batch does not use, because "empty row" is spelled differently by every kernel: the pad
value belongs to the tensor and its consumer, not to the runner.

Does not: allocate or write; `graphpact.buffers.registry` does.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from graphpact.errors import SlotError

Axis = Literal["bs", "tokens", "none"]
"""Which count a slot's rows follow: requests, tokens, or neither (then it is never padded)."""


class PaddingPolicy(enum.Enum):
    """What the rows between the raw and the padded count hold after a fill."""

    KEEP_PAD = "keep_pad"
    """Whatever was there. Needs a reason: who guarantees that nobody reads it."""
    FILL_SENTINEL = "fill_sentinel"
    """``pad_value``."""
    ZERO = "zero"
    """Zero."""
    FOREACH_COPY = "foreach_copy"
    """Whatever was there, as KEEP_PAD; the original's default for inputs. Needs a reason too."""
    FILL_ONCE = "fill_once"
    """``pad_value`` from the start, never written again: for slots whose rows are not copied per step."""

    @property
    def keeps_tail(self) -> bool:
        """Whether the tail holds earlier rows after a fill, so that a reason is owed."""
        return self in (PaddingPolicy.KEEP_PAD, PaddingPolicy.FOREACH_COPY)

    @property
    def resets_tail(self) -> bool:
        """Whether every padded fill writes the tail."""
        return self in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.ZERO)


@dataclass(frozen=True, slots=True)
class FillContext:
    """The counts of one fill. Raw counts are the batch's, padded counts the captured shape's."""

    raw_bs: int
    padded_bs: int
    raw_num_tokens: int
    padded_num_tokens: int

    def rows(self, axis: Axis) -> tuple[int, int] | None:
        """Return (raw, padded) rows along ``axis``, or None for an axis that is never padded."""
        if axis == "bs":
            return self.raw_bs, self.padded_bs
        if axis == "tokens":
            return self.raw_num_tokens, self.padded_num_tokens
        return None


@dataclass(slots=True, kw_only=True)
class GraphSlot:
    """The declaration of one graph-resident buffer.

    Args:
        name: Unique in its registry. Equal to the `ForwardBatch` field it is copied from, if any;
            a backend's slots carry its name as prefix (``flashinfer.kv_indptr``).
        shape_fn: ``(max_bs, max_num_tokens) -> shape`` of the whole buffer.
        dtype: Element type.
        owner: Who declared it; shown in errors and reports.
        axis: Which count its rows follow.
        device: Where it lies; None means the registry's device.
        padding_policy: What unused rows hold.
        pad_value: Required by FILL_SENTINEL and FILL_ONCE.
        reason: Required by KEEP_PAD and FOREACH_COPY: why no one reads the tail.
        copy_from_fb: Whether a fill copies the batch field of the same name into it.
        optional: Whether a batch may lack that field; then the head keeps what it holds.
        slice_fn: ``(buffer, n) -> view`` for buffers whose rows are not the first axis or not ``n``.

    Raises:
        SlotError: An unknown axis, a missing pad value, or a missing reason.
    """

    name: str
    shape_fn: Callable[[int, int], tuple[int, ...]]
    dtype: torch.dtype
    owner: str
    axis: Axis = "none"
    device: torch.device | None = None
    padding_policy: PaddingPolicy = PaddingPolicy.ZERO
    pad_value: int | float | bool | None = None
    reason: str | None = None
    copy_from_fb: bool = True
    optional: bool = False
    slice_fn: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    buffer: torch.Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.axis not in ("bs", "tokens", "none"):
            raise SlotError(
                f"slot {self.name!r} of {self.owner}: unknown axis {self.axis!r}",
                hint="an axis is 'bs', 'tokens' or 'none'",
            )
        needs_value = (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE)
        if self.padding_policy in needs_value and self.pad_value is None:
            raise SlotError(
                f"slot {self.name!r} of {self.owner}: {self.padding_policy.name} without a pad_value",
                hint="give the value that the consumer reads as an empty row",
            )
        if self.padding_policy is PaddingPolicy.FILL_ONCE and self.copy_from_fb:
            raise SlotError(
                f"slot {self.name!r} of {self.owner}: FILL_ONCE on a slot that is copied every step",
                hint="FILL_SENTINEL resets the tail that a larger batch left; or copy_from_fb=False",
            )
        if self.padding_policy.keeps_tail and not self.reason:
            raise SlotError(
                f"slot {self.name!r} of {self.owner}: {self.padding_policy.name} without a reason",
                hint="say who guarantees that padded rows are not read, or pad them",
            )

    @property
    def initial_value(self) -> int | float | bool:
        """What a new buffer holds everywhere, so that capture reads what a padded replay reads."""
        return 0 if self.pad_value is None else self.pad_value

    def slice_for(self, padded_bs: int, padded_num_tokens: int) -> torch.Tensor:
        """Return the view of this slot that a graph of the given padded counts reads.

        Raises:
            SlotError: The slot is not registered yet, so it has no buffer.
        """
        if self.buffer is None:
            raise SlotError(
                f"slot {self.name!r} of {self.owner} has no buffer",
                hint="register it with a CudaGraphBufferRegistry first",
            )
        if self.axis == "none":
            return self.buffer
        n = padded_bs if self.axis == "bs" else padded_num_tokens
        return self.buffer[:n] if self.slice_fn is None else self.slice_fn(self.buffer, n)
