"""Correct backends in other styles than ours pass a strict lane with every replay verified."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpact import (
    ForwardBatch,
    ForwardMode,
    GraphShape,
    GraphSlot,
    Limits,
    PaddingPolicy,
    hookimpl,
)
from graphpact.attention import Buffers
from graphpact.graphs import Event, Stream
from graphpact.runners import RunnerContext
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_flashinfer import FlashInferBackend, FlashInferMetadata
from support import Catalog

MODEL = Path(__file__).parents[2] / "examples/models/tiny-llama"
CPU = torch.device("cpu")


def _slot(name: str, shape_fn: Any, dtype: torch.dtype = torch.int32, **more: Any) -> GraphSlot:
    declared: dict[str, Any] = {
        "axis": "none",
        "role": "lengths",
        "padding_policy": PaddingPolicy.KEEP_PAD,
        "reason": "each step writes what it reads",
    }
    declared |= {"owner": "variant", "copy_from_fb": False}
    return GraphSlot(name, shape_fn, dtype, **(declared | more))


@dataclass(slots=True)
class MoreMetadata(FlashInferMetadata):
    """FlashInfer's metadata with a field that a variant adds."""

    more: Any = None


class Variant(FlashInferBackend):
    """A backend whose hooks fill the metadata, which has one more field."""

    fill_is_device_only = False

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> MoreMetadata:
        """Return metadata with the added field."""
        made = super().allocate_metadata(view, shape, buffers)
        fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
        return MoreMetadata(**fields, more=self.make_more(buffers))

    def make_more(self, buffers: Buffers) -> Any:
        """Return the value of the added field."""


class TwoBodies(Variant):
    """A backend with separate bodies for capture and replay; only capture writes the constant offsets."""

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Declare the query offsets of decode as a constant."""
        slots = [slot for slot in super().declare_slots(limits) if "qo_indptr" not in slot.name]
        once = _slot(
            "flashinfer.qo_indptr",
            lambda bs, _: (bs + 2,),
            axis="bs",
            slice_fn=lambda buffer, n: buffer[: n + 2],
            padding_policy=PaddingPolicy.FILL_ONCE,
            pad_value=0,
        )
        return [*slots, once]

    def refresh_metadata(self, view: ForwardBatch, metadata: MoreMetadata) -> None:
        """Write all but the constant offsets."""
        spare = torch.empty_like(metadata.qo_indptr)
        super().fill_metadata(view, dataclasses.replace(metadata, qo_indptr=spare))


class OnTheHost(Variant):
    """A backend that computes last page lengths by numpy in staging memory, and copies asynchronously."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.copied: Event | None = None

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Declare host memory for the lengths of the last pages."""
        staging = _slot("variant.staging", lambda bs, _: (bs,), axis="bs", role="staging", device=CPU)
        return [*super().declare_slots(limits), staging]

    def make_more(self, buffers: Buffers) -> Any:
        """Return the staging buffer."""
        return buffers("variant.staging")

    def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Fill, with lengths of the last pages from the host."""
        super().fill_metadata(view, metadata)
        if self.copied is not None:
            self.copied.synchronize()
        lengths = view.seq_lens_cpu.numpy()
        metadata.more.numpy()[:] = (lengths - 1) % self.context.limits.page_size + 1
        target = metadata.kv_last_page_len[: view.batch_size]
        if self.driver is None:
            target.copy_(metadata.more)
            return
        self.driver.copy_async(target, metadata.more)
        self.copied = self.driver.event()
        self.copied.record()


