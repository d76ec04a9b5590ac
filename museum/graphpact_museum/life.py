"""Exhibits of the life of a lane: captured again, beside other lanes, on memory that the engine rewrites.

GP02, GP09, GP10, GP14, GP15, GP16, GP19. A lane that is built, captured once and stepped alone shows none of
them.

Does not: run exhibits.
"""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape
from graphpact.step import Region, RegionContext, StepOutputs
from graphpact_museum.edits import Attended, after_attention, there, workspace
from graphpact_museum.exhibit import Exhibit
from graphpact_museum.runners import composing, populating

# -- captured again ----------------------------------------------------------------------------------


def _keeps_outputs_of_the_first_capture(base: type[Any]) -> type[Any]:
    class Keeps(base):  # type: ignore[misc]
        """A backend that keeps the outputs of the first capture of a shape."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.kept: dict[tuple[int, ...], torch.Tensor] = {}

        def record_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Record, and count the calls of the region by layer."""
            self.calls: dict[tuple[int, int], int] = {}
            super().record_metadata(view, metadata)

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend, and return the output of the first capture."""
            out = super().forward(q, k, v, layer, metadata)
            if not getattr(self.driver, "is_capturing", False):
                return out
            at = len(out), layer.layer_id
            self.calls[at] = self.calls.get(at, 0) + 1
            return self.kept.setdefault((*at, self.calls[at]), out)

    return Keeps


def _bounded_by_the_last_step(base: type[Any]) -> type[Any]:
    class Bounded(base):  # type: ignore[misc]
        """A backend whose capture takes the longest sequence of the step before as the capacity."""

        longest: int | None = None

        def declare_slots(self, limits: Any) -> Any:
            """Return the slots, and the capacity."""
            capacity = workspace("capacity", 1, value=limits.max_context_len, dtype=torch.int32)
            return [*super().declare_slots(limits), capacity]

        @hookimpl
        def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
            """Set the capacity, and bind."""
            if self.longest is not None:
                there(self, "capacity").fill_(self.longest)
            return super().init_metadata_capture(view, shape)

        @hookimpl
        def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
            """Note the longest sequence, and refresh."""
            self.longest = max(view.seq_lens_cpu.tolist(), default=1)
            return super().init_metadata_replay(view, shape, captured)

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend to the keys within the capacity; an eager step to all."""
            if self.driver is not None and self.driver.is_capturing:
                lens = torch.minimum(metadata.seq_lens_k, there(self, "capacity"))
                metadata = replace(metadata, seq_lens_k=lens)
            return super().forward(q, k, v, layer, metadata)

    return Bounded


_AGAIN = [
    Exhibit(
        name="trtllm-returns-tensors-of-the-first-capture",
        rule="GP10",
        thread="gittensor-ai-lab/sparkinfer#147",
        planted="A capture returns the output tensors of the first capture of its size, which its own graph"
        " does not write.",
        base="trtllm_mla",
        lanes=("decode",),
        make=_keeps_outputs_of_the_first_capture,
    ),
    Exhibit(
        name="trtllm-capacity-of-the-step-before-capture",
        rule="GP10",
        thread="microsoft/onnxruntime#32239",
        planted="A capture takes the longest sequence of the step before it as the capacity of its kernels.",
        base="trtllm_mla",
        lanes=("target_verify",),
        make=_bounded_by_the_last_step,
    ),
]


# -- weights -----------------------------------------------------------------------------------------


def _copies_sinks(base: type[Any]) -> type[Any]:
    class CopiesSinks(base):  # type: ignore[misc]
        """A backend that lays out sinks for its kernels when it is built."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.sinks = {at.layer_id: at.sinks.clone() for at in context.layers if at.sinks is not None}

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend with the copies."""
            sinks = self.sinks.get(layer.layer_id)
            return super().forward(q, k, v, replace(layer, sinks=sinks), metadata)

    return CopiesSinks


