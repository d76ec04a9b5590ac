"""Exhibits and variants of graphs with attention outside: eager calls, and metadata made in each step.

The rules are GP01 to GP03, GP05, GP08, GP10 and GP15. In runners the bug is in the bridge, which both prefill
runners call between two segments. In backends it is in `init_metadata_eager`, which makes metadata for the
live requests and, if a backend declares ``eager_rows="padded"``, for the padding tokens of the shape.

Does not: plant bugs that eager steps have too.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from unittest.mock import patch

import torch

from graphpact.attention import LayerSpec
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, PaddingPolicy
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_museum.edits.override import named_after, override, overrides
from graphpact_museum.exhibit import Make, exhibit, variant


def _kept(owner: Any, name: str) -> dict[Any, Any]:
    """Return a dictionary that a plugin keeps as an attribute; it is empty at first."""
    kept: dict[Any, Any] = vars(owner).setdefault(name, {})
    return kept


# -- edits of a runner -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EagerAttention:
    """One attention call of a captured region, with the tensors from the segment before it.

    Args:
        step: The context of the region.
        q: Queries, in a workspace.
        k: Keys, in a workspace.
        v: Values, in a workspace.
        layer: The layer.
        out: The workspace of the result.
    """

    step: RegionContext
    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    layer: LayerSpec
    out: torch.Tensor

    def attend(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Attend in an eager call, and return the result, in ``out`` if given."""
        given = self.q, self.k, self.v, self.layer, out
        return self.step.driver.eager_call(self.step.attend, *given)


Attends: TypeAlias = Callable[[Any, EagerAttention], torch.Tensor]
"""``(runner, call) -> out``: attends between two segments."""


def between_segments(attend: Attends) -> Make:
    """Make an edit of runners that call ``attend`` for attention between two captured segments."""

    def make(base: type[Any]) -> type[Any]:
        module = sys.modules[next(c.__module__ for c in base.__mro__ if "compose" in vars(c))]

        def compose(self: Any, right: Any, forward: Forward, step: RegionContext) -> Region:
            def call(
                bridge: Any, right_attend: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any
            ) -> Any:
                if bridge.step.is_eager:
                    return right_attend(q, k, v, layer, metadata)
                q = bridge._put("q", q, layer)  # noqa: SLF001  the museum edits insides
                k, v = (
                    None if t is None else bridge._put(n, t, layer)  # noqa: SLF001  the same
                    for n, t in (("k", k), ("v", v))
                )
                out = bridge._place("out", layer)  # noqa: SLF001  the same
                return attend(self, EagerAttention(bridge.step, q, k, v, layer, out))

            other = override(module.Bridge, __call__=call)
            with patch.object(module, "Bridge", other):
                region: Region = right(forward, step)

            def edited_region() -> StepOutputs:
                with patch.object(module, "Bridge", other):
                    return region()

            return edited_region

        return override(base, compose)

    return named_after(attend, make)


# -- GP01: the reads of the next segment -------------------------------------------------------------


@exhibit("GP01", "vllm-project/vllm#37361", on="breakable_cuda_graph", lanes="extend", prefix="breakable")
@exhibit("GP01", "vllm-project/vllm#37361", on="piecewise_cuda_graph", lanes="extend", prefix="piecewise")
@between_segments
def hands_results_on_in_a_list(_: Any, call: EagerAttention) -> torch.Tensor:
    """An eager call puts its result, a new tensor in every step, into a list; the next segment reads the
    tensor of the capture.
    """
    held: list[torch.Tensor] = []

    def attend() -> None:
        held[:] = [call.step.attend(call.q, call.k, call.v, call.layer)]

    call.step.driver.eager_call(attend)
    return held[0].clone()


@exhibit("GP01", "vllm-project/vllm#40038", on="breakable_cuda_graph", lanes="extend")
@between_segments
def breakable_keeps_the_results_of_all_steps(_: Any, call: EagerAttention) -> torch.Tensor:
    """An eager call adds its result to a list that keeps all of them; the next segment reads the first."""
    held: list[torch.Tensor] = []

    def attend() -> None:
        held.append(call.step.attend(call.q, call.k, call.v, call.layer))

    call.step.driver.eager_call(attend)
    return held[-1]


