"""Exhibits of recorded work and frozen host numbers: GP08, GP10.

Does not: contain exhibits of binding and refresh; see `graphpact_museum.bindings`.
"""

from collections.abc import Callable
from dataclasses import fields, make_dataclass, replace
from typing import Any

from graphpact.attention import each_step
from graphpact.batch import ForwardBatch
from graphpact.shapes import GraphShape
from graphpact_museum.edits.override import named_after, override, overrides
from graphpact_museum.exhibit import Make, exhibit

# -- GP08: frozen numbers ----------------------------------------------------------------------------


def _longest(view: ForwardBatch) -> int:
    """Return the number of keys of the longest request in this batch, from host memory."""
    return int(max(view.seq_lens_cpu.tolist(), default=1)) + view.uncounted_keys


def _own_bound(base: type[Any], field: str) -> type[Any]:
    """Return a backend that bounds the keys by the longest request of the bound batch."""

    def allocate_metadata(_: Any, right: Any, view: ForwardBatch, *args: Any) -> Any:
        metadata = right(view, *args)
        setattr(metadata, field, _longest(view))
        return metadata

    return override(base, allocate_metadata)


def _by_kept_longest(edit: Callable[[Any, int], Any]) -> Make:
    """Make an edit of backends whose kernels depend on a host number of the batch that was bound.

    Args:
        edit: ``(metadata, longest) -> metadata``: returns the metadata that the kernels get. ``longest`` is
            the number of keys of the longest request.
    """

    def allocate_metadata(self: Any, right: Any, view: ForwardBatch, *args: Any) -> Any:
        self.longest = _longest(view)
        return right(view, *args)

    def forward(self: Any, right: Any, *args: Any) -> Any:
        *rest, metadata = args
        return right(*rest, edit(metadata, self.longest))

    return named_after(edit, lambda base: override(base, allocate_metadata, forward, longest=1))


@exhibit("GP08", "huggingface/candle#3728", on="fa3", lanes="target_verify")
@_by_kept_longest
def fa3_narrowed_table(metadata: Any, longest: int) -> Any:
    """The kernel gets as many pages of the table as the dummy batch has."""
    pages = -(-longest // metadata.page_size)
    return replace(metadata, page_table=metadata.page_table.narrow(1, 0, pages))


@exhibit("GP08", "microsoft/onnxruntime#32239", on="flashinfer", lanes="target_verify")
@_by_kept_longest
def flashinfer_short_path(metadata: Any, longest: int) -> Any:
    """At capture a threshold on the longest request selects the indices of sliding-window layers."""
    if longest > min(metadata.windows):
        return metadata
    full = {name: getattr(metadata, name) for name in ("kv_indptr", "kv_indices", "plan")}
    rows = {w: replace(part, **full) for w, part in metadata.windows.items()}
    return replace(metadata, windows=rows)


@exhibit("GP08", "huggingface/candle#3728", on="reference", lanes="extend")
def reference_context_of_capture(base: type[Any]) -> type[Any]:
    """Attention reads only as many positions as the dummy batch has."""

    def allocate_metadata(self: Any, right: Any, view: ForwardBatch, *args: Any) -> Any:
        self.longest = _longest(view)
        return right(view, *args)

    def keys_of(self: Any, right: Any, metadata: Any) -> Any:
        table = metadata.table[:, : self.longest]
        return right(replace(metadata, table=table))

    return override(base, allocate_metadata, keys_of, longest=1)


@exhibit("GP08", "Dao-AILab/flash-attention#1164", on="flashinfer", lanes="decode")
def flashinfer_longest_of_capture(base: type[Any]) -> type[Any]:
    """The kernel's bound on keys is the length of the longest request in the dummy batch."""
    return _own_bound(base, "max_kv_len")


@exhibit("GP08", "Dao-AILab/flash-attention#1164", on="trtllm_mla", lanes="draft_decode")
def trtllm_mla_longest_of_capture(base: type[Any]) -> type[Any]:
    """In every step of a draft, max_seq_len_k is the length of the longest request in the dummy batch."""
    return _own_bound(base, "max_seq_len_k")


# -- GP10: other work is recorded --------------------------------------------------------------------


@exhibit("GP10", "sgl-project/sglang#26742", on="flashinfer", lanes="extend")
def flashinfer_upgraded_at_capture(base: type[Any]) -> type[Any]:
    """Only the capture hook upgrades metadata to another type."""

    def init_metadata_capture(self: Any, right: Any, view: ForwardBatch, shape: GraphShape) -> Any:
        self.raw = right(view, shape)
        kind = type(self.raw)
        full = make_dataclass(f"Full{kind.__name__}", [("num_splits", int, 1)], bases=(kind,), kw_only=True)
        return full(**{f.name: getattr(self.raw, f.name) for f in fields(self.raw)})

    def init_metadata_replay(
        self: Any, right: Any, view: ForwardBatch, shape: GraphShape, captured: Any
    ) -> Any:
        del captured
        return right(view, shape, self.raw)

    return override(base, init_metadata_capture, init_metadata_replay, raw=None)


@exhibit("GP10", "sgl-project/sglang#38994", on="fa3", lanes="target_verify")
def fa3_kept_from_eager(base: type[Any]) -> type[Any]:
    """After an eager step the index tensors count as ready, and a capture records no work for them."""

    def init_metadata_eager(self: Any, right: Any, batch: ForwardBatch, *, fill: int | None = None) -> Any:
        self.made = True
        return right(batch, fill=fill)

    def record_metadata(self: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
        if not self.made:
            right(view, metadata)

    return override(base, init_metadata_eager, record_metadata, made=False)


@exhibit("GP10", "sgl-project/sglang#31198", on="trtllm_mla", lanes="target_verify")
def trtllm_mla_fallback_left(base: type[Any]) -> type[Any]:
    """An eager step leaves a fallback switched on, so that a later capture records it."""

    def init_metadata_eager(self: Any, right: Any, batch: ForwardBatch, *, fill: int | None = None) -> Any:
        self.fallback = right(batch, fill=fill)
        return self.fallback

    def forward(self: Any, right: Any, *args: Any) -> Any:
        *rest, metadata = args
        if self.fallback is not None:
            rest[0] = rest[0].contiguous().clone()
        return right(*rest, metadata)

    return override(base, init_metadata_eager, forward, fallback=None)


@exhibit("GP10", "sgl-project/sglang#26665", on="trtllm_mla", lanes="draft_decode")
@overrides("record_metadata")
def trtllm_mla_first_step_recorded(self: Any, _: Any, view: ForwardBatch, metadata: Any) -> None:
    """Only the metadata work of the first draft step is recorded."""
    self.fill_metadata(*next(each_step(view, metadata)))


@exhibit("GP10", "sgl-project/sglang#38994", on="fa3", lanes="mixed")
def fa3_made_in_the_warm_up(base: type[Any]) -> type[Any]:
    """Index tensors are computed on first use, which is in the warm-up, not in the recorded run."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.made = []

    def record_metadata(self: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
        if not any(metadata is each for each in self.made):
            self.made.append(metadata)
            right(view, metadata)

    return override(base, record_metadata, __init__=init)


@exhibit("GP10", "vllm-project/vllm#25743", on="flashinfer", lanes="decode")
@overrides("record_metadata")
def flashinfer_branches_on_contents(self: Any, _: Any, view: ForwardBatch, metadata: Any) -> None:
    """A branch on lengths skips work for the dummy batch, so that this work is not recorded."""
    for at, part in each_step(view, metadata) if self.records_metadata else ():
        needs = _longest(at) > max(part.windows)
        self.fill_metadata(at, part if needs else replace(part, windows={}))
