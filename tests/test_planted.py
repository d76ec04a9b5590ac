"""Ten bugs of real engines, each planted in a copy of a plugin, run through a whole engine on a CPU.

Each is silent where nothing is checked, and caught, with the field named, where something is.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpact import (
    CudaGraphBufferRegistry,
    ForwardBatch,
    GraphShape,
    PaddingPolicy,
    bounded,
    hookimpl,
)
from graphpact.config import EngineConfig
from graphpact.engine import Engine, SamplingParams
from graphpact.errors import ContractError, PactBreach, PoisonError, ReplayError, VerificationError
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_flashinfer import FlashInferBackend, FlashInferMetadata
from support import Catalog

MODEL = Path(__file__).parents[1] / "examples/models/tiny-llama"
PROMPTS = ["Return the ", "A", "The value of a graph is "]
ALL = ("lanes.decode.strict=true", "verify.replay_against_eager=1")
STRICT = ("lanes.decode.strict=true", "verify.pact=off")
VERIFIED = ("verify.replay_against_eager=1", "verify.pact=off")
NOTHING = ("verify.pact=off",)


class Rebuilt(FlashInferBackend):
    """Metadata is made anew at replay, in new memory."""

    metadata_in_graph = None

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Build what an eager step would."""
        return self.init_metadata_eager(view)


class Cast(FlashInferBackend):
    """One field is cast at replay, to what a kernel would rather have."""

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Refresh, and cast."""
        fresh = super().init_metadata_replay(view, shape, captured)
        return dataclasses.replace(fresh, kv_last_page_len=fresh.kv_last_page_len.long())


class BakedLength(FlashInferBackend):
    """The bound of the lengths is that of the batch at hand, at capture too."""

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Any) -> Any:
        """Bound the keys by the longest request."""
        metadata = super().allocate_metadata(view, shape, buffers)
        metadata.max_kv_len = int(view.seq_lens_cpu.max())
        return metadata


class ReadsTheDevice(FlashInferBackend):
    """The replay hook looks at a length on the device."""

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Look, then refresh."""
        assert view.seq_lens[0].item() > 0
        return super().init_metadata_replay(view, shape, captured)


class GrowsItsWorkspace(FlashInferBackend):
    """A workspace that is no slot is replaced by a larger one when the third step comes."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.workspace = torch.zeros(64, device=context.device)
        self.steps = 0

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Grow when it is time."""
        self.steps += 1
        if self.steps == 3:
            self.workspace = torch.zeros(128, device=self.context.device)
        return super().init_metadata_replay(view, shape, captured)

    def forward(self, *args: Any) -> torch.Tensor:
        """Attend, with something of the workspace in it."""
        return super().forward(*args) + self.workspace[0]


class ReadsOutputsLate(CudaGraphRunner):
    """Another graph is replayed before the outputs of the first are read."""

    def run(self, batch: ForwardBatch, shape: GraphShape | None = None) -> torch.Tensor:
        """Replay, prefetch what might come next, and return the first result."""
        logits = super().run(batch, shape)
        other = self.ladder.shapes[0]
        assert self.lane is not None
        self.lane.replay(self.dummy_batch(other), other)
        return logits


class KeepsTheTail(CudaGraphRunner):
    """Padded requests keep the rows of an earlier batch."""

    def make_registry(self) -> CudaGraphBufferRegistry:
        """Forget one policy."""
        registry = super().make_registry()
        slot = registry.get_slot("req_pool_indices")
        object.__setattr__(slot, "padding_policy", PaddingPolicy.KEEP_PAD)
        object.__setattr__(slot, "reason", "rows of an earlier batch are valid rows")
        return registry