# -- GP08: the count of rows -------------------------------------------------------------------------


def _cut(call: EagerAttention, count: Callable[[], int]) -> torch.Tensor:
    """Attend in each step for the first ``count()`` tokens, and zero the other rows."""
    step = call.step

    def attend(out: torch.Tensor) -> torch.Tensor:
        live = count()
        q, k, v = (None if t is None else t[:live] for t in (call.q, call.k, call.v))
        assert q is not None  # noqa: S101  there are always queries
        result = step.backend.forward(q, k, v, call.layer, step.metadata)
        out[: len(result)].copy_(result)
        out[len(result) :].zero_()
        return out

    return step.driver.eager_call(attend, call.out).clone()


@exhibit("GP08", "sgl-project/sglang#21452", on="breakable_cuda_graph", lanes="extend", prefix="breakable")
@exhibit("GP08", "sgl-project/sglang#21452", on="piecewise_cuda_graph", lanes="extend", prefix="piecewise")
@between_segments
def cuts_rows_as_captured(_: Any, call: EagerAttention) -> torch.Tensor:
    """Eager calls cut padding tokens off by the count of live tokens at capture."""
    live = call.step.attended.num_tokens
    return _cut(call, lambda: live)


@exhibit("GP02", "sgl-project/sglang#21452", on="breakable_cuda_graph", lanes="extend")
def breakable_cuts_rows_as_in_the_step_before(base: type[Any]) -> type[Any]:
    """Eager calls cut padding tokens off by the count of live tokens of the previous step."""

    def attend(runner: Any, call: EagerAttention) -> torch.Tensor:
        return _cut(call, lambda: runner.live[call.step.shape])

    def populate(self: Any, right: Any, registry: Any, batch: ForwardBatch, shape: Any) -> None:
        noted = _kept(self, "noted")
        _kept(self, "live")[shape] = noted.get(shape, batch.num_tokens)
        noted[shape] = batch.num_tokens
        right(registry=registry, batch=batch, shape=shape)

    return override(between_segments(attend)(base), populate)


@exhibit("GP05", "vllm-project/vllm#25265", on="breakable_cuda_graph", lanes="mixed")
@between_segments
def breakable_cuts_rows_for_every_backend(_: Any, call: EagerAttention) -> torch.Tensor:
    """Eager calls cut padding tokens off, even for a backend whose metadata counts them."""
    return _cut(call, lambda: call.step.live.num_tokens)


# -- GP15: the memory of a result --------------------------------------------------------------------


@exhibit("GP15", "sgl-project/sglang#22218", on="breakable_cuda_graph", lanes="extend", prefix="breakable")
@exhibit("GP15", "sgl-project/sglang#22218", on="piecewise_cuda_graph", lanes="extend", prefix="piecewise")
@between_segments
def leaves_results_in_the_workspace(_: Any, call: EagerAttention) -> torch.Tensor:
    """The result of attention stays in a workspace of all layers, where the next result overwrites it."""
    return call.attend(call.out)


@exhibit("GP15", "sgl-project/sglang#22218", on="breakable_cuda_graph", lanes="extend")
@between_segments
def breakable_has_one_output_for_all_layers(runner: Any, call: EagerAttention) -> torch.Tensor:
    """Eager calls of all layers write to one output tensor, which no segment copies."""
    outputs = _kept(runner, "outputs")
    out = outputs.setdefault(call.step.shape, torch.zeros_like(call.out))
    return call.attend(out)


# -- GP02, GP03: fields of images --------------------------------------------------------------------


@exhibit(
    "GP03", "sgl-project/sglang#18647", on="breakable_cuda_graph", lanes="extend_embeds", prefix="breakable"
)
@exhibit(
    "GP03", "sgl-project/sglang#18647", on="piecewise_cuda_graph", lanes="extend_embeds", prefix="piecewise"
)
@overrides("slots")
def keeps_embeddings(_: Any, right: Any) -> list[GraphSlot]:
    """Padding tokens keep the embeddings of an earlier, larger batch."""
    kept: dict[str, Any] = {"padding_policy": PaddingPolicy.KEEP_PAD, "reason": "padding is cut off"}
    return [replace(slot, **kept) if slot.name == "input_embeds" else slot for slot in right()]