def _casts_sinks_at_capture(base: type[Any]) -> type[Any]:
    class CastsSinksAtCapture(base):  # type: ignore[misc]
        """A backend that casts sinks in the first capture hook, outside of the graph."""

        @hookimpl
        def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
            """Cast, and bind."""
            with_sinks = [layer for layer in self.context.layers if layer.sinks is not None]
            if "casts" not in vars(self):
                self.casts = {layer.layer_id: layer.sinks.float().clone() for layer in with_sinks}
            return super().init_metadata_capture(view, shape)

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend with the casts; an eager step with the sinks."""
            if self.driver is not None and self.driver.is_capturing:
                layer = replace(layer, sinks=self.casts.get(layer.layer_id))
            return super().forward(q, k, v, layer, metadata)

    return CastsSinksAtCapture


_WEIGHTS = [
    Exhibit(
        name="fa3-sinks-copied-at-construction",
        rule="GP02",
        thread="vllm-project/vllm-ascend#13902",
        planted="Sinks are copied when the backend is built, and weights that are loaded later do not reach"
        " the copy.",
        base="fa3",
        lanes=("decode",),
        make=_copies_sinks,
    ),
    Exhibit(
        name="flashinfer-sinks-cast-at-capture",
        rule="GP02",
        thread="gittensor-ai-lab/sparkinfer#147",
        planted="Sinks are cast once, by the capture hook, and graphs read the cast.",
        base="flashinfer",
        lanes=("target_verify",),
        make=_casts_sinks_at_capture,
    ),
]


# -- many sizes --------------------------------------------------------------------------------------


def _evicts_above(most: int) -> Any:
    """Return an edit that scales by a tensor of each size, of which ``most`` are kept."""

    def scale(backend: Any, call: Attended) -> torch.Tensor:
        known: OrderedDict[int, torch.Tensor] = backend.by_size
        size = len(call.out)
        if size not in known:
            known[size] = torch.ones(size, 1, 1, dtype=call.out.dtype)
            if len(known) > most:
                known.popitem(last=False)
        return call.out * known[size]

    return scale


def _with_sizes_before_capture(most: int) -> Any:
    """Return a factory of backends that make the tensor of a size in the capture hook."""

    def make(base: type[Any]) -> type[Any]:
        class BySize(after_attention(_evicts_above(most))(base)):  # type: ignore[misc]
            """A backend with a tensor for each number of tokens."""

            def __init__(self, context: Any) -> None:
                super().__init__(context)
                self.by_size: OrderedDict[int, torch.Tensor] = OrderedDict()

            @hookimpl
            def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
                """Make the tensor outside of the graph, and bind."""
                scale = torch.ones(shape.num_tokens, 1, 1, dtype=self.context.dtype)
                self.by_size.setdefault(shape.num_tokens, scale)
                return super().init_metadata_capture(view, shape)

        return BySize

    return make


_SIZES = [
    Exhibit(
        name="flashinfer-keeps-sixteen-sizes",
        rule="GP14",
        thread="intel/llm-scaler#505",
        planted="A dictionary has a buffer for each number of tokens, and drops the oldest of more than 16.",
        base="flashinfer",
        lanes=("decode",),
        make=_with_sizes_before_capture(16),
    ),
    Exhibit(
        name="fa3-keeps-twelve-sizes",
        rule="GP14",
        thread="ROCm/aiter#5393",
        planted="A cache of 12 sizes of a verified draft evicts the one that a graph reads.",
        base="fa3",
        lanes=("target_verify",),
        make=_with_sizes_before_capture(12),
    ),
]


# -- lanes of other modes ----------------------------------------------------------------------------


def _falls_back_after_prefill(base: type[Any]) -> type[Any]:
    class FallsBack(base):  # type: ignore[misc]
        """A backend whose class remembers that a prefill was captured by its fallback kernel."""

        falls_back = False

        @hookimpl
        def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
            """Note a prefill, and bind."""
            if shape.mode.is_ragged:
                type(self).falls_back = True
            return super().init_metadata_capture(view, shape)

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend; the fallback has the scale of its own layout."""
            is_recorded = self.driver is not None and self.driver.is_capturing
            if is_recorded and self.falls_back and not self.context.mode.is_ragged:
                layer = replace(layer, scaling=layer.scaling * 2)
            return super().forward(q, k, v, layer, metadata)

    return FallsBack


