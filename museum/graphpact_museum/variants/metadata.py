"""Correct backends with metadata of other types: plain objects, dicts, tuples, bounds.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from graphpact.attention import Buffers
from graphpact.batch import ForwardBatch
from graphpact.pact import bounded
from graphpact.shapes import GraphShape
from graphpact_museum.edits.backends import invariants_of_inner
from graphpact_museum.edits.override import override
from graphpact_museum.exhibit import variant


@variant(on="trtllm_mla", lanes=("decode", "extend"))
def metadata_of_a_plain_class(base: type[Any]) -> type[Any]:
    """Metadata is a plain object, not a dataclass."""

    class Plain:
        """The fields of the base's metadata as attributes of a plain object."""

        def __init__(self, made: Any) -> None:
            for field in fields(made):
                setattr(self, field.name, getattr(made, field.name))

    def allocate_metadata(_: Any, right: Any, *args: Any) -> Any:
        return Plain(right(*args))

    return override(base, allocate_metadata)


@variant(on="trtllm_mla", lanes=("decode", "draft_decode"))
def metadata_is_a_dict(base: type[Any]) -> type[Any]:
    """Metadata is a dict, made by the hooks."""

    def allocate_metadata(_: Any, right: Any, *args: Any) -> Any:
        made = right(*args)
        return {field.name: getattr(made, field.name) for field in fields(made)}

    def fill_metadata(_: Any, right: Any, view: ForwardBatch, metadata: dict[str, Any]) -> None:
        right(view, SimpleNamespace(**metadata))

    def forward(_: Any, right: Any, *args: Any) -> Any:
        return right(*args[:-1], SimpleNamespace(**args[-1]))

    return override(base, allocate_metadata, fill_metadata, forward, fill_is_device_only=False)


class _Tuple(NamedTuple):
    """The fields of TRT-LLM's metadata."""

    out_cache_loc: torch.Tensor
    block_kv_indices: torch.Tensor
    seq_lens_k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seq_len_q: int
    sum_seq_lens_q: int
    max_seq_len_k: int
    is_uniform: bool
    workspace: torch.Tensor | None


@variant(on="trtllm_mla", lanes=("target_verify", "extend"))
def metadata_is_a_named_tuple(base: type[Any]) -> type[Any]:
    """Metadata is a named tuple, a new one in every step, with the same tensors."""

    def allocate_metadata(_: Any, right: Any, *args: Any) -> Any:
        made = right(*args)
        return _Tuple(*(getattr(made, field.name) for field in fields(made)))

    def init_metadata_replay(
        _: Any, right: Any, view: ForwardBatch, shape: GraphShape, captured: _Tuple
    ) -> Any:
        right(view=view, shape=shape, captured=captured)
        return captured._replace()

    return override(base, allocate_metadata, init_metadata_replay)


@dataclass
class _Bounded:
    """The base's metadata, and the length of the longest sequence."""

    inner: Any
    longest: int = bounded()


@variant(on="fa3", lanes=("decode", "extend"))
def bound_of_the_batch_at_hand(base: type[Any]) -> type[Any]:
    """A bounded host number has the value of the limits at capture, and that of the batch at replay."""

    def allocate_metadata(
        self: Any, right: Any, view: ForwardBatch, shape: GraphShape, buffers: Buffers
    ) -> Any:
        most = self.context.limits.max_context_len
        return _Bounded(right(view, shape, buffers), most)

    def init_metadata_replay(
        _: Any, right: Any, view: ForwardBatch, shape: GraphShape, captured: _Bounded
    ) -> Any:
        right(view=view, shape=shape, captured=captured)
        lens = view.seq_lens_cpu.tolist()
        return replace(captured, longest=max(lens, default=0))

    def fill_metadata(_: Any, right: Any, view: ForwardBatch, metadata: _Bounded) -> None:
        right(view, metadata.inner)

    def forward(_: Any, right: Any, *args: Any) -> Any:
        return right(*args[:-1], args[-1].inner)

    methods = (allocate_metadata, init_metadata_replay, fill_metadata, forward)
    return override(base, *methods, plan_invariants=invariants_of_inner(base))
