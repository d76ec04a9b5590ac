"""Correct runners that pad inputs, stage them, list shapes and choose graphs in other ways.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.shapes import EagerReason, GraphShape
from graphpact.step import Forward, RegionContext
from graphpact_museum.edits.override import override, overrides
from graphpact_museum.edits.runners import LONG_CONTEXT, SHORT_TIER, with_length_tiers
from graphpact_museum.exhibit import variant
from graphpact_museum.variants.slots import CPU, own_slot


@overrides("populate")
def _pads_by_itself(
    _: Any, __: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    counts = SimpleNamespace(padded_num_tokens=shape.num_tokens)
    for slot in registry:
        if slot.copy_from_fb:
            slot.slice_for(shape.batch_size, shape.num_tokens).fill_(slot.initial_value)
            source = getattr(batch, slot.name)
            if source is not None:
                slot.slice_for(batch.batch_size, batch.num_tokens).copy_(source)
        if slot.post_fill is not None:
            slot.post_fill(slot.slice_for(0, 0), batch, counts)  # type: ignore[arg-type]


@dataclass(slots=True, kw_only=True)
class _View(ForwardBatch):
    """A view with a field of the runner."""

    note: str = ""


@variant(on="cuda_graph", lanes=("decode", "idle"))
def runner_with_views_of_its_own(base: type[Any]) -> type[Any]:
    """Views are objects of a class of the runner, created in every step."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.slices = {}

    def prepare_replay(
        self: Any, _: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
    ) -> _View:
        del batch
        if shape not in self.slices:
            self.slices[shape] = {
                slot.name: slot.slice_for(shape.batch_size, shape.num_tokens)
                for slot in registry
                if slot.copy_from_fb or slot.post_fill is not None
            }
        return _View(
            forward_mode=shape.mode,
            batch_size=shape.batch_size,
            **self.slices[shape],
            note="padded",
        )

    return override(base, prepare_replay, __init__=init)