class PlansOnce(FlashInferBackend):
    """What the kernels work by is made when there is none yet."""

    metadata_in_graph = None

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.planned: set[GraphShape] = set()

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Plan, if it has not been done."""
        if shape not in self.planned:
            self.planned.add(shape)
            return super().init_metadata_replay(view, shape, captured)
        return captured


@dataclass(slots=True)
class FullMetadata(FlashInferMetadata):
    """What a kernel needs, besides."""

    num_splits: int = 1


class UpgradesAtCapture(FlashInferBackend):
    """Raw metadata becomes full metadata at capture, and stays raw at replay."""

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
        """Make, and upgrade."""
        self.raw = super().init_metadata_capture(view, shape)
        names = [field.name for field in dataclasses.fields(self.raw)]
        return FullMetadata(**{name: getattr(self.raw, name) for name in names})

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Refresh the raw one."""
        return super().init_metadata_replay(view, shape, self.raw)


@dataclass(slots=True)
class ListedMetadata(FlashInferMetadata):
    """The lengths as a list of host numbers, as a planner takes them."""

    kv_lens: list[int] = bounded(default_factory=list)  # noqa: RUF009  a field, whatever its name


class ListsOneShort(FlashInferBackend):
    """The list of lengths leaves a request out."""

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Any) -> Any:
        """List the longest lengths."""
        metadata = super().allocate_metadata(view, shape, buffers)
        names = [field.name for field in dataclasses.fields(metadata)]
        listed = ListedMetadata(**{name: getattr(metadata, name) for name in names})
        listed.kv_lens = [self.context.limits.max_context_len] * shape.batch_size
        return listed

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """List the lengths of this step, but for the last."""
        fresh = super().init_metadata_replay(view, shape, captured)
        return dataclasses.replace(fresh, kv_lens=view.seq_lens_cpu[:-1].tolist())


# Name, plugin, what is checked, the error, and what it names.
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
]


def build(plugin: type[Any], *overrides: str) -> Engine:
    """Return an engine of four requests with buckets 1 and 4, with ``plugin`` for the one of ours."""
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
    return Engine(config, catalog=Catalog(**{place: plugin}))


def generate(engine: Engine) -> list[list[int]]:
    """Answer the prompts, greedily; one of them twice, so that rows and pages are given back between."""
    short = SamplingParams(max_new_tokens=2, temperature=0.0)
    long = SamplingParams(max_new_tokens=6, temperature=0.0)
    completions = engine.generate(PROMPTS[:1] * 4, short) + engine.generate(PROMPTS, long)
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """The tokens of the plugins as they are, with everything checked."""
    return generate(build(FlashInferBackend, *ALL))


@pytest.mark.parametrize(
    ("plugin", "checks", "error", "named"), [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED]
)
def test_a_planted_bug_is_caught_and_named(
    plugin: type[Any], checks: tuple[str, ...], error: type[ContractError], named: str
) -> None:
    """The first step that the bug spoils raises an error that names the field."""
    with pytest.raises(error) as caught:
        generate(build(plugin, *checks))
    assert named in str(caught.value)
    assert "help: " in str(caught.value)
    if isinstance(caught.value, VerificationError) and named:
        assert named in (caught.value.field or "")


@pytest.mark.parametrize("plugin", sorted({p[1] for p in PLANTED}, key=lambda p: p.__name__))
def test_unchecked_it_is_silent(plugin: type[Any], right: list[list[int]]) -> None:
    """Without checks the bug raises nothing that names it: tokens come, right ones or wrong ones."""
    engine = build(plugin, *NOTHING)
    if plugin is BakedLength:  # the portable kernel has a check of its own, and knows no field
        with pytest.raises(RuntimeError, match="planned for at most"):
            generate(engine)
        return
    tokens = generate(engine)
    assert [len(t) for t in tokens] == [len(t) for t in right]
    if plugin in (PlansOnce, Rebuilt):
        assert tokens != right


@pytest.mark.parametrize("checks", [ALL, STRICT, VERIFIED, NOTHING])
def test_the_plugins_as_they_are_pass(checks: tuple[str, ...], right: list[list[int]]) -> None:
    """Nothing planted, nothing raised, and the same tokens whatever is checked."""
    assert generate(build(FlashInferBackend, *checks)) == right
