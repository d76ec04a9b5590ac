"""`PluggedSteps`: vLLM's batches as graphpact's, and the metadata that a graphpact backend makes of them.

A graphpact backend is built for one kind of step, as in a lane, so there is one for each:

    decode    one token for each request
    verify    as many tokens for each request as vLLM has drafts, and one more
    mixed     any numbers of tokens; all steps, if vLLM captures batches with a prefill

A captured shape has its metadata once. Each later step of the shape gets it, refreshed by the backend's
replay hook; a step of another shape gets new metadata, as an eager one.

Padding requests have row 0 of the table of KV slots.

Does not: decide what is captured; vLLM does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpact.attention import (
    AttentionBackend,
    BackendContext,
    Capabilities,
    DraftLimits,
    GraphSupport,
    LayerSpec,
    Limits,
)
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, input_slots
from graphpact.hooks import Hooks
from graphpact.shapes import GraphShape
from graphpact_vllm.seams.batches import StepBatches


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The largest sizes of vLLM's steps.

    Args:
        max_num_seqs: Requests of a step.
        max_num_tokens: Tokens of a step.
        max_model_len: Tokens of a sequence.
        page_size: KV slots of a block.
        max_captured: Tokens of the largest captured step; 0 if none is captured.
        width: Tokens of a request with all its drafts; 1 without drafts.
    """

    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int
    page_size: int
    max_captured: int
    width: int

    @property
    def max_bs(self) -> int:
        """Requests of a step, padding included."""
        return max(self.max_num_seqs, self.max_captured)


