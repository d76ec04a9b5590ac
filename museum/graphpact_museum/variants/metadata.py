"""Correct plugins with metadata of other types: plain objects, dicts, tuples, bounds.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from graphpact.attention import Buffers
from graphpact.batch import ForwardBatch
from graphpact.hookspecs import hookimpl
from graphpact.pact import bounded
from graphpact.shapes import GraphShape
from graphpact_museum.exhibit import Variant


def _as_plain_object(base: type[Any]) -> type[Any]:
    class Plain:
        """The fields of the base's metadata as attributes of a plain object."""

        def __init__(self, made: Any) -> None:
            for field in fields(made):
                setattr(self, field.name, getattr(made, field.name))

    class Made(base):  # type: ignore[misc]
        """Makes metadata of a plain class."""

        def allocate_metadata(self, *args: Any) -> Plain:
            """Return a plain object."""
            return Plain(super().allocate_metadata(*args))

    return Made


def _as_mapping(base: type[Any]) -> type[Any]:
    class Made(base):  # type: ignore[misc]
        """Makes metadata that is a dict."""

        fill_is_device_only = False

        def allocate_metadata(self, *args: Any) -> dict[str, Any]:
            """Return a dict."""
            made = super().allocate_metadata(*args)
            return {field.name: getattr(made, field.name) for field in fields(made)}

        def fill_metadata(self, view: ForwardBatch, metadata: dict[str, Any]) -> None:
            """Fill the dict's tensors."""
            super().fill_metadata(view, SimpleNamespace(**metadata))

        def forward(self, *args: Any) -> torch.Tensor:
            """Attend by the dict."""
            out: torch.Tensor = super().forward(*args[:-1], SimpleNamespace(**args[-1]))
            return out

    return Made


class _Tuple(NamedTuple):
    """TRT-LLM's fields."""

    out_cache_loc: torch.Tensor
    block_kv_indices: torch.Tensor
    seq_lens_k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seq_len_q: int
    sum_seq_lens_q: int
    max_seq_len_k: int
    is_uniform: bool
    workspace: torch.Tensor | None


def _as_named_tuple(base: type[Any]) -> type[Any]:
    class Made(base):  # type: ignore[misc]
        """Makes metadata that cannot be changed, but for what its tensors hold; a new one in every step."""

        def allocate_metadata(self, *args: Any) -> _Tuple:
            """Return a named tuple."""
            made = super().allocate_metadata(*args)
            return _Tuple(*(getattr(made, field.name) for field in fields(made)))

        @hookimpl
        def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: _Tuple) -> _Tuple:
            """Refresh, and return another tuple of the same tensors."""
            base.init_metadata_replay(self, view=view, shape=shape, captured=captured)
            return captured._replace()

    return Made


@dataclass
class _Bounded:
    """The longest sequence, and the base's metadata."""

    inner: Any
    longest: int = bounded()


def _bounds_by_the_batch(base: type[Any]) -> type[Any]:
    class Bounds(base):  # type: ignore[misc]
        """Captures a bound at the limits, and tells in every step how long the longest sequence is."""

        def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _Bounded:
            """Return the metadata and the bound."""
            most = self.context.limits.max_context_len
            return _Bounded(super().allocate_metadata(view, shape, buffers), most)

        @hookimpl
        def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: _Bounded) -> _Bounded:
            """Refresh, and say what the batch needs; the graph keeps its bound."""
            base.init_metadata_replay(self, view=view, shape=shape, captured=captured)
            lens = view.seq_lens_cpu.tolist()
            return replace(captured, longest=max(lens, default=0))

        def fill_metadata(self, view: ForwardBatch, metadata: _Bounded) -> None:
            """Fill what is inside."""
            super().fill_metadata(view, metadata.inner)

        def forward(self, *args: Any) -> torch.Tensor:
            """Attend by what is inside."""
            out: torch.Tensor = super().forward(*args[:-1], args[-1].inner)
            return out

    return Bounds


VARIANTS: list[Variant] = [
    Variant(
        name="metadata-of-a-plain-class",
        style="Metadata is a plain object, not a dataclass.",
        base="trtllm_mla",
        lanes=("decode", "extend"),
        make=_as_plain_object,
    ),
    Variant(
        name="metadata-is-a-dict",
        style="Metadata is a dict, made by the hooks.",
        base="trtllm_mla",
        lanes=("decode", "draft_decode"),
        make=_as_mapping,
    ),
    Variant(
        name="metadata-is-a-named-tuple",
        style="Metadata is a named tuple, a new one in every step, with the same tensors.",
        base="trtllm_mla",
        lanes=("target_verify", "extend"),
        make=_as_named_tuple,
    ),
    Variant(
        name="bound-of-the-batch-at-hand",
        style="A bounded host number is captured at the limits, and has the value of the batch at replay.",
        base="fa3",
        lanes=("decode", "extend"),
        make=_bounds_by_the_batch,
    ),
]
