"""Exhibits of recorded work and frozen host numbers: GP08, GP10.

Does not: contain exhibits of binding and refresh; see `graphpact_museum.bindings`.
"""

from collections.abc import Callable
from dataclasses import fields, make_dataclass, replace
from typing import Any

import torch

from graphpact.attention import each_step
from graphpact.batch import ForwardBatch
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape
from graphpact_museum.exhibit import Exhibit, Make

# -- GP08: frozen numbers ----------------------------------------------------------------------------


def _longest(view: ForwardBatch) -> int:
    """Return the most keys of a request of this batch, from the host."""
    return int(max(view.seq_lens_cpu.tolist(), default=1)) + view.uncounted_keys


def _own_bound(field: str) -> Make:
    """Return a factory of backends whose bound of the keys is that of the batch at hand."""

    def make(base: type[Any]) -> type[Any]:
        class OwnBound(base):  # type: ignore[misc]
            """The bound is the batch's, at capture too."""

            def allocate_metadata(self, view: ForwardBatch, *args: Any) -> Any:
                """Bound the keys by the longest request."""
                metadata = super().allocate_metadata(view, *args)
                setattr(metadata, field, _longest(view))
                return metadata

        return OwnBound

    return make


def _kept_longest(forward: Callable[[Any, Any, int], Any]) -> Make:
    """Return a factory of backends that attends by a host number of the batch that was bound.

    Args:
        forward: ``(backend, metadata, longest)`` to what the kernels are given.
    """

    def make(base: type[Any]) -> type[Any]:
        class KeptLongest(base):  # type: ignore[misc]
            """The longest request is known to `forward`."""

            longest = 1

            def allocate_metadata(self, view: ForwardBatch, *args: Any) -> Any:
                """Allocate, and keep the most keys of this batch."""
                self.longest = _longest(view)
                return super().allocate_metadata(view, *args)

            def forward(self, *args: Any) -> torch.Tensor:
                """Attend by what is kept."""
                *rest, metadata = args
                return super().forward(*rest, forward(self, metadata, self.longest))  # type: ignore[no-any-return]

        return KeptLongest

    return make