@dataclass
class Caches:
    """The KV cache of a group of layers, in graphpact's form.

    Args:
        k: ``[slots, num_kv_heads, head_dim]`` of each layer.
        v: ``[slots, num_kv_heads, head_dim]`` of each layer.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]


def mode_of_drafts(capabilities: Capabilities) -> ForwardMode:
    """Return the kind of a step in which each request has its drafts: verify, or mixed without it."""
    is_there = ForwardMode.TARGET_VERIFY in capabilities.modes
    return ForwardMode.TARGET_VERIFY if is_there else ForwardMode.MIXED


class PluggedSteps:
    """The steps of one group of layers.

    Args:
        plugin: The class of the backend.
        layers: The layers of the group.
        caches: Their KV cache.
        sizes: The largest sizes of steps.
        device: The device of the model.
    """

    def __init__(
        self,
        plugin: type[AttentionBackend],
        layers: Sequence[LayerSpec],
        caches: Caches,
        sizes: StepSizes,
        device: torch.device,
    ) -> None:
        self._plugin, self._layers, self._caches = plugin, layers, caches
        self._sizes, self._device = sizes, device
        self._lanes: dict[ForwardMode, _PluggedLane] = {}
        shape = sizes.max_bs + 1, sizes.max_model_len
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=device)
        self._batches = StepBatches(
            req_to_token=self.req_to_token,
            page_size=sizes.page_size,
            width=sizes.width,
            mode_of_drafts=mode_of_drafts(plugin.capabilities),
        )

    def captured(self, common: Any, *, is_ragged: bool) -> "PluggedMetadata":
        """Return the metadata that a graph keeps; see `stepped`."""
        batch = self._batches.batch(common, is_ragged=is_ragged)
        return self._lane(batch.forward_mode).captured(batch, _shape(batch, common))

    def stepped(self, common: Any, *, is_ragged: bool) -> "PluggedMetadata":
        """Return the metadata of a step.

        Args:
            common: vLLM's ``CommonAttentionMetadata``.
            is_ragged: Whether graphs hold batches with a prefill too.
        """
        batch = self._batches.batch(common, is_ragged=is_ragged)
        return self._lane(batch.forward_mode).stepped(batch, _shape(batch, common))

    def _lane(self, mode: ForwardMode) -> "_PluggedLane":
        if mode not in self._lanes:
            with torch.inference_mode(mode=False):  # its memory outlives the step
                self._lanes[mode] = _PluggedLane(self._plugin, self._context(mode), self._sizes)
        return self._lanes[mode]

    def _context(self, mode: ForwardMode) -> BackendContext:
        sizes = self._sizes
        width = sizes.width if mode is ForwardMode.TARGET_VERIFY else 1
        return BackendContext(
            device=self._device,
            dtype=self._caches.k[0].dtype,
            layers=self._layers,
            limits=Limits(
                max_bs=sizes.max_bs,
                max_num_tokens=max(sizes.max_num_tokens, sizes.max_captured),
                max_context_len=sizes.max_model_len,
                page_size=sizes.page_size,
                draft=DraftLimits(num_draft_tokens=width),
            ),
            req_to_token=self.req_to_token,
            kv_cache=self._caches,
            mode=mode,
        )


class _PluggedLane:
    """A backend for one kind of step, with the memory and the metadata of captured shapes."""

    def __init__(self, plugin: type[AttentionBackend], context: BackendContext, sizes: StepSizes) -> None:
        self.backend = plugin(context)
        self.registry: CudaGraphBufferRegistry | None = None
        self._captured: dict[GraphShape, PluggedMetadata] = {}
        needed = GraphSupport.for_width(context.limits.draft.tokens_per_request(context.mode))
        if not sizes.max_captured or not plugin.capabilities.graph_support.covers(needed):
            return
        self.registry = CudaGraphBufferRegistry(
            device=context.device,
            max_bs=sizes.max_bs,
            max_num_tokens=sizes.max_captured,
            lane=f"vLLM's {context.mode.value}",
        )
        width = context.limits.draft.num_draft_tokens
        fill = plugin.capabilities.padded_seq_len(context.mode, width)
        for slot in input_slots(context.mode, seq_len_fill_value=fill, num_draft_tokens=width):
            self.registry.register_slot(slot)
        self.backend.attach(self.registry)
        hooks = Hooks([self.backend], [])
        self._capture: Any = hooks.resolve("init_metadata_capture")
        self._replay: Any = hooks.resolve("init_metadata_replay")

    def captured(self, batch: ForwardBatch, shape: GraphShape) -> "PluggedMetadata":
        """Return the metadata of a shape. A shape that is captured again keeps the metadata that it has."""
        if shape not in self._captured:
            made = self._capture(view=self._fill(batch, shape), shape=shape)
            self._captured[shape] = PluggedMetadata(made, shape.num_tokens, self.backend)
        return self._captured[shape]

    def stepped(self, batch: ForwardBatch, shape: GraphShape) -> "PluggedMetadata":
        """Return the metadata of a step: that of its shape, if it is captured."""
        captured = self._captured.get(shape)
        if captured is None:
            return PluggedMetadata(self.backend.init_metadata_eager(batch), batch.num_tokens, self.backend)
        made = self._replay(view=self._fill(batch, shape), shape=shape, captured=captured.step)
        if made is captured.step:
            return captured
        return PluggedMetadata(made, shape.num_tokens, self.backend)

    def _fill(self, batch: ForwardBatch, shape: GraphShape) -> ForwardBatch:
        """Write a batch into the static inputs of a shape, and return them."""
        registry = self.registry
        assert registry is not None  # noqa: S101  a shape was captured
        registry.fill_from(
            batch,
            raw_bs=batch.batch_size,
            padded_bs=shape.batch_size,
            raw_num_tokens=batch.num_tokens,
            padded_num_tokens=shape.num_tokens,
        )
        return registry.static_inputs(batch, shape)


@dataclass
class PluggedMetadata:
    """The metadata of a step.

    Args:
        step: The metadata of the graphpact backend.
        num_actual_tokens: The tokens that it is for, padding of a graph included.
        backend: The graphpact backend.
    """

    step: Any
    num_actual_tokens: int
    backend: AttentionBackend


def _shape(batch: ForwardBatch, common: Any) -> GraphShape:
    return GraphShape(batch.forward_mode, common.num_reqs, common.num_actual_tokens)