@variant(on="cuda_graph", lanes="decode")
def runner_that_stages_inputs(base: type[Any]) -> type[Any]:
    """Lengths and their padding are written into one host buffer, and copied asynchronously."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.driver = None
        self.copied = None

    def slots(_: Any, right: Any) -> Any:
        staging = own_slot("lengths", lambda bs, _: (bs,), torch.int64, role="staging", device=CPU)
        return [*right(), staging]

    def compose(self: Any, right: Any, forward: Forward, step: RegionContext) -> Any:
        self.driver = step.driver
        return right(forward, step)

    def populate(
        self: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
    ) -> None:
        right(registry=registry, batch=batch, shape=shape)
        if self.driver is None:
            return  # before the first capture
        if self.copied is None:
            self.copied = self.driver.event()
        else:
            self.copied.synchronize()
        staging = registry.get_slot("variant.lengths").slice_for(shape.batch_size, 0)
        numbers = staging.numpy()
        numbers[: batch.batch_size] = batch.seq_lens_cpu.numpy()
        numbers[batch.batch_size :] = registry.get_slot("seq_lens").initial_value
        target = registry.get_slot("seq_lens").slice_for(shape.batch_size, 0)
        self.driver.copy_async(target, staging)
        self.copied.record()

    return override(base, slots, compose, populate, __init__=init)


@overrides("dummy")
def _captures_the_longest(self: Any, right: Any, shape: GraphShape) -> ForwardBatch:
    dummy: ForwardBatch = right(shape)
    most = self.context.limits.max_context_len - dummy.drafts_in_rows
    lens = torch.full_like(dummy.seq_lens, most)
    return replace(dummy, seq_lens=lens, seq_lens_cpu=lens.cpu().clone())


@variant(on="cuda_graph", lanes="decode")
def largest_listed_first(base: type[Any]) -> type[Any]:
    """shapes() returns a new list each time, the largest shape first, and fit() searches it itself."""

    def shapes(_: Any, right: Any) -> Any:
        return [*right()][::-1]

    def fit(self: Any, right: Any, batch: ForwardBatch) -> Any:
        fit = right(batch)
        if isinstance(fit, EagerReason):
            return fit
        largest = max(batch.global_num_tokens_cpu or (0,))
        rooms = [s for s in self.shapes() if s.num_tokens >= max(batch.num_tokens, largest)]
        return rooms[-1]

    return override(base, shapes, fit)


@variant(on="cuda_graph", lanes=("decode", "target_verify"))
def tiers_of_length(base: type[Any]) -> type[Any]:
    """Every capture size is captured twice, for short and for long sequences."""

    def is_short(batch: ForwardBatch) -> bool:
        is_alone = batch.global_num_tokens_cpu is None
        return is_alone and max(batch.seq_lens_cpu.tolist(), default=0) <= SHORT_TIER

    return with_length_tiers(base, is_short)


@variant(on="cuda_graph", lanes="decode")
@overrides("populate")
def idle_ranks_that_run_the_dummy(
    self: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """A rank without requests prepares the dummy of the shape of the largest rank, without live tokens."""
    if not batch.batch_size and batch.global_num_tokens_cpu is not None:
        none = None if batch.num_token_non_padded is None else torch.zeros_like(batch.num_token_non_padded)
        batch = replace(self.dummy(shape), num_token_non_padded=none, num_token_non_padded_cpu=0)
    right(registry, batch, shape)


@variant(on="cuda_graph", lanes="decode")
@overrides("default_batch_sizes")
def capture_sizes_with_a_cap(self: Any, _: Any) -> list[int]:
    """Steps beyond a cap run eagerly, with an eager reason."""
    return [*range(1, min(self.context.limits.max_bs, 8) + 1)]


_HAS_PREFIX = EagerReason("museum_prefix", "a request has cached keys")


@variant(on="cuda_graph", lanes=("decode", "idle"))
@overrides("fit", declines=(LONG_CONTEXT,))
def graphs_of_short_contexts(_: Any, right: Any, batch: ForwardBatch) -> Any:
    """Batches with a long request run eagerly, with a reason that the runner declares."""
    is_long = max(batch.seq_lens_cpu.tolist(), default=0) > 40
    if is_long or batch.global_num_tokens_cpu is not None:
        return LONG_CONTEXT
    return right(batch)


@variant(on="reference_runner", lanes="extend")
@overrides("fit", declines=(_HAS_PREFIX,))
def graphs_of_whole_prompts(_: Any, right: Any, batch: ForwardBatch) -> Any:
    """Prefills with cached keys run eagerly, with a reason that the runner declares."""
    new = batch.extend_seq_lens_cpu
    has_prefix = batch.batch_size and new is not None and not torch.equal(batch.seq_lens_cpu, new)
    if has_prefix or batch.global_num_tokens_cpu is not None:
        return _HAS_PREFIX
    return right(batch)


def _first_column(buffer: torch.Tensor, n: int) -> torch.Tensor:
    return buffer[:n, 0]


@variant(on="cuda_graph", lanes="decode")
@overrides("slots")
def inputs_with_a_stride(_: Any, right: Any) -> Any:
    """Token ids and positions are columns of wider tensors."""
    wide = {"shape_fn": lambda _, tokens: (tokens, 2), "slice_fn": _first_column}
    return [replace(slot, **wide) if slot.name in ("input_ids", "positions") else slot for slot in right()]


@variant(on="reference_runner", lanes=("mixed", "draft_extend"))
def runner_that_pads_by_itself(base: type[Any]) -> type[Any]:
    """A runner copies and pads with its own calls, slot by slot."""
    return _pads_by_itself(base)


@variant(on="cuda_graph", lanes=("decode", "idle"))
def decode_runner_that_pads_by_itself(base: type[Any]) -> type[Any]:
    """A decode runner copies and pads with its own calls."""
    return _pads_by_itself(base)


@variant(on="reference_runner", lanes=("target_verify", "draft_decode"))
def dummies_of_the_longest(base: type[Any]) -> type[Any]:
    """Dummies have the maximum sequence length."""
    return _captures_the_longest(base)


@variant(on="cpu_graph", lanes="decode")
def decode_dummies_of_the_longest(base: type[Any]) -> type[Any]:
    """Dummies of decode have the maximum sequence length."""
    return _captures_the_longest(base)