def _workspace_of_the_class(when: str) -> Any:
    """Return a factory of backends whose class has one workspace, which prefill overwrites.

    Args:
        when: ``capture`` or ``step`` of a prefill lane.
    """

    def make(base: type[Any]) -> type[Any]:
        class OneWorkspace(base):  # type: ignore[misc]
            """A backend that scales by a workspace of its class."""

            scale = torch.ones(1)

            @hookimpl
            def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
                """Bind; a prefill uses the workspace for its warm-up."""
                if when == "capture" and shape.mode.is_ragged:
                    self.scale.fill_(3)
                return super().init_metadata_capture(view, shape)

            @hookimpl
            def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
                """Refresh; a prefill uses the workspace."""
                if when == "step" and shape.mode.is_ragged:
                    self.scale.fill_(3)
                return super().init_metadata_replay(view, shape, captured)

            def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
                """Attend, and scale; a prefill attends only."""
                out = super().forward(q, k, v, layer, metadata)
                return out if self.context.mode.is_ragged else out * self.scale.to(out.dtype)

        return OneWorkspace

    return make


_MODES = [
    Exhibit(
        name="trtllm-falls-back-after-a-prefill-capture",
        rule="GP10",
        thread="sgl-project/sglang#31198",
        planted="The capture of a prefill lane leaves a flag on the class, and lanes captured later record"
        " its fallback kernel.",
        base="trtllm_mla",
        lanes=("target_verify",),
        make=_falls_back_after_prefill,
    ),
    Exhibit(
        name="fa3-prefill-capture-writes-the-class",
        rule="GP19",
        thread="microsoft/onnxruntime#32243",
        planted="The capture of a prefill lane writes a workspace of the class, which decode graphs read.",
        base="fa3",
        lanes=("decode",),
        make=_workspace_of_the_class("capture"),
    ),
    Exhibit(
        name="flashinfer-prefill-step-writes-the-class",
        rule="GP15",
        thread="sgl-project/sglang#22930",
        planted="A prefill step writes a workspace of the class, which draft graphs read.",
        base="flashinfer",
        lanes=("draft_decode",),
        make=_workspace_of_the_class("step"),
    ),
]


# -- two lanes of one class --------------------------------------------------------------------------


def _planned_by_the_class(base: type[Any]) -> type[Any]:
    class PlannedByTheClass(base):  # type: ignore[misc]
        """A backend whose class notes what was planned last, for every lane."""

        planned: Any = None

        def plan_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Plan where shape or lengths are others than the last."""
            is_captured = self.driver is not None and self.driver.is_capturing
            key = view.batch_size, view.num_tokens, view.draft_step, view.seq_lens_cpu.tolist()
            if key != self.planned or is_captured or self.is_binding:
                super().plan_metadata(view, metadata)
            type(self).planned = key

        is_binding = False

        @hookimpl
        def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
            """Bind, with plans of its own."""
            self.is_binding = True
            try:
                return super().init_metadata_capture(view, shape)
            finally:
                self.is_binding = False

        def init_metadata_eager(self, batch: ForwardBatch, **more: Any) -> Any:
            """Make metadata, with plans of its own."""
            self.is_binding = True
            try:
                return super().init_metadata_eager(batch, **more)
            finally:
                self.is_binding = False

    return PlannedByTheClass


def _lengths_of_the_class(runner: Any, fill: Any, registry: Any, batch: Any, shape: Any) -> None:
    """Fill all slots, but lengths only where they are others than those of the last fill of the class."""
    slots = [registry.get_slot(name) for name in ("seq_lens", "seq_lens_cpu")]
    wholes = [slot.slice_for(shape.batch_size, shape.num_tokens) for slot in slots]
    before = [whole.clone() for whole in wholes]
    fill()
    owner = type(runner)
    key = shape, batch.seq_lens_cpu.tolist()
    if vars(owner).get("filled") == key and runner is not owner.filled_by:
        for whole, old in zip(wholes, before, strict=True):
            whole.copy_(old)
    owner.filled, owner.filled_by = key, runner


def _outputs_of_the_class(runner: Any, step: RegionContext, region: Region) -> Region:
    """Return a region that copies rows to a buffer of the class, one for each size."""

    def copied() -> StepOutputs:
        outputs = region()
        rows = outputs["rows"]
        if step.registry is None:  # an eager step
            return outputs
        given: dict[str, Any] = {name: (tensor, outputs.axes[name]) for name, tensor in outputs.items()}
        runner.outputs.setdefault(rows.shape, rows)
        return StepOutputs(**given | {"rows": (runner.outputs[rows.shape].copy_(rows), "tokens")})

    return copied


def _with_outputs_of_the_class(base: type[Any]) -> type[Any]:
    class OutputsOfTheClass(composing(_outputs_of_the_class)(base)):  # type: ignore[misc]
        """A runner whose instances copy their outputs to one buffer for each size."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            if "outputs" not in vars(type(self)):
                type(self).outputs = {}

    return OutputsOfTheClass


