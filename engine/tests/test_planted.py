"""Twenty bugs of real engines, each planted in a plugin and run in a whole engine on a CPU.

Without checks no error names the bug; with checks each bug is caught, and the error names the field.
"""

import dataclasses
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpact import (
    CudaGraphBufferRegistry,
    ForwardBatch,
    GraphShape,
    GraphSlot,
    Lane,
    Limits,
    PaddingPolicy,
    StepOutputs,
    bounded,
    hookimpl,
    metadata_slot,
)
from graphpact.errors import CaptureError, ContractError, PactBreach, PoisonError, ReplayError
from graphpact.graphs import Stream
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import VerificationError
from graphpact_flashinfer import FlashInferBackend, FlashInferMetadata
from support import Catalog

MODEL = Path(__file__).parents[2] / "examples/models/tiny-llama"
PROMPTS = ["Return the ", "A", "The value of a graph is "]
ALL = ("lanes.decode.strict=true", "verify.replay_against_eager=1")
STRICT = ("lanes.decode.strict=true", "verify.pact=off")
VERIFIED = ("verify.replay_against_eager=1", "verify.pact=off")
NOTHING = ("verify.pact=off",)


class Rebuilt(FlashInferBackend):
    """A backend that builds metadata in new memory at replay."""

    fill_is_device_only = False

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Return metadata of new tensors like the captured ones."""
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
        anew = {name: torch.empty_like(getattr(captured, name)) for name in names}
        rebuilt = dataclasses.replace(captured, **anew)
        self.fill_metadata(view, rebuilt)
        self.plan_metadata(view, rebuilt)
        return rebuilt


class Cast(FlashInferBackend):
    """A backend that casts one field at replay to another dtype."""

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Refresh, and cast."""
        fresh = super().init_metadata_replay(view, shape, captured)
        return dataclasses.replace(fresh, kv_last_page_len=fresh.kv_last_page_len.long())


class BakedLength(FlashInferBackend):
    """A backend whose bound of the lengths is that of the current batch, at capture too."""

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Any) -> Any:
        """Bound the keys by the longest request."""
        metadata = super().allocate_metadata(view, shape, buffers)
        metadata.max_kv_len = int(view.seq_lens_cpu.max())
        return metadata


class ReadsTheDevice(FlashInferBackend):
    """A backend whose replay hook reads a length of the device on the host."""

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Read, then refresh."""
        assert view.seq_lens[0].item() > 0
        return super().init_metadata_replay(view, shape, captured)


class GrowsItsWorkspace(FlashInferBackend):
    """A backend that replaces its workspace, which is no slot, by a larger one in the third step."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.workspace = torch.zeros(64, device=context.device)
        self.steps = 0

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Grow the workspace in the third step, then refresh."""
        self.steps += 1
        if self.steps == 3:
            self.workspace = torch.zeros(128, device=self.context.device)
        return super().init_metadata_replay(view, shape, captured)

    def forward(self, *args: Any) -> torch.Tensor:
        """Attend, and read the workspace."""
        return super().forward(*args) + self.workspace[0]


class ReadsOutputsLate:
    """An observer that replays another graph before the outputs of the first are read."""

    @hookimpl(wrapper=True, trylast=True)
    def run_step(self, lane: Lane) -> Generator[None, StepOutputs, StepOutputs]:
        """Replay another shape, and return the first outputs."""
        outputs = yield
        other = lane.shapes[0]
        lane.launch(lane.prepare(lane.runner.dummy(other)))
        return outputs


class KeepsTheTail(CudaGraphRunner):
    """A runner whose padding rows keep the request rows of an earlier batch."""

    def slots(self) -> Sequence[GraphSlot]:
        """Return the slots, one with a wrong policy."""
        kept: dict[str, Any] = {
            "padding_policy": PaddingPolicy.KEEP_PAD,
            "reason": "rows of an earlier batch are valid rows",
        }
        return [
            dataclasses.replace(slot, **kept) if slot.name == "req_pool_indices" else slot
            for slot in super().slots()
        ]


class PlansOnce(FlashInferBackend):
    """A backend that fills metadata only in the first replay of a shape."""

    fill_is_device_only = False

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.planned: set[GraphShape] = set()

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Fill in the first replay of a shape only."""
        if shape not in self.planned:
            self.planned.add(shape)
            return super().init_metadata_replay(view, shape, captured)
        return captured


@dataclass(slots=True)
class FullMetadata(FlashInferMetadata):
    """Metadata with one more field."""

    num_splits: int = 1