@exhibit("GP02", "sgl-project/sglang#39088", on="breakable_cuda_graph", lanes="extend_embeds")
@overrides("populate")
def breakable_misses_multimodal_positions(
    self: Any, right: Any, registry: Any, batch: ForwardBatch, shape: Any
) -> None:
    """Multimodal positions are copied only at capture."""
    slot = registry.get_slot("mrope_positions").slice_for(shape.batch_size, shape.num_tokens)
    kept = slot.clone()
    right(registry=registry, batch=batch, shape=shape)
    if shape in _kept(self, "filled"):
        slot.copy_(kept)
    _kept(self, "filled")[shape] = True


# -- backends: metadata of eager calls ---------------------------------------------------------------


@exhibit("GP05", "ROCm/ATOM#1595", on="flashinfer", lanes="extend_segments")
def flashinfer_eager_calls_without_the_fake_request(base: type[Any]) -> type[Any]:
    """Metadata of eager calls assigns padding tokens to no request, unlike metadata of graphs."""

    def init_metadata_eager(self: Any, right: Any, batch: ForwardBatch, **more: Any) -> Any:
        self.is_eager = True
        try:
            return right(batch, **more)
        finally:
            self.is_eager = False

    def _fill_ragged_queries(self: Any, right: Any, view: ForwardBatch, metadata: Any) -> Any:
        num_q: torch.Tensor = right(view, metadata)
        if not self.is_eager:
            return num_q
        metadata.qo_indptr[-1:].copy_(metadata.qo_indptr[-2:-1])
        return torch.cat([num_q[:-1], torch.zeros_like(num_q[-1:])])

    return override(base, init_metadata_eager, _fill_ragged_queries, is_eager=False)


@dataclass(frozen=True, slots=True)
class RawMetadata:
    """The metadata of the live requests of a batch, which kernels cannot read yet.

    Args:
        batch: The batch.
    """

    batch: ForwardBatch


@exhibit("GP10", "sgl-project/sglang#26742", on="reference", lanes="extend_segments")
def reference_upgrades_metadata_at_capture(base: type[Any]) -> type[Any]:
    """Raw metadata is upgraded only at capture, so that replays have raw metadata."""

    def init_metadata_eager(self: Any, right: Any, batch: ForwardBatch, **more: Any) -> Any:
        known = _kept(self, "upgraded")
        if batch.num_tokens in known:
            return RawMetadata(batch)
        known[batch.num_tokens] = True
        return right(batch, **more)

    return override(base, init_metadata_eager, capabilities=replace(base.capabilities, eager_rows="padded"))


@exhibit("GP08", "sgl-project/sglang#26742", on="reference", lanes="extend_segments")
def reference_pads_metadata_as_captured(base: type[Any]) -> type[Any]:
    """Raw metadata is upgraded for the number of padding tokens at capture, which is 0."""

    def init_metadata_eager(self: Any, right: Any, batch: ForwardBatch, **more: Any) -> Any:
        known = _kept(self, "padding")
        live = int(batch.required_extend_lens()[1].sum())
        end = live + known.setdefault(batch.num_tokens, batch.num_tokens - live)
        cut = replace(
            batch,
            input_ids=batch.input_ids[:end],
            positions=batch.positions[:end],
            out_cache_loc=batch.out_cache_loc[:end],
        )
        return right(cut, **more)

    return override(base, init_metadata_eager, capabilities=replace(base.capabilities, eager_rows="padded"))


@exhibit("GP08", "sgl-project/sglang#26742", on="reference", lanes="extend_segments")
def reference_upgrades_metadata_once(base: type[Any]) -> type[Any]:
    """The first attention call upgrades metadata and keeps it, so that replays use that of the capture."""

    def init_metadata_eager(_: Any, right: Any, batch: ForwardBatch, **more: Any) -> Any:
        return right(batch, **more) if more else RawMetadata(batch)

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        if isinstance(metadata, RawMetadata):
            known = _kept(self, "upgraded")
            if len(q) not in known:
                known[len(q)] = base.init_metadata_eager(self, metadata.batch)
            metadata = known[len(q)]
        return right(q, k, v, layer, metadata)

    padded = replace(base.capabilities, eager_rows="padded")
    return override(base, init_metadata_eager, forward, capabilities=padded)