def _narrowed(_: Any, metadata: Any, longest: int) -> Any:
    pages = -(-longest // metadata.page_size)
    return replace(metadata, page_table=metadata.page_table.narrow(1, 0, pages))


def _short_path(_: Any, metadata: Any, longest: int) -> Any:
    if longest > min(metadata.windows):
        return metadata
    full = {name: getattr(metadata, name) for name in ("kv_indptr", "kv_indices", "plan")}
    rows = {w: replace(part, **full) for w, part in metadata.windows.items()}
    return replace(metadata, windows=rows)


def _shorter_context(base: type[Any]) -> type[Any]:
    class ShorterContext(base):  # type: ignore[misc]
        """Only as many positions are looked at as the longest request of the batch at hand has."""

        longest = 1

        def allocate_metadata(self, view: ForwardBatch, *args: Any) -> Any:
            """Allocate, and keep the most keys of this batch."""
            self.longest = _longest(view)
            return super().allocate_metadata(view, *args)

        def keys_of(self, metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
            """Return the slots of so many positions."""
            table = metadata.table[:, : self.longest]
            return super().keys_of(replace(metadata, table=table))  # type: ignore[no-any-return]

    return ShorterContext


_BAKED = [
    Exhibit(
        name="flashinfer-longest-of-capture",
        rule="GP08",
        thread="Dao-AILab/flash-attention#1164",
        planted="The kernel's bound of the keys is the longest request of the dummy batch.",
        base="flashinfer",
        lanes=("decode",),
        make=_own_bound("max_kv_len"),
    ),
    Exhibit(
        name="trtllm-mla-longest-of-capture",
        rule="GP08",
        thread="Dao-AILab/flash-attention#1164",
        planted="max_seq_len_k is the longest request of the dummy batch, in every step of a draft.",
        base="trtllm_mla",
        lanes=("draft_decode",),
        make=_own_bound("max_seq_len_k"),
    ),
    Exhibit(
        name="fa3-narrowed-table",
        rule="GP08",
        thread="huggingface/candle#3728",
        planted="The kernel gets as many pages of the table as the dummy batch has.",
        base="fa3",
        lanes=("target_verify",),
        make=_kept_longest(_narrowed),
    ),
    Exhibit(
        name="flashinfer-short-path",
        rule="GP08",
        thread="microsoft/onnxruntime#32239",
        planted="A threshold on the longest request selects at capture the indices of sliding-window layers.",
        base="flashinfer",
        lanes=("target_verify",),
        make=_kept_longest(_short_path),
    ),
    Exhibit(
        name="reference-context-of-capture",
        rule="GP08",
        thread="huggingface/candle#3728",
        planted="Attention reads only as many positions as the dummy batch has.",
        base="reference",
        lanes=("extend",),
        make=_shorter_context,
    ),
]


# -- GP10: recorded otherwise ------------------------------------------------------------------------


def _upgraded(base: type[Any]) -> type[Any]:
    class Upgraded(base):  # type: ignore[misc]
        """Raw metadata becomes full metadata at capture, and stays raw at replay."""

        raw: Any = None

        @hookimpl
        def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
            """Make, and upgrade."""
            self.raw = super().init_metadata_capture(view, shape)
            kind = type(self.raw)
            full = make_dataclass(
                f"Full{kind.__name__}", [("num_splits", int, 1)], bases=(kind,), kw_only=True
            )
            return full(**{f.name: getattr(self.raw, f.name) for f in fields(self.raw)})

        @hookimpl
        def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
            """Refresh what is raw."""
            del captured
            return super().init_metadata_replay(view, shape, self.raw)

    return Upgraded


def _kept_from_eager(base: type[Any]) -> type[Any]:
    class KeptFromEager(base):  # type: ignore[misc]
        """Index tensors count as made once an eager step has made its own."""

        made = False

        def init_metadata_eager(self, batch: ForwardBatch, *, fill: int | None = None) -> Any:
            """Make them, and remember that."""
            self.made = True
            return super().init_metadata_eager(batch, fill=fill)

        def record_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Record them only if no eager step has made them."""
            if not self.made:
                super().record_metadata(view, metadata)

    return KeptFromEager


def _fallback_left(base: type[Any]) -> type[Any]:
    class FallbackLeft(base):  # type: ignore[misc]
        """A backend whose eager steps switch on a fallback that stays on in captures."""

        fallback: Any = None

        def init_metadata_eager(self, batch: ForwardBatch, *, fill: int | None = None) -> Any:
            """Fall back to metadata that the fallback keeps."""
            self.fallback = super().init_metadata_eager(batch, fill=fill)
            return self.fallback

        def forward(self, *args: Any) -> torch.Tensor:
            """Attend, as the fallback does where it is on and has room."""
            *rest, metadata = args
            if self.fallback is not None:
                rest[0] = rest[0].contiguous().clone()
            return super().forward(*rest, metadata)  # type: ignore[no-any-return]

    return FallbackLeft


def _first_step_recorded(base: type[Any]) -> type[Any]:
    class FirstStepRecorded(base):  # type: ignore[misc]
        """The metadata of the first draft step is recorded, and its children are not."""

        def record_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Record the first."""
            self.fill_metadata(*next(each_step(view, metadata)))

    return FirstStepRecorded


def _made_in_warm_up(base: type[Any]) -> type[Any]:
    class MadeInWarmUp(base):  # type: ignore[misc]
        """Index tensors are made at the first use of a metadata object, which is the warm-up's."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.made: list[Any] = []

        def record_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Make them once."""
            if not any(metadata is each for each in self.made):
                self.made.append(metadata)
                super().record_metadata(view, metadata)

    return MadeInWarmUp


def _branches_on_contents(base: type[Any]) -> type[Any]:
    class BranchesOnContents(base):  # type: ignore[misc]
        """The recorded body leaves windows out where no request of the batch is longer than one."""

        def record_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Record what this batch needs."""
            for at, part in each_step(view, metadata) if self.records_metadata else ():
                needs = _longest(at) > max(part.windows)
                self.fill_metadata(at, part if needs else replace(part, windows={}))

    return BranchesOnContents


_RECORDED = [
    Exhibit(
        name="flashinfer-upgraded-at-capture",
        rule="GP10",
        thread="sgl-project/sglang#26742",
        planted="Only the capture hook upgrades metadata to another type.",
        base="flashinfer",
        lanes=("extend",),
        make=_upgraded,
    ),
    Exhibit(
        name="fa3-kept-from-eager",
        rule="GP10",
        thread="sgl-project/sglang#38994",
        planted="After an eager step the index tensors count as ready, and a capture records no work for"
        " them.",
        base="fa3",
        lanes=("target_verify",),
        make=_kept_from_eager,
    ),
    Exhibit(
        name="trtllm-mla-fallback-left",
        rule="GP10",
        thread="sgl-project/sglang#31198",
        planted="An eager step leaves a fallback switched on, and a later capture records it.",
        base="trtllm_mla",
        lanes=("target_verify",),
        make=_fallback_left,
    ),
    Exhibit(
        name="trtllm-mla-first-step-recorded",
        rule="GP10",
        thread="sgl-project/sglang#26665",
        planted="Only the metadata work of the first draft step is recorded.",
        base="trtllm_mla",
        lanes=("draft_decode",),
        make=_first_step_recorded,
    ),
    Exhibit(
        name="fa3-made-in-the-warm-up",
        rule="GP10",
        thread="sgl-project/sglang#38994",
        planted="Index tensors are computed on first use, which is in the warm-up and not in the recorded"
        " run.",
        base="fa3",
        lanes=("mixed",),
        make=_made_in_warm_up,
    ),
    Exhibit(
        name="flashinfer-branches-on-contents",
        rule="GP10",
        thread="vllm-project/vllm#25743",
        planted="A branch on lengths skips work for the dummy batch, which is then not recorded.",
        base="flashinfer",
        lanes=("decode",),
        make=_branches_on_contents,
    ),
]

EXHIBITS: list[Exhibit] = [*_BAKED, *_RECORDED]