class HasAWorkspace(Variant):
    """A backend whose attention writes its queries to a workspace, and reads them from there."""

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Declare the workspace."""
        layer, dtype = self.context.layers[0], self.context.dtype
        workspace = _slot(
            "variant.workspace",
            lambda _, tokens: (tokens, layer.num_q_heads, layer.head_dim),
            dtype,
            axis="tokens",
            padding_policy=PaddingPolicy.FILL_ONCE,
            pad_value=0,
        )
        return [*super().declare_slots(limits), workspace]

    def make_more(self, buffers: Buffers) -> Any:
        """Return the workspace."""
        return buffers("variant.workspace")

    def forward(self, q: torch.Tensor, *args: Any) -> torch.Tensor:
        """Attend through the workspace."""
        workspace = args[-1].more
        workspace.copy_(q)
        return super().forward(workspace.clone(), *args)


class OnASideStream(Variant):
    """A backend that refreshes metadata on a side stream, which it forks and joins."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.side: Stream | None = None

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Fork, refresh, join."""
        assert self.driver is not None
        main = self.driver.current_stream()
        self.side = self.side or self.driver.stream()
        self.side.wait_stream(main)
        with self.side:
            self.fill_metadata(view, captured)
            self.plan_metadata(view, captured)
        main.wait_stream(self.side)
        return captured


class Plan:
    """A plan that is kept from step to step; its tensor is the memory of a slot."""

    def __init__(self, last_page_len: torch.Tensor) -> None:
        self.last_page_len = last_page_len
        self.num_planned = 0


class KeepsAPlan(Variant):
    """A backend whose kernels read a plan object, which is refreshed in place for each step."""

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Declare the plan's tensor."""
        slot = _slot(
            "variant.plan",
            lambda bs, _: (bs + 1,),
            role="plan",
            axis="bs",
            slice_fn=lambda b, n: b[: n + 1],
        )
        return [*super().declare_slots(limits), slot]

    def make_more(self, buffers: Buffers) -> Any:
        """Return a plan."""
        return Plan(buffers("variant.plan"))

    def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Fill, and refresh the plan."""
        super().fill_metadata(view, metadata)
        size = len(metadata.kv_last_page_len)  # an extend has a fake request too
        metadata.more.last_page_len[:size].copy_(metadata.kv_last_page_len)
        metadata.more.num_planned += 1

    def forward(self, *args: Any) -> torch.Tensor:
        """Attend with the lengths of the plan."""
        *rest, metadata = args
        size = len(metadata.kv_last_page_len)
        planned = dataclasses.replace(metadata, kv_last_page_len=metadata.more.last_page_len[:size])
        return super().forward(*rest, planned)


class DecodesAnywhere(CudaGraphRunner):
    """A runner that captures decode in a lane of any mode, so that two lanes have the same slots."""

    modes = frozenset(ForwardMode)

    def __init__(self, context: RunnerContext) -> None:
        super().__init__(dataclasses.replace(context, mode=ForwardMode.DECODE))


def build(backend: type[Any] = FlashInferBackend, *overrides: str) -> Engine:
    """Return an engine with a strict decode lane that verifies every replay."""
    config = EngineConfig.load(
        env={},
        overrides=[
            f'model.path="{MODEL}"',
            'engine.device="cpu"',
            "engine.max_num_seqs=4",
            "engine.max_num_batched_tokens=24",
            "engine.max_model_len=64",
            "lanes.decode.batch_sizes=[1, 2, 4]",
            "lanes.decode.strict=true",
            "verify.replay_against_eager=1",
            *overrides,
        ],
    )
    return Engine(config, catalog=Catalog(flashinfer=backend, anywhere=DecodesAnywhere))


def serve(engine: Engine, *, requests: int = 6, temperature: float = 0.0) -> None:
    """Serve requests that arrive at random steps, some without a decode step; assert that all is verified."""
    draw = random.Random(0)
    waiting = [
        (
            [draw.randrange(32, 127) for _ in range(draw.randrange(1, 30))],
            SamplingParams(max_new_tokens=draw.choice([1, 2, 5, 7]), temperature=temperature),
        )
        for _ in range(requests)
    ]
    while waiting or engine.scheduler.has_work:
        if waiting and (draw.random() < 0.5 or not engine.scheduler.has_work):
            engine.add(*waiting.pop())
        engine.step()
    lane, (verifier, *_) = engine.lanes[0], engine.verifiers
    assert verifier.verified == lane.stats.replays > 5
    assert verifier.largest_difference < 1e-3


@pytest.mark.few(2)
@pytest.mark.parametrize("backend", [TwoBodies, OnTheHost, HasAWorkspace, OnASideStream, KeepsAPlan])
def test_a_right_backend_of_another_style_passes(backend: type[Any]) -> None:
    """Separate hooks, numpy with staging, a workspace, a side stream and a plan raise no error."""
    serve(build(backend))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.page_size=1", "engine.num_pages=64"],
        ["engine.page_size=4", "engine.num_pages=18"],
        ["engine.page_size=64"],
        [
            "lanes.prefill.runner=anywhere",
            "lanes.prefill.strict=true",
        ],
    ],
    ids=["page of 1", "preempted", "page of 64", "two lanes"],
)
def test_a_right_engine_passes_under_pressure(overrides: list[str]) -> None:
    """Rows and pages that are reused by other requests, in both lanes, raise no error."""
    serve(build(FlashInferBackend, *overrides), temperature=0.8)


def test_a_request_that_never_decodes_alarms_nobody() -> None:
    """A page that prefill used and freed between two decode steps raises no error."""
    engine = build()
    engine.add([40, 41, 42], SamplingParams(max_new_tokens=7))
    for step in range(9):
        if step in (2, 4):
            engine.add([50 + step] * 20, SamplingParams(max_new_tokens=1))
        engine.step()
    assert engine.lanes[0].stats.replays > 3