class UpgradesAtCapture(FlashInferBackend):
    """A backend that returns full metadata at capture and raw metadata at replay."""

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
        """Make raw metadata, and return full metadata."""
        self.raw = super().init_metadata_capture(view, shape)
        names = [field.name for field in dataclasses.fields(self.raw)]
        return FullMetadata(**{name: getattr(self.raw, name) for name in names})

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Refresh and return the raw metadata."""
        return super().init_metadata_replay(view, shape, self.raw)


@dataclass(slots=True)
class ListedMetadata(FlashInferMetadata):
    """Metadata with the lengths as a list of host numbers, as a planner takes them."""

    kv_lens: list[int] = bounded(default_factory=list)  # noqa: RUF009  a field, whatever its name


class ListsOneShort(FlashInferBackend):
    """A backend whose list of lengths omits a request."""

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Any) -> Any:
        """List the largest possible lengths."""
        metadata = super().allocate_metadata(view, shape, buffers)
        names = [field.name for field in dataclasses.fields(metadata)]
        listed = ListedMetadata(**{name: getattr(metadata, name) for name in names})
        listed.kv_lens = [self.context.limits.max_context_len] * shape.batch_size
        return listed

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """List the lengths of this step without the last."""
        fresh = super().init_metadata_replay(view, shape, captured)
        return dataclasses.replace(fresh, kv_lens=view.seq_lens_cpu[:-1].tolist())


class WritesTheBatch(CudaGraphRunner):
    """A runner that clamps positions in the engine's own batch."""

    @hookimpl
    def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
        """Clamp, then fill."""
        batch.positions.clamp_(max=8)
        super().populate(registry, batch, shape)