def _returns_a_slot(_: Any, step: RegionContext, region: Region) -> Region:
    """Return a region that also returns the token ids, in the slot that they were copied to."""

    def with_ids() -> StepOutputs:
        outputs = region()
        given: dict[str, Any] = {name: (tensor, outputs.axes[name]) for name, tensor in outputs.items()}
        return StepOutputs(**given, ids=(step.view.input_ids, "tokens"))

    return with_ids


_LANES = [
    Exhibit(
        name="flashinfer-plans-once-for-all-lanes",
        rule="GP09",
        thread="alibaba/rtp-llm#1084",
        planted="The class notes what was planned last, so a lane skips its plan after another lane of equal"
        " lengths.",
        base="flashinfer",
        lanes=("decode",),
        make=_planned_by_the_class,
    ),
    Exhibit(
        name="decode-runner-fills-once-for-all-lanes",
        rule="GP02",
        thread="sgl-project/sglang#22832",
        planted="The class notes which lengths it copied last, so a lane keeps its own after another lane of"
        " equal lengths.",
        base="cuda_graph",
        lanes=("decode",),
        make=populating(_lengths_of_the_class),
        site="runner",
    ),
    Exhibit(
        name="verify-runner-shares-its-output-buffer",
        rule="GP15",
        thread="sgl-project/sglang-omni#1369",
        planted="Outputs are copied to one buffer for each size, which all lanes of the class share.",
        base="cuda_graph",
        lanes=("target_verify",),
        make=_with_outputs_of_the_class,
        site="runner",
    ),
    Exhibit(
        name="decode-runner-returns-a-slot",
        rule="GP15",
        thread="sgl-project/sglang#35546",
        planted="An output is a slot, which the preparation of the next step overwrites.",
        base="cuda_graph",
        lanes=("decode",),
        make=composing(_returns_a_slot),
        site="runner",
    ),
]


# -- memory of the batch -----------------------------------------------------------------------------


def _keeps_equal_tensors(*names: str) -> Any:
    """Return an edit of `populate` that leaves slots as they are where the batch has the same tensors."""

    def edit(runner: Any, fill: Any, registry: Any, batch: Any, shape: Any) -> None:
        known = vars(runner).setdefault("filled_from", {})
        kept = {}
        for name in names:
            whole = registry.get_slot(name).slice_for(shape.batch_size, shape.num_tokens)
            if known.get(name) == (shape, id(getattr(batch, name))):
                kept[name] = whole, whole.clone()
        fill()
        for whole, before in kept.values():
            whole.copy_(before)
        known.update({name: (shape, id(getattr(batch, name))) for name in names})
        runner.last_batch = batch  # keeps its tensors, so that no other has their identity

    return edit


_BATCHES = [
    Exhibit(
        name="decode-runner-compares-tensors-by-identity",
        rule="GP16",
        thread="vllm-project/vllm#24527",
        planted="Lengths are copied only from other tensors than those of the last step, and an engine"
        " rewrites its tensors.",
        base="cuda_graph",
        lanes=("decode",),
        make=populating(_keeps_equal_tensors("seq_lens", "seq_lens_cpu")),
        site="runner",
    ),
    Exhibit(
        name="verify-runner-keeps-rows-of-the-same-tensor",
        rule="GP16",
        thread="vllm-project/vllm#47644",
        planted="Request rows are copied once from each tensor, and an engine reuses its tensors.",
        base="cuda_graph",
        lanes=("target_verify",),
        make=populating(_keeps_equal_tensors("req_pool_indices")),
        site="runner",
    ),
]

EXHIBITS = [*_AGAIN, *_WEIGHTS, *_SIZES, *_MODES, *_LANES, *_BATCHES]
"""All exhibits of this room."""
