"""`VllmBackend`: builders of vLLM as a backend, with the calls that model runner V2 makes.

    capture   ``build_for_cudagraph_capture`` for every group, twice: V2 warms up with metadata of its own
    replay    ``build(0, common)`` for every group; the result is dropped
    groups    the blocks of a request are others in each group, so that a group's metadata serves no other
    order     groups are built in turn, in the other order in every second step: a release may change it

Does not: choose lanes, or judge; see `graphpact_adapters.vllm.adapter`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from graphpact.attention import BackendContext, KVBuffers, LayerSpec
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.shapes import GraphShape
from graphpact_adapters.backend import BuilderBackend, Built, Make, Phase
from graphpact_adapters.reads import Reader
from graphpact_adapters.vllm.given import Kind, Sizes, kv_cache_spec, vllm_config
from graphpact_adapters.vllm.runner import Lent, RunnerBuffers

NUM_GROUPS = 2
"""KV-cache groups of a lane: their builders see the same persistent buffers."""
ROPE = 8
"""Width of the rotary part of an MLA key in the suite's lanes."""


def sizes_of(context: BackendContext, capture_sizes: Sequence[int], kind: Kind) -> Sizes:
    """Return the sizes of a lane as vLLM's configuration counts them."""
    layer, limits = context.layers[0], context.limits
    latent = layer.kv_lora_rank
    return Sizes(
        num_layers=len(context.layers),
        num_q_heads=layer.num_q_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_dim,
        head_size_v=0 if latent is not None else layer.v_head_dim,
        dtype=context.dtype,
        block_size=limits.page_size,
        max_model_len=limits.max_context_len,
        max_num_seqs=limits.max_bs,
        max_num_tokens=limits.max_num_tokens,
        capture_sizes=tuple(sorted({*capture_sizes})),
        num_speculative_tokens=limits.draft.num_draft_tokens - 1
        if context.mode is ForwardMode.TARGET_VERIFY
        else 0,
        kind=kind,
        rope_size=ROPE if latent is None else layer.head_dim - latent,
    )


@dataclass
class _Cache:
    """The cache of one layer."""

    k: Any
    v: Any


class VllmBackend(BuilderBackend):
    """A backend of builders of one class; a subclass has the factory.

    Attributes:
        make: The factory: ``(kv_cache_spec, layer_names, vllm_config, device) -> builder``.
        read: Takes from metadata what the kernel reads.
        kind: What the KV cache holds.
        capture_sizes: Token counts that the lane captures.
    """

    make: ClassVar[Make]
    read: ClassVar[Reader]
    kind: ClassVar[Kind] = "full"
    capture_sizes: ClassVar[Sequence[int]] = ()
    warmups = 1
    bounds = "seq_lens_cpu_upper_bound"
    calls: ClassVar[Mapping[Phase, str]] = {
        "capture": "build_for_cudagraph_capture",
        "replay": "build",
        "eager": "build",
    }

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        cls = type(self)
        num_slots = len(context.kv_cache.k[0])
        blocks = num_slots // context.limits.page_size
        self.sizes = replace(sizes_of(context, cls.capture_sizes, cls.kind), num_blocks=blocks)
        self.buffers = RunnerBuffers(self.sizes, NUM_GROUPS, context.req_to_token, num_slots, context.device)
        told, names = self.sizes.times(self.room), self.sizes.layer_names
        self._builders: list[Any] = [
            cls.make(kv_cache_spec(told), names[group::NUM_GROUPS], vllm_config(told), context.device)
            for group in range(NUM_GROUPS)
        ]
        self._builds = 0

    @property
    def builders(self) -> Sequence[object]:
        """The builders, one for each KV-cache group."""
        return self._builders

    def lent_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the runner's persistent buffers."""
        return self.buffers.tensors()

    def shared_in_step(self, lent: Lent) -> Mapping[str, torch.Tensor]:
        """Return the persistent buffers, and the tensors on the host, which the groups of a step share."""
        common = lent.common[0]
        names = ("query_start_loc_cpu", "seq_lens_cpu_upper_bound", "is_prefilling")
        return {**self.buffers.tensors(), **{name: getattr(common, name) for name in names}}

    def lend(self, view: ForwardBatch, shape: GraphShape | None) -> Lent:
        """Write the persistent buffers as model runner V2 does."""
        return self.buffers.lend(view, shape, has_exact_bounds=self.has_exact_bounds)

    @contextmanager
    def cache_of(self, group: int, layer: LayerSpec) -> Iterator[KVBuffers]:
        """Give a copy of the layer's cache with the blocks where the group has them, and write it back."""
        cache, at = self.context.kv_cache, layer.cache_layer
        slots = self.buffers.slots[group]
        if slots is None:
            yield cache
            return
        has_latents = layer.kv_lora_rank is not None
        k, v = torch.empty_like(cache.k[at]), torch.empty_like(cache.v[at])
        k[slots] = cache.k[at]
        if has_latents:
            v = k[..., : layer.v_head_dim]
        else:
            v[slots] = cache.v[at]
        yield _Cache({at: k}, {at: v})
        cache.k[at].copy_(k[slots])
        if not has_latents:
            cache.v[at].copy_(v[slots])

    def build(self, lent: Lent, phase: Phase) -> Built:
        """Build for each group, in the other order than the step before."""
        order = range(NUM_GROUPS)
        self._builds += 1
        found: dict[int, Any] = {}
        for group in order if self._builds % 2 else reversed(order):
            found[group] = self._build_group(self._builders[group], lent, group, phase)
        read = type(self).read
        return Built(tuple(read(found[group], lent.common[group].slot_mapping) for group in order))

    def _build_group(self, builder: Any, lent: Lent, group: int, phase: Phase) -> object:
        common = lent.common[group]
        if phase == "capture":
            return builder.build_for_cudagraph_capture(common)
        more: dict[str, Any] = {}
        if self.kind == "mamba":
            more = {
                "num_accepted_tokens": lent.num_accepted_tokens,
                "num_decode_draft_tokens_cpu": lent.num_decode_draft_tokens_cpu,
            }
        return builder.build(0, common, **more)