# -- right runners and backends ----------------------------------------------------------------------


def _mlp(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x) / 2


@variant(on="breakable_cuda_graph", lanes="extend", prefix="breakable")
@variant(on="piecewise_cuda_graph", lanes="extend", prefix="piecewise")
def with_an_mlp_between_segments(base: type[Any]) -> type[Any]:
    """Graphs break at an MLP too, which is an eager call that writes its input."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return x.copy_(_mlp(x))

    def attend(_: Any, call: EagerAttention) -> torch.Tensor:
        return call.step.driver.eager_call(run, call.attend(call.out)).clone()

    def compose(_: Any, right: Any, forward: Forward, step: RegionContext) -> Any:
        if not step.is_eager:
            return right(forward, step)

        def eagerly(batch: ForwardBatch, metadata: Any, attend: Any) -> StepOutputs:
            return forward(batch, metadata, lambda *given: _mlp(attend(*given)))

        return right(eagerly, step)

    return override(between_segments(attend)(base), compose)


@variant(on="breakable_cuda_graph", lanes="mixed", prefix="breakable")
@variant(on="piecewise_cuda_graph", lanes="mixed", prefix="piecewise")
@between_segments
def with_an_output_for_each_layer(runner: Any, call: EagerAttention) -> torch.Tensor:
    """Each layer has its own output tensor, and no segment copies it."""
    outputs = _kept(runner, "outputs")
    at = call.step.shape, call.layer.layer_id
    return call.attend(outputs.setdefault(at, torch.zeros_like(call.out)))


@variant(on="breakable_cuda_graph", lanes="extend_embeds", prefix="breakable")
@variant(on="piecewise_cuda_graph", lanes="extend_embeds", prefix="piecewise")
@between_segments
def with_new_results(_: Any, call: EagerAttention) -> torch.Tensor:
    """Eager calls return new tensors, which the driver copies in place."""
    return call.attend()


@dataclass(frozen=True, slots=True)
class FullMetadata:
    """Upgraded metadata, which the kernels of a backend can read.

    Args:
        of_kernels: The metadata of the backend.
        num_tokens: Tokens of the batch, including padding tokens if the backend takes them.
        num_padding: Padding tokens among them.
    """

    of_kernels: Any
    num_tokens: int
    num_padding: int


def _upgrades_in_every_step(base: type[Any], rows: Any) -> type[Any]:
    """Return a backend that upgrades raw metadata in every step, for live or padded rows."""

    def init_metadata_eager(_: Any, right: Any, batch: ForwardBatch, **more: Any) -> FullMetadata:
        live = sum(batch.required_extend_lens()[1].tolist()) if batch.batch_size else 0
        return FullMetadata(right(batch, **more), batch.num_tokens, batch.num_tokens - live)

    def forward(_: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        if isinstance(metadata, FullMetadata):
            if len(q) != metadata.num_tokens:
                raise ValueError(f"got {len(q)} queries, but metadata for {metadata.num_tokens} tokens")
            metadata = metadata.of_kernels
        return right(q, k, v, layer, metadata)

    declared = replace(base.capabilities, eager_rows=rows)
    return override(base, init_metadata_eager, forward, capabilities=declared)


@variant(on="reference", lanes="extend_segments")
def upgraded_metadata_of_padded_tokens(base: type[Any]) -> type[Any]:
    """Raw metadata is upgraded in every step, with a request for the padding tokens."""
    return _upgrades_in_every_step(base, "padded")


@variant(on="reference", lanes="extend_segments")
def upgraded_metadata_of_live_tokens(base: type[Any]) -> type[Any]:
    """Raw metadata is upgraded in every step, only for the live tokens."""
    return _upgrades_in_every_step(base, "live")
