"""Exhibits of the life of a lane: it is captured again, or runs beside other lanes or on rewritten memory.

The rules are GP02, GP09, GP10, GP14, GP15, GP16 and GP19. A lane that is captured once and runs without
other lanes shows none of these bugs.
"""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.shapes import GraphShape
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_museum.edits.backends import AttentionCall, after_attention, workspace, workspace_memory
from graphpact_museum.edits.override import override, overrides
from graphpact_museum.exhibit import exhibit

# -- captured again ----------------------------------------------------------------------------------


@exhibit("GP10", "gittensor-ai-lab/sparkinfer#147", on="trtllm_mla", lanes="decode")
def trtllm_returns_tensors_of_the_first_capture(base: type[Any]) -> type[Any]:
    """A capture returns the output tensors of the first capture of its size, which its own graph does not
    write.
    """

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.kept = {}

    def record_metadata(self: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
        self.calls = {}
        right(view, metadata)

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        out = right(q, k, v, layer, metadata)
        if not getattr(self.driver, "is_capturing", False):
            return out
        at = len(out), layer.layer_id
        self.calls[at] = self.calls.get(at, 0) + 1
        return self.kept.setdefault((*at, self.calls[at]), out)

    return override(base, record_metadata, forward, __init__=init)


@exhibit("GP10", "microsoft/onnxruntime#32239", on="trtllm_mla", lanes="target_verify")
def trtllm_capacity_of_the_step_before_capture(base: type[Any]) -> type[Any]:
    """A capture uses the longest sequence of the previous step as the capacity of its kernels."""

    def declare_slots(_: Any, right: Any, limits: Any) -> Any:
        capacity = workspace("capacity", 1, value=limits.max_context_len, dtype=torch.int32)
        return [*right(limits), capacity]

    def init_metadata_capture(self: Any, right: Any, view: ForwardBatch, shape: GraphShape) -> Any:
        if self.longest is not None:
            workspace_memory(self, "capacity").fill_(self.longest)
        return right(view, shape)

    def init_metadata_replay(
        self: Any, right: Any, view: ForwardBatch, shape: GraphShape, captured: Any
    ) -> Any:
        self.longest = max(view.seq_lens_cpu.tolist(), default=1)
        return right(view, shape, captured)

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        if self.driver is not None and self.driver.is_capturing:
            lens = torch.minimum(metadata.seq_lens_k, workspace_memory(self, "capacity"))
            metadata = replace(metadata, seq_lens_k=lens)
        return right(q, k, v, layer, metadata)

    return override(base, declare_slots, init_metadata_capture, init_metadata_replay, forward, longest=None)


# -- weights -----------------------------------------------------------------------------------------


@exhibit("GP02", "vllm-project/vllm-ascend#13902", on="fa3", lanes="decode")
def fa3_sinks_copied_at_construction(base: type[Any]) -> type[Any]:
    """Sinks are copied when the backend is built, and weights that are loaded later do not reach the copy."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.sinks = {at.layer_id: at.sinks.clone() for at in context.layers if at.sinks is not None}

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        sinks = self.sinks.get(layer.layer_id)
        return right(q, k, v, replace(layer, sinks=sinks), metadata)

    return override(base, forward, __init__=init)


@exhibit("GP02", "gittensor-ai-lab/sparkinfer#147", on="flashinfer", lanes="target_verify")
def flashinfer_sinks_cast_at_capture(base: type[Any]) -> type[Any]:
    """Sinks are cast once, by the capture hook, and graphs read the cast."""

    def init_metadata_capture(self: Any, right: Any, view: ForwardBatch, shape: GraphShape) -> Any:
        with_sinks = [layer for layer in self.context.layers if layer.sinks is not None]
        if "casts" not in vars(self):
            self.casts = {layer.layer_id: layer.sinks.float().clone() for layer in with_sinks}
        return right(view, shape)

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        if self.driver is not None and self.driver.is_capturing:
            layer = replace(layer, sinks=self.casts.get(layer.layer_id))
        return right(q, k, v, layer, metadata)

    return override(base, init_metadata_capture, forward)


# -- many sizes --------------------------------------------------------------------------------------


def _evicts_above(base: type[Any], most: int) -> type[Any]:
    """Return a backend that scales its output by a tensor for each size, and keeps ``most`` of them."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.by_size = OrderedDict()

    def init_metadata_capture(self: Any, right: Any, view: ForwardBatch, shape: GraphShape) -> Any:
        scale = torch.ones(shape.num_tokens, 1, 1, dtype=self.context.dtype)
        self.by_size.setdefault(shape.num_tokens, scale)  # outside of the graph
        return right(view, shape)

    def scale(backend: Any, call: AttentionCall) -> torch.Tensor:
        known: OrderedDict[int, torch.Tensor] = backend.by_size
        size = len(call.out)
        if size not in known:
            known[size] = torch.ones(size, 1, 1, dtype=call.out.dtype)
            if len(known) > most:
                known.popitem(last=False)
        return call.out * known[size]

    return override(after_attention(scale)(base), init_metadata_capture, __init__=init)


@exhibit("GP14", "intel/llm-scaler#505", on="flashinfer", lanes="decode")
def flashinfer_keeps_sixteen_sizes(base: type[Any]) -> type[Any]:
    """A dictionary holds a buffer for each number of tokens, and above 16 buffers it drops the oldest."""
    return _evicts_above(base, 16)


@exhibit("GP14", "ROCm/aiter#5393", on="fa3", lanes="target_verify")
def fa3_keeps_twelve_sizes(base: type[Any]) -> type[Any]:
    """A cache for 12 sizes of verify steps evicts a buffer that a graph reads."""
    return _evicts_above(base, 12)


# -- lanes of other modes ----------------------------------------------------------------------------


@exhibit("GP10", "sgl-project/sglang#31198", on="trtllm_mla", lanes="target_verify")
def trtllm_falls_back_after_a_prefill_capture(base: type[Any]) -> type[Any]:
    """The capture of a prefill lane sets a flag of the class, so that lanes that are captured later record a
    fallback kernel.
    """

    def init_metadata_capture(self: Any, right: Any, view: ForwardBatch, shape: GraphShape) -> Any:
        if shape.mode.is_ragged:
            type(self).falls_back = True
        return right(view, shape)

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        is_recorded = self.driver is not None and self.driver.is_capturing
        if is_recorded and self.falls_back and not self.context.mode.is_ragged:
            layer = replace(layer, scaling=layer.scaling * 2)
        return right(q, k, v, layer, metadata)

    return override(base, init_metadata_capture, forward, falls_back=False)


def _workspace_of_the_class(base: type[Any], when: str) -> type[Any]:
    """Return a backend whose lanes share one workspace of the class, which prefill overwrites.

    Args:
        base: The correct class.
        when: ``capture`` or ``step`` of a prefill lane.
    """

    def init_metadata_capture(self: Any, right: Any, view: ForwardBatch, shape: GraphShape) -> Any:
        if when == "capture" and shape.mode.is_ragged:
            self.scale.fill_(3)
        return right(view, shape)

    def init_metadata_replay(
        self: Any, right: Any, view: ForwardBatch, shape: GraphShape, captured: Any
    ) -> Any:
        if when == "step" and shape.mode.is_ragged:
            self.scale.fill_(3)
        return right(view, shape, captured)

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        out = right(q, k, v, layer, metadata)
        return out if self.context.mode.is_ragged else out * self.scale.to(out.dtype)

    return override(base, init_metadata_capture, init_metadata_replay, forward, scale=torch.ones(1))


@exhibit("GP19", "microsoft/onnxruntime#32243", on="fa3", lanes="decode")
def fa3_prefill_capture_writes_the_class(base: type[Any]) -> type[Any]:
    """The capture of a prefill lane writes a workspace of the class, which decode graphs read."""
    return _workspace_of_the_class(base, "capture")


@exhibit("GP15", "sgl-project/sglang#22930", on="flashinfer", lanes="draft_decode")
def flashinfer_prefill_step_writes_the_class(base: type[Any]) -> type[Any]:
    """A prefill step writes a workspace of the class, which draft graphs read."""
    return _workspace_of_the_class(base, "step")


# -- two lanes of one class --------------------------------------------------------------------------


@exhibit("GP09", "alibaba/rtp-llm#1084", on="flashinfer", lanes="decode")
def flashinfer_plans_once_for_all_lanes(base: type[Any]) -> type[Any]:
    """The class remembers the last plan, so a lane skips its plan after another lane with equal lengths."""

    def plan_metadata(self: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
        is_captured = self.driver is not None and self.driver.is_capturing
        key = view.batch_size, view.num_tokens, view.draft_step, view.seq_lens_cpu.tolist()
        if key != self.planned or is_captured or self.is_binding:
            right(view, metadata)
        type(self).planned = key

    def init_metadata_capture(self: Any, right: Any, view: ForwardBatch, shape: GraphShape) -> Any:
        self.is_binding = True
        try:
            return right(view, shape)
        finally:
            self.is_binding = False

    def init_metadata_eager(self: Any, right: Any, batch: ForwardBatch, **more: Any) -> Any:
        self.is_binding = True
        try:
            return right(batch, **more)
        finally:
            self.is_binding = False

    return override(
        base, plan_metadata, init_metadata_capture, init_metadata_eager, planned=None, is_binding=False
    )


@exhibit("GP02", "sgl-project/sglang#22832", on="cuda_graph", lanes="decode")
@overrides("populate")
def decode_runner_fills_once_for_all_lanes(
    runner: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """The class remembers the lengths that it copied last, so a lane does not copy them after another lane
    with equal lengths.
    """
    slots = [registry.get_slot(name) for name in ("seq_lens", "seq_lens_cpu")]
    wholes = [slot.slice_for(shape.batch_size, shape.num_tokens) for slot in slots]
    before = [whole.clone() for whole in wholes]
    right(registry, batch, shape)
    owner = type(runner)
    key = shape, batch.seq_lens_cpu.tolist()
    if vars(owner).get("filled") == key and runner is not owner.filled_by:
        for whole, old in zip(wholes, before, strict=True):
            whole.copy_(old)
    owner.filled, owner.filled_by = key, runner


@exhibit("GP15", "sgl-project/sglang-omni#1369", on="cuda_graph", lanes="target_verify")
def verify_runner_shares_its_output_buffer(base: type[Any]) -> type[Any]:
    """Outputs are copied to one buffer for each size, which all lanes of the class share."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        if "outputs" not in vars(type(self)):
            type(self).outputs = {}

    def compose(self: Any, right: Any, forward: Forward, step: RegionContext) -> Region:
        region: Region = right(forward, step)

        def copied() -> StepOutputs:
            outputs = region()
            rows = outputs["rows"]
            if step.registry is None:  # an eager step
                return outputs
            given: dict[str, Any] = {name: (t, outputs.axes[name]) for name, t in outputs.items()}
            self.outputs.setdefault(rows.shape, rows)
            return StepOutputs(**given | {"rows": (self.outputs[rows.shape].copy_(rows), "tokens")})

        return copied

    return override(base, compose, __init__=init)


@exhibit("GP15", "sgl-project/sglang#35546", on="cuda_graph", lanes="decode")
@overrides("compose")
def decode_runner_returns_a_slot(_: Any, right: Any, forward: Forward, step: RegionContext) -> Region:
    """An output is a slot, which the preparation of the next step overwrites."""
    region: Region = right(forward, step)

    def with_ids() -> StepOutputs:
        outputs = region()
        given: dict[str, Any] = {name: (tensor, outputs.axes[name]) for name, tensor in outputs.items()}
        return StepOutputs(**given, ids=(step.view.input_ids, "tokens"))

    return with_ids


# -- lanes of other models ---------------------------------------------------------------------------


@exhibit("GP10", "lightseekorg/tokenspeed#974", on="fa3", lanes="decode")
def fa3_keeps_scales_by_layer_number(base: type[Any]) -> type[Any]:
    """The class keeps the scale of each layer by its number, and a second model gets those of the first."""

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        scaling = self.scales.setdefault(layer.layer_id, layer.scaling)
        return right(q, k, v, replace(layer, scaling=scaling), metadata)

    return override(base, forward, scales={})


@exhibit("GP15", "vllm-project/vllm#52288", on="flashinfer", lanes="target_verify")
def flashinfer_second_model_writes_the_scales(base: type[Any]) -> type[Any]:
    """Graphs read the scale of a layer from memory of the class, which the constructor of a second model
    overwrites.
    """

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        for layer in context.layers:
            memory = self.scales.setdefault(layer.layer_id, torch.empty((), dtype=torch.float64))
            memory.fill_(layer.scaling)

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        factor = self.scales[layer.layer_id] / layer.scaling
        return right(q * factor.to(q.dtype), k, v, layer, metadata)

    return override(base, forward, __init__=init, scales={})


# -- memory of the batch -----------------------------------------------------------------------------


def _keeps_equal_tensors(base: type[Any], *names: str) -> type[Any]:
    """Return a runner that does not copy a slot again if the batch has the same tensor object."""

    def populate(self: Any, right: Any, registry: Any, batch: Any, shape: GraphShape) -> None:
        known = vars(self).setdefault("filled_from", {})
        kept = {}
        for name in names:
            whole = registry.get_slot(name).slice_for(shape.batch_size, shape.num_tokens)
            if known.get(name) == (shape, id(getattr(batch, name))):
                kept[name] = whole, whole.clone()
        right(registry, batch, shape)
        for whole, before in kept.values():
            whole.copy_(before)
        known.update({name: (shape, id(getattr(batch, name))) for name in names})
        self.last_batch = batch  # keeps its tensors alive, so that no other tensor gets their ids

    return override(base, populate)


@exhibit("GP16", "vllm-project/vllm#24527", on="cuda_graph", lanes="decode")
def decode_runner_compares_tensors_by_identity(base: type[Any]) -> type[Any]:
    """Lengths are copied only if their tensors are not those of the last step, but an engine rewrites its
    tensors in place.
    """
    return _keeps_equal_tensors(base, "seq_lens", "seq_lens_cpu")


@exhibit("GP16", "vllm-project/vllm#47644", on="cuda_graph", lanes="target_verify")
def verify_runner_keeps_rows_of_the_same_tensor(base: type[Any]) -> type[Any]:
    """Request rows are copied only once from each tensor, but an engine reuses its tensors."""
    return _keeps_equal_tensors(base, "req_pool_indices")