class KeepsPositions(CudaGraphRunner):
    """A runner that keeps the positions of the first batch of a shape."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.first: dict[GraphShape, torch.Tensor] = {}

    @hookimpl
    def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
        """Fill, and put back the first positions."""
        super().populate(registry, batch, shape)
        positions = registry.get_slot("positions").slice_for(shape.batch_size, shape.num_tokens)
        positions.copy_(self.first.setdefault(shape, positions.clone()))


class GoesAround:
    """An observer that runs the step itself, without the hooks and with wrong positions."""

    @hookimpl
    def run_step(self, lane: Lane, batch: ForwardBatch) -> StepOutputs | None:
        """Fill, clear the positions, and replay; leave eager steps to the lane."""
        shape = lane.fit(batch)
        if not isinstance(shape, GraphShape) or lane.registry is None:
            return None
        CudaGraphRunner.populate(lane.runner, lane.registry, batch, shape)
        lane.registry.get_slot("positions").slice_for(0, shape.num_tokens).zero_()
        graph = lane.captured[shape].graph
        graph.replay()
        outputs: StepOutputs = graph.outputs
        return outputs.rows(batch.batch_size, batch.num_tokens)


class PadsWithTheLastSlot(CudaGraphRunner):
    """A runner whose padding tokens write the last KV slot, which it takes for a sentinel."""

    @hookimpl
    def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
        """Fill, and overwrite the padding."""
        super().populate(registry, batch, shape)
        limits = self.context.limits
        pages = 1 + limits.max_bs * -(-limits.max_context_len // limits.page_size)
        slots = registry.get_slot("out_cache_loc").slice_for(shape.batch_size, shape.num_tokens)
        slots[batch.num_tokens :].fill_(pages * limits.page_size - 1)


class PadsWithALiveSlot(CudaGraphRunner):
    """A runner whose padding tokens write the KV slot of the first request."""

    @hookimpl
    def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
        """Fill, and overwrite the padding."""
        super().populate(registry, batch, shape)
        slots = registry.get_slot("out_cache_loc").slice_for(shape.batch_size, shape.num_tokens)
        slots[batch.num_tokens :].copy_(slots[:1].expand(shape.num_tokens - batch.num_tokens))


class PlansByPages(FlashInferBackend):
    """A backend that plans only if a number of pages changes: the key of its cache omits the lengths."""

    fill_is_device_only = False

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.planned: Any = None

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Plan if the key is new; otherwise write the earlier lengths."""
        key = (shape, ((view.seq_lens_cpu + 15) // 16).tolist())
        if self.planned is None or self.planned[0] != key:
            self.fill_metadata(view, captured)
            self.planned = key, captured.kv_last_page_len.clone()
        lengths = self.planned[1]
        self.fill_metadata(view, captured)
        captured.kv_last_page_len.copy_(lengths)
        self.plan_metadata(view, captured)
        return captured


class NeverJoins(FlashInferBackend):
    """A backend that refreshes metadata on a side stream and does not join it."""

    fill_is_device_only = False
    side: Stream | None = None

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Fork, and do not join."""
        assert self.driver is not None
        self.side = self.side or self.driver.stream()
        self.side.wait_stream(self.driver.current_stream())
        with self.side:
            self.fill_metadata(view, captured)
        return captured


class StagesAgain(FlashInferBackend):
    """A backend that overwrites staging memory before the copy from it is done."""

    fill_is_device_only = False

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Declare the staging buffer."""
        staging = metadata_slot(
            "flashinfer.staging", lambda bs, _: (bs,), torch.int32, role="staging", axis="bs"
        )
        return [*super().declare_slots(limits), staging]

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Stage the lengths, begin the copy, and clear the staging buffer."""
        assert self.driver is not None
        assert self._registry is not None
        self.fill_metadata(view, captured)
        staging = self._registry.get_slot("flashinfer.staging").slice_for(shape.batch_size, 0)
        staging.copy_((view.seq_lens_cpu - 1) % self.context.limits.page_size + 1)
        self.driver.copy_async(captured.kv_last_page_len, staging)
        staging.numpy()[:] = 0
        return captured


class CachesInTheCapture(FlashInferBackend):
    """A backend that allocates a tensor in the first capture and uses it in all graphs."""

    scale: torch.Tensor | None = None

    def forward(self, *args: Any) -> torch.Tensor:
        """Attend with a scale that is allocated once."""
        out = super().forward(*args)
        if self.driver is None or not self.driver.is_capturing:
            return out
        if self.scale is None:
            self.scale = torch.ones(1, device=out.device)
        return out * self.scale


class CountsItself(FlashInferBackend):
    """A backend with a semaphore in its own memory that every replay increments and none resets."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.semaphore = torch.zeros(1, dtype=torch.int32, device=context.device)

    def forward(self, *args: Any) -> torch.Tensor:
        """Attend, or return zeros when the semaphore is full."""
        self.semaphore.add_(1)
        out = super().forward(*args)
        return torch.where(self.semaphore == 64, torch.zeros_like(out), out)


# Name, plugin, checks, type of the error, and words of its text.
PLANTED: list[tuple[str, type[Any], tuple[str, ...], type[ContractError], str]] = [
    ("metadata rebuilt", Rebuilt, ALL, PactBreach, "metadata.qo_indptr"),
    ("metadata rebuilt, strict", Rebuilt, STRICT, PoisonError, "flashinfer.qo_indptr"),
    ("dtype cast", Cast, ALL, PactBreach, "metadata.kv_last_page_len"),
    ("max_seq_len of capture", BakedLength, ALL, VerificationError, "metadata.max_kv_len"),
    ("item in the replay hook", ReadsTheDevice, STRICT, ReplayError, "view.seq_lens[0].item()"),
    ("workspace grown", GrowsItsWorkspace, STRICT, ReplayError, "GrowsItsWorkspace.workspace"),
    (
        "output read late",
        ReadsOutputsLate,
        STRICT,
        ReplayError,
        "outputs of the graph of decode[bs=4",
    ),
    ("request rows kept", KeepsTheTail, STRICT, PoisonError, "rows 3:4 of slot 'req_pool_indices'"),
    ("plan made once", PlansOnce, STRICT, PoisonError, "flashinfer.kv_indptr"),
    ("plan made once, verified", PlansOnce, VERIFIED, VerificationError, "metadata.kv_"),
    ("upgraded at capture", UpgradesAtCapture, ALL, PactBreach, "FullMetadata"),
    ("lengths one short", ListsOneShort, ALL, PactBreach, "metadata.kv_lens"),
    ("batch written", WritesTheBatch, VERIFIED, VerificationError, "view.positions"),
    ("positions kept", KeepsPositions, VERIFIED, VerificationError, "view.positions"),
    ("around the hooks", GoesAround, VERIFIED, VerificationError, "no hook prepared a replay"),
    (
        "last slot as sentinel",
        PadsWithTheLastSlot,
        STRICT,
        ReplayError,
        "keys of layer 0 in KV slot 271, which no live request owns",
    ),
    ("live slot as padding", PadsWithALiveSlot, ALL, VerificationError, "view.out_cache_loc"),
    ("plan keyed by pages", PlansByPages, ALL, VerificationError, "metadata.kv_last_page_len"),
    ("side stream not joined", NeverJoins, STRICT, ReplayError, "in no order"),
    ("staged again", StagesAgain, STRICT, ReplayError, "slot 'flashinfer.staging' of flashinfer"),
    ("cached in a capture", CachesInTheCapture, STRICT, CaptureError, "another graph's capture"),
    ("semaphore not re-armed", CountsItself, STRICT, CaptureError, "CountsItself.semaphore"),
]


def build(plugin: type[Any], *overrides: str) -> Engine:
    """Return an engine of four requests with capture sizes 1 and 4, and ``plugin`` in place of ours.

    Observers are registered directly, because the catalog rejects those that answer for the lane.
    """
    is_observer = not issubclass(plugin, CudaGraphRunner | FlashInferBackend)
    place = "cuda_graph" if issubclass(plugin, CudaGraphRunner) else "flashinfer"
    config = EngineConfig.load(
        env={},
        overrides=[
            f'model.path="{MODEL}"',
            'engine.device="cpu"',
            "engine.max_num_seqs=4",
            "engine.max_model_len=64",
            "lanes.decode.batch_sizes=[1, 4]",
            *overrides,
        ],
    )
    if not is_observer:
        return Engine(config, catalog=Catalog(**{place: plugin}))
    engine = Engine(config, catalog=Catalog())
    decode = engine.lanes[0]
    decode.hooks.manager.register(plugin())
    decode._run_step = decode.hooks.manager.hook.run_step
    return engine


def generate(engine: Engine, tokens: list[list[int]] | None = None) -> list[list[int]]:
    """Return greedy tokens of one prompt, four times, then of all, so that rows and pages are reused.

    Args:
        engine: The engine.
        tokens: Gets the tokens of each step that returns, also if a later step raises.
    """
    tokens = [] if tokens is None else tokens
    for prompts, count in ((PROMPTS[:1] * 4, 2), (PROMPTS, 6)):
        first = len(tokens)
        tokens += [[] for _ in prompts]
        params = SamplingParams(max_new_tokens=count, temperature=0.0)
        for delta in engine.stream(prompts, params):
            tokens[first + delta.index].append(delta.token_id)
    return tokens


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """Return the tokens of the correct plugins, with all checks."""
    return generate(build(FlashInferBackend, *ALL))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("plugin", "checks", "error", "named"), [pytest.param(*p[1:], id=p[0]) for p in PLANTED]
)
def test_a_planted_bug_is_caught_and_named(
    plugin: type[Any],
    checks: tuple[str, ...],
    error: type[ContractError],
    named: str,
    right: list[list[int]],
) -> None:
    """The bug raises an error that names the field and has a help, before any token is wrong."""
    tokens: list[list[int]] = []
    with pytest.raises(error) as caught:
        generate(build(plugin, *checks), tokens)
    assert all(got == expected[: len(got)] for got, expected in zip(tokens, right, strict=False))
    assert named in str(caught.value)
    assert "help: " in str(caught.value)
    if isinstance(caught.value, VerificationError) and named.startswith(("view.", "metadata.")):
        fields = [caught.value.field] if caught.value.field else caught.value.suspects
        assert any(named in field for field in fields)


@pytest.mark.few(2)
@pytest.mark.parametrize("plugin", sorted({p[1] for p in PLANTED}, key=lambda p: p.__name__))
def test_unchecked_it_is_silent(plugin: type[Any], right: list[list[int]]) -> None:
    """Without checks no error names the bug: there are as many tokens as without it, some of them wrong."""
    engine = build(plugin, *NOTHING)
    if plugin is BakedLength:  # the portable kernel has its own check, whose error names no field
        with pytest.raises(RuntimeError, match="planned for at most"):
            generate(engine)
        return
    tokens = generate(engine)
    assert [len(t) for t in tokens] == [len(t) for t in right]
    if plugin in (GoesAround, KeepsPositions, PlansByPages, PlansOnce, Rebuilt, WritesTheBatch):
        assert tokens != right


@pytest.mark.few(1)
@pytest.mark.parametrize("checks", [ALL, STRICT, VERIFIED, NOTHING])
def test_the_plugins_as_they_are_pass(checks: tuple[str, ...], right: list[list[int]]) -> None:
    """Without a planted bug no check raises, and the tokens are the same with any checks."""
    assert generate(build(FlashInferBackend, *checks)) == right
