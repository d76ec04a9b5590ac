"""Tests of the verifier: correct replays pass, wrong ones raise and name the first wrong field."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import (
    ForwardBatch,
    ForwardMode,
    Lane,
    LayerSpec,
    Limits,
    PaddingPolicy,
    StepOutputs,
    bounded,
)
from graphpact.buffers import GraphSlot, build_decode_registry
from graphpact.errors import EngineError
from graphpact.graphs import Graph
from graphpact.hookspecs import hookimpl
from graphpact.shapes import EagerReason, GraphShape
from graphpact.step import Attend
from graphpact.tensors import equal
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_engine.errors import VerificationError
from graphpact_engine.verify import Verifier
from graphpact_flashinfer import FlashInferBackend, FlashInferMetadata
from graphpact_tape.tape import TapeDriver
from rigs.lane import CONTEXT, CPU, PAGE, SLOTS, VOCAB, LaneRig
from support import make_slot


class VerifiedRig(LaneRig):
    """A verified lane of two attention layers.

    Args:
        share: Share of the replays that are verified.
        seed: Seed of the choice of these replays.
        backend: Class of the backends of the lane and of the eager runs.
        captured: Another class, for the lane only: the wrong backend of a test.
        observers: More observers, inside the verifier.
        outside: More observers, outside the verifier.
        in_graph: Whether metadata work is recorded, which overwrites bugs planted before a replay.
        driver: Makes the lane's driver.
        rig: More arguments of `LaneRig`.
    """

    verifier: Verifier

    def __init__(
        self,
        *,
        share: float = 1.0,
        seed: int = 0,
        backend: type[FlashInferBackend] = FlashInferBackend,
        captured: type[FlashInferBackend] | None = None,
        observers: tuple[object, ...] = (),
        outside: tuple[object, ...] = (),
        in_graph: bool = False,
        driver: Callable[[torch.device], TapeDriver] = TapeDriver,
        **rig: Any,
    ) -> None:
        def observed() -> list[object]:
            self.shadow = self.new_cache(float("nan"))
            self.verifier = Verifier(
                make_backend=lambda kv: self.make_backend(backend, kv),
                kv_cache=self.kv,
                shadow=self.shadow,
                share=share,
                page_size=PAGE,
                seed=seed,
            )
            return [*outside, self.verifier, *observers]

        self.eager_calls = 0
        super().__init__(
            num_layers=2,
            dtype=torch.float32,
            backend=captured or backend,
            driver=driver(CPU),
            pact="off",  # it would find some bugs that are planted before the replay
            metadata_in_graph=in_graph,
            observers=observed,
            poisons=False,
            batch_sizes=[2, 4],
            **rig,
        )
        self.eager_calls = 0

    def model(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Count the call."""
        self.eager_calls += 1
        return super().model(batch, metadata, attend)

    def run(self, *lengths: int) -> StepOutputs:
        """Run a batch of ``lengths``."""
        return self.lane.run(self.batch(*lengths))

    def failure(self, *lengths: int, **fields: Any) -> VerificationError:
        """Assert that the verifier raises for a batch of ``lengths``, and return its error."""
        batch = dataclasses.replace(self.batch(*lengths), **fields)
        with pytest.raises(VerificationError) as raised:
            self.lane.run(batch)
        assert raised.value.lane == "decode"
        return raised.value

    def before_replay(self, do: Callable[[], None]) -> None:
        """Plant a bug: call ``do`` after the metadata hook of each replay, before the graph runs."""
        refresh = self.lane._init_metadata_replay

        def planted(**kwargs: Any) -> Any:
            metadata = refresh(**kwargs)
            do()
            return metadata

        self.lane._init_metadata_replay = planted

    def after_replay(self, do: Callable[[torch.Tensor], Any]) -> None:
        """Plant a bug: call ``do`` with the logits of each graph after it ran."""
        for captured in self.lane.captured.values():
            graph = captured.graph

            def planted(graph: Any = graph, replay: Callable[[], None] = graph.replay) -> None:
                replay()
                do(graph.outputs.logits)

            graph.replay = planted

    def slot(self, name: str) -> torch.Tensor:
        """Return the buffer of a slot."""
        registry = self.lane.registry
        assert registry is not None
        buffer = registry.get_slot(name).buffer
        assert buffer is not None
        return buffer


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Enable inference mode, in which planted bugs may write to outputs of graphs."""
    with torch.inference_mode():
        yield


def test_right_replays_pass_and_are_counted() -> None:
    """With a share of 1 every replay is verified and agrees, and the step returns the replay's rows."""
    rig = VerifiedRig()
    for lengths in ((1,), (3, 2, 5), (4,), (6, 1, 8, 7), (2, 2, 2)):
        batch = rig.batch(*lengths)
        logits = rig.lane.run(batch).logits
        graphs = [c.graph.outputs.logits.data_ptr() for c in rig.lane.captured.values()]
        assert logits.data_ptr() in graphs
        assert logits.shape == (len(lengths), VOCAB)
    assert rig.verifier.verified == rig.lane.stats.replays == 5
    assert rig.eager_calls == 2 * 5  # one of the padded rows, one of the batch
    assert rig.verifier.largest_difference < 1e-4


@pytest.mark.parametrize("driver", ["untraced", "traced", "strict"])
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("bits", [1, 8])
def test_other_work_shows_to_the_last_bit(bits: int, driver: str, *, in_graph: bool) -> None:
    """If a graph repeats the operations of eager runs, a difference of a few bits in one logit raises."""
    options = {"strict": driver == "strict", "traced": driver != "untraced"}
    rig = VerifiedRig(driver=functools.partial(TapeDriver, **options), in_graph=in_graph)
    rig.run(3, 2, 4)
    assert rig.verifier.equal_to_the_bit == 1
    rig.after_replay(lambda outputs: outputs[1, :1].mul_(1 + bits * 2.0**-23))
    message = "an eager run of the same padded rows differ: .* logits of request 1 by"
    with pytest.raises(VerificationError, match=message):
        rig.run(3, 2, 4)


class DenseBackend(FlashInferBackend):
    """Attends over a table in two halves: the batch's width eagerly, the widest of all in graphs.

    The two sum in different orders, and both are correct.
    """

    def init_metadata_eager(self, batch: ForwardBatch, *, fill: int | None = None) -> Any:
        """Return the tables of the batch, cut to its longest sequence."""
        del fill
        return self.tables(batch, int(batch.seq_lens_cpu.max()))

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
        """Return tables of full width."""
        del shape
        return self.tables(view, CONTEXT)

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Write the captured tables."""
        del shape
        for old, new in zip(captured, self.tables(view, CONTEXT), strict=True):
            old.copy_(new)
        return captured

    def tables(self, batch: ForwardBatch, width: int) -> tuple[torch.Tensor, ...]:
        """Return the KV slots of each request up to ``width``, which of them count, and where to write."""
        slots = self.context.req_to_token[batch.req_pool_indices, :width].long()
        counts = torch.arange(width) < batch.seq_lens[:, None]
        return slots, counts, batch.out_cache_loc.clone()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: Any,
    ) -> torch.Tensor:
        """Write keys and values, and attend."""
        slots, counts, out = metadata
        keys, values = (kv[layer.layer_id] for kv in (self.context.kv_cache.k, self.context.kv_cache.v))
        assert k is not None
        assert v is not None
        keys[out], values[out] = k, v
        scores = torch.einsum("bd,bwd->bw", q[:, 0], keys[slots, 0]) * layer.scaling
        weights = scores.masked_fill(~counts, -torch.inf).softmax(-1)
        half = weights.shape[1] // 2
        parts = [
            torch.einsum("bw,bwd->bd", weights[:, part], values[slots[:, part], 0])
            for part in (slice(half), slice(half, None))
        ]
        return (parts[0] + parts[1])[:, None]


def test_other_extents_may_round_otherwise() -> None:
    """A correct backend whose eager tensors have other extents is compared within the tolerance."""
    rig = VerifiedRig(backend=DenseBackend, driver=functools.partial(TapeDriver, traced=True))
    for lengths in ((1, 5, 3), (7, 2), (4, 4, 4), (6, 1, 7), (5,), (3, 5, 2)):
        rig.run(*lengths)
    assert rig.verifier.verified == 6
    assert rig.verifier.equal_to_the_bit < 6
    assert 0 < rig.verifier.largest_difference < 1e-5
    rig.after_replay(lambda outputs: outputs[1, :1].mul_(1.01))
    with pytest.raises(VerificationError, match="an eager run of the same padded rows differ"):
        rig.run(3, 2, 4)


class OtherKernels(TapeDriver):
    """A driver that does not promise to repeat the kernels of eager runs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.repeats_eager_kernels = False


def test_other_kernels_may_round_otherwise() -> None:
    """If a driver does not promise the same kernels, replays are compared with a tolerance."""
    rig = VerifiedRig(driver=OtherKernels)
    rig.after_replay(lambda outputs: outputs[1, :1].mul_(1 + 2.0**-20))
    rig.run(3, 2, 4)
    assert rig.eager_calls == rig.verifier.verified == 1
    rig.after_replay(lambda outputs: outputs[1, :1].mul_(1.01))
    with pytest.raises(VerificationError, match="replay and eager run differ"):
        rig.run(3, 2, 4)


class Swaps:
    """An observer inside the verifier that returns rows in another order."""

    @hookimpl(wrapper=True)
    def run_step(self) -> Generator[None, StepOutputs, StepOutputs]:
        """Return the rows reversed."""
        outputs = yield
        return StepOutputs(logits=(outputs.logits.flip(0), "bs"))


class Shortens:
    """An observer inside the verifier that drops a row."""

    @hookimpl(wrapper=True)
    def run_step(self) -> Generator[None, StepOutputs, StepOutputs]:
        """Return all rows but the last."""
        outputs = yield
        return StepOutputs(logits=(outputs.logits[:-1], "bs"))


def test_what_observers_make_of_outputs_is_verified_too() -> None:
    """Rows that an observer reorders or drops raise, although the graph is correct."""
    with pytest.raises(VerificationError, match="logits of request"):
        VerifiedRig(observers=(Swaps(),)).run(3, 2, 4)
    message = r"3 requests returned logits \(2, 7\), an eager run returned logits \(3, 7\)"
    with pytest.raises(VerificationError, match=message):
        VerifiedRig(observers=(Shortens(),)).run(3, 2, 4)


def test_a_share_of_nothing_verifies_nothing() -> None:
    """With a share of 0 nothing is verified: there is no eager run and no copy of the cache."""
    rig = VerifiedRig(share=0.0)
    rig.after_replay(lambda outputs: outputs.fill_(99))
    for _ in range(20):
        rig.run(3, 2)
    assert (rig.verifier.verified, rig.eager_calls, rig.lane.stats.replays) == (0, 0, 20)
    assert bool(rig.shadow.k[0].isnan().all())


def test_a_share_is_a_share() -> None:
    """A share of 0.25 verifies about a quarter of the replays; equal seeds choose the same replays."""
    counts = []
    for _ in range(2):
        rig = VerifiedRig(share=0.25, seed=3)
        chosen = []
        for _ in range(80):
            before = rig.verifier.verified
            rig.run(1, 1)
            chosen.append(rig.verifier.verified - before)
        counts.append(chosen)
    assert 10 <= sum(counts[0]) <= 32
    assert counts[0] == counts[1]


def test_eager_steps_are_not_verified() -> None:
    """A batch that ran eagerly is not run again, not counted as verified, and its outputs are returned."""
    rig, plain = VerifiedRig(), VerifiedRig(share=0.0)
    batch = rig.batch(2, 2, 2, 2)
    batch.forward_mode = ForwardMode.EXTEND
    batch.extend_seq_lens = batch.extend_seq_lens_cpu = torch.ones(4, dtype=torch.int64)
    outputs = rig.lane.run(batch)
    assert rig.verifier.verified == 0
    assert rig.eager_calls == 1
    assert torch.equal(outputs.logits, plain.lane.run_eager(batch).logits)


def test_the_eager_run_leaves_the_live_cache_alone() -> None:
    """Verification writes only its copy of the cache and keeps what the replay wrote."""
    rig, plain = VerifiedRig(), VerifiedRig(share=0.0)
    for lengths in ((3, 2), (4, 3), (5, 4)):
        a, b = (r.run(*lengths).logits for r in (rig, plain))
        assert torch.equal(a, b)
    for one, other in zip(rig.caches, plain.caches, strict=True):
        assert equal(one, other)


def test_wrong_logits_are_named_by_request() -> None:
    """A row that differs raises an error with lane, request, and size of the difference."""
    rig = VerifiedRig()
    rig.run(3, 2, 4)
    rig.after_replay(lambda outputs: outputs[1].add_(0.5))
    with pytest.raises(VerificationError, match=r"lane 'decode'.*logits of request 1 by 0\.5"):
        rig.run(4, 3, 5)


def test_padded_rows_may_hold_anything() -> None:
    """Padding rows of the outputs are not compared."""
    rig = VerifiedRig()
    rig.after_replay(lambda outputs: outputs[3:].fill_(float("nan")))
    rig.run(3, 2, 4)
    assert rig.verifier.verified == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_caught(value: float) -> None:
    """NaN and infinities in a replay raise, though every comparison with NaN is false."""
    rig = VerifiedRig()
    rig.after_replay(lambda outputs: outputs[0, 2:3].fill_(value))
    with pytest.raises(VerificationError, match=r"logits of request 0 by (inf|1.8e\+308)"):
        rig.run(3, 2)


def test_stale_metadata_is_caught() -> None:
    """A replay with other page indices attends to other keys and raises."""
    rig = VerifiedRig()
    rig.run(1, 1)
    rig.run(2, 2)
    rig.before_replay(lambda: rig.slot("flashinfer.kv_indices").fill_(0))
    with pytest.raises(VerificationError, match="logits of request"):
        rig.run(3, 3)


def test_a_stray_write_is_caught_though_logits_agree() -> None:
    """A padding row that writes to a KV slot outside scratch is found in the cache, though logits agree."""
    rig = VerifiedRig()
    for lengths in ((1, 1, 1), (2, 2, 2)):
        rig.run(*lengths)
    stray = SLOTS - 1
    rig.before_replay(lambda: rig.slot("out_cache_loc")[3:].fill_(stray))
    batch = rig.batch(3, 3, 3)
    with pytest.raises(VerificationError, match=f"keys of layer 0 in KV slot {stray} by"):
        rig.lane.run(batch)
    rig.verifier.share = 0
    logits = rig.lane.run(batch).logits
    torch.testing.assert_close(logits, rig.lane.run_eager(batch).logits)


@pytest.mark.parametrize(("part", "layer", "name"), [("k", 1, "keys"), ("v", 0, "values")])
def test_every_layer_and_both_halves_are_compared(part: str, layer: int, name: str) -> None:
    """A change of any cached key or value outside scratch is named by layer and slot."""
    rig = VerifiedRig()
    rig.after_replay(lambda outputs: getattr(rig.kv, part)[layer][PAGE].fill_(3e3))
    with pytest.raises(VerificationError, match=f"{name} of layer {layer} in KV slot {PAGE} by"):
        rig.run(4)


def test_scratch_may_hold_anything() -> None:
    """The scratch page is not compared."""
    rig = VerifiedRig()
    rig.after_replay(lambda outputs: rig.kv.k[0][:PAGE].fill_(float("nan")))
    rig.run(4, 3, 2)
    assert rig.verifier.verified == 1


def test_poison_that_nobody_touched_is_no_difference() -> None:
    """Free KV slots that hold NaN before and after the step are no difference."""
    rig = VerifiedRig()
    for cache in rig.caches:
        cache[-PAGE:] = float("nan")
    rig.run(1, 1)


# -- the first field that differs ------------------------------------------------------------------


class Damage:
    """An observer inside the verifier that changes the view or the metadata of every replay."""

    def __init__(
        self,
        view: Callable[[ForwardBatch], Any] = lambda _: None,
        metadata: Callable[[Any], Any] = lambda metadata: metadata,
    ) -> None:
        self.view, self.metadata = view, metadata

    @hookimpl(wrapper=True)
    def prepare_replay(self) -> Generator[None, ForwardBatch, ForwardBatch]:
        """Write to the view, before metadata is derived from it."""
        view = yield
        self.view(view)
        return view

    @hookimpl(wrapper=True)
    def init_metadata_replay(self) -> Generator[None, Any, Any]:
        """Return other metadata."""
        return self.metadata((yield))


def _wrong_outputs(rig: VerifiedRig) -> None:
    """Plant a bug in the recorded work: one row of logits is wrong."""
    rig.after_replay(lambda outputs: outputs[0].add_(1))


@pytest.mark.parametrize(
    ("field", "row", "value", "eager"),
    [
        ("input_ids", 0, 6, 1),
        ("out_cache_loc", 2, SLOTS - 1, 22),
        ("req_pool_indices", 1, 3, 2),
        ("seq_lens", 1, 1, 4),
    ],
)
def test_a_real_row_of_the_view_is_named(field: str, row: int, value: int, eager: int) -> None:
    """A live row that is changed after the fill is named by field and row; derived fields are not named."""
    damage = Damage(lambda view: getattr(view, field)[row : row + 1].fill_(value))
    rig = VerifiedRig(observers=(damage,))
    error = rig.failure(3, 4, 5, input_ids=torch.tensor([1, 2, 3]))
    assert error.field == f"view.{field}"
    assert error.suspects == ()
    assert error.shape == GraphShape(ForwardMode.DECODE, 4, 4)
    assert error.largest_difference == rig.verifier.largest_difference > 0
    assert error.message.endswith(
        f"first field that differs: view.{field}[{row}]: replay {value}, eager {eager}"
        f" (slot '{field}' of decode inputs)"
    )


@pytest.mark.parametrize(
    ("field", "at", "value", "eager"),
    [
        ("kv_indptr", 3, 6, 7),
        ("kv_indices", 2, 9, 5),
        ("kv_last_page_len", 1, 1, 2),
    ],
)
def test_a_metadata_tensor_is_named(field: str, at: int, value: int, eager: int) -> None:
    """One wrong element of metadata is named with its slot and owner; the view is correct."""
    rig = VerifiedRig()
    rig.before_replay(lambda: rig.slot(f"flashinfer.{field}")[at : at + 1].fill_(value))
    error = rig.failure(3, 4, 5)
    assert error.field == f"metadata.{field}"
    assert error.suspects == ()
    assert error.message.endswith(
        f"first field that differs: metadata.{field}[{at}]: replay {value}, eager {eager}"
        f" (slot 'flashinfer.{field}' of flashinfer)"
    )
    assert "init_metadata_replay() must refresh" in str(error)


def test_all_fields_that_differ_are_named_after_the_first() -> None:
    """The error names a second wrong field after the first."""
    rig = VerifiedRig()
    rig.before_replay(lambda: rig.slot("flashinfer.kv_last_page_len").fill_(2))
    rig.before_replay(lambda: rig.slot("flashinfer.kv_indices").fill_(0))
    error = rig.failure(3, 3)
    assert error.field == "metadata.kv_indices"
    assert error.message.endswith("of flashinfer); also metadata.kv_last_page_len")


def test_metadata_that_the_graph_writes_is_read_after_the_replay() -> None:
    """If metadata work is recorded, the metadata that the graph wrote is compared, not the hook's."""
    rig = VerifiedRig(in_graph=True)
    rig.before_replay(lambda: rig.slot("flashinfer.kv_last_page_len").fill_(9))
    rig.run(3, 4)
    _wrong_outputs(rig)
    assert rig.failure(3, 4, 5).field is None
    rig.after_replay(lambda outputs: rig.slot("flashinfer.kv_last_page_len")[1].fill_(9))
    error = rig.failure(3, 4, 5)
    assert error.field == "metadata.kv_last_page_len"
    assert "metadata.kv_last_page_len[1]: replay 9, eager 2" in error.message


class DoesNothing(TapeDriver):
    """A driver whose replays do nothing."""

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Record a graph whose replay does nothing."""
        graph = super().capture(fn, warmup=warmup)
        graph.replay = lambda: None  # type: ignore[method-assign]
        return graph


def test_wrong_metadata_of_a_graph_that_makes_it_is_not_blamed_on_the_hook() -> None:
    """Where the graph makes the metadata, the driver and `fill_metadata` are the suspects, else the hook."""
    error = VerifiedRig(in_graph=True, driver=DoesNothing).failure(3, 4)
    assert error.field is not None
    assert error.field.startswith("metadata.")
    assert "the graph makes this metadata: graph driver 'tape' replays" in error.message
    assert "replay() of the graph driver 'tape'" in (error.hint or "")
    assert "fill_metadata()" in (error.hint or "")
    assert "init_metadata_replay" not in str(error)
    rig = VerifiedRig()
    rig.before_replay(lambda: rig.slot("flashinfer.kv_indices").fill_(0))
    hooks = rig.failure(3, 4)
    assert "init_metadata_replay() must refresh" in (hooks.hint or "")
    assert "driver" not in str(hooks)


@dataclasses.dataclass
class Scaled:
    """Metadata with a host number that is not bounded."""

    inner: FlashInferMetadata
    longest: int


@dataclasses.dataclass
class Bounded:
    """Metadata with a bounded host number."""

    inner: FlashInferMetadata
    longest: int = bounded()


class Scaling(FlashInferBackend):
    """A backend that scales its outputs by the longest sequence, which a capture freezes."""

    kind: type[Any] = Scaled
    at_capture = 1

    def allocate_metadata(self, view: Any, shape: GraphShape, buffers: Any) -> Any:
        """Add the number: ``at_capture`` in the lane, the batch's longest sequence in an eager run."""
        is_captured = self._registry is not None
        longest = self.at_capture if is_captured else int(view.seq_lens_cpu.max())
        return self.kind(super().allocate_metadata(view, shape, buffers), longest)

    def fill_metadata(self, view: Any, metadata: Any) -> None:
        """Fill all but the number."""
        super().fill_metadata(view, metadata.inner)

    def plan_metadata(self, view: Any, metadata: Any) -> None:
        """Plan all but the number."""
        super().plan_metadata(view, metadata.inner)

    def forward(self, q: Any, k: Any, v: Any, layer: LayerSpec, metadata: Any) -> torch.Tensor:
        """Attend, and scale."""
        return super().forward(q, k, v, layer, metadata.inner) * metadata.longest


class WithBound(Scaling):
    """A backend captured with the longest possible sequence, which does not use the number."""

    kind = Bounded
    at_capture = CONTEXT

    def forward(self, q: Any, k: Any, v: Any, layer: LayerSpec, metadata: Any) -> torch.Tensor:
        """Attend."""
        return FlashInferBackend.forward(self, q, k, v, layer, metadata.inner)


class BoundTooLow(WithBound):
    """A backend captured with a bound that a batch can exceed."""

    at_capture = 2


def test_a_frozen_host_number_is_named() -> None:
    """A host number of the capture that differs from the batch's is named with both values."""
    rig = VerifiedRig(backend=Scaling)
    rig.run(1, 1, 1)
    error = rig.failure(2, 5, 3)
    assert (error.field, error.suspects) == ("metadata.longest", ())
    assert error.message.endswith("differs: metadata.longest: replay 1, eager 5")
    assert "put it in a tensor" in str(error)


def test_a_bound_may_be_larger_and_not_smaller() -> None:
    """A bounded number is a difference only if it is below the batch's number."""
    for kind, field in ((WithBound, None), (BoundTooLow, "metadata.longest")):
        rig = VerifiedRig(backend=kind)
        rig.run(2, 5, 3)
        _wrong_outputs(rig)
        error = rig.failure(3, 6, 4)
        assert (error.field, error.suspects) == (field, ())


class Attributes:
    """Metadata of a plain class: its attributes are its fields."""

    planner: object
    softcap: float
    weights: torch.Tensor
    cache: torch.Tensor

    def __init__(self, metadata: FlashInferMetadata) -> None:
        for field in dataclasses.fields(metadata):
            setattr(self, field.name, getattr(metadata, field.name))


class Plain(FlashInferBackend):
    """A backend with metadata of a plain class, some fields of which are hard to compare."""

    def declare_slots(self, limits: Limits) -> list[GraphSlot]:
        """Add a slot of floats."""
        weights = make_slot("weights", dtype=torch.float32, copy_from_fb=False, role="plan")
        return [*super().declare_slots(limits), weights]

    def allocate_metadata(self, view: Any, shape: GraphShape, buffers: Any) -> Any:
        """Return a plain object."""
        metadata = Attributes(super().allocate_metadata(view, shape, buffers))
        metadata.planner, metadata.softcap = object(), float("nan")
        metadata.weights = buffers("weights")
        metadata.cache = self.context.kv_cache.k[0]
        return metadata

    def fill_metadata(self, view: Any, metadata: Any) -> None:
        """Fill, with NaN for sequences of one token."""
        super().fill_metadata(view, metadata)
        metadata.weights.copy_(0 / (view.seq_lens - 1))


def _with(name: str, value: Any) -> Callable[[Any], Any]:
    def change(metadata: Any) -> Any:
        setattr(metadata, name, value)
        return metadata

    return change


def _without(name: str) -> Callable[[Any], Any]:
    def change(metadata: Any) -> Any:
        vars(metadata).pop(name, None)
        return metadata

    return change


class Other(FlashInferMetadata):
    """A class with another name and the same fields."""


@pytest.mark.parametrize(
    ("backend", "change", "field", "words"),
    [
        (Plain, _with("extra", 1), "metadata.extra", "metadata.extra: replay 1, eager nothing"),
        (Plain, _without("max_q_len"), "metadata.max_q_len", "replay nothing, eager 1"),
        (
            FlashInferBackend,
            lambda m: Other(**{f.name: getattr(m, f.name) for f in dataclasses.fields(m)}),
            "metadata",
            "metadata: type: replay Other, eager FlashInferMetadata",
        ),
        (
            FlashInferBackend,
            lambda m: dataclasses.replace(m, kv_indices=None),
            "metadata.kv_indices",
            "metadata.kv_indices: replay None, eager a tensor",
        ),
        (
            FlashInferBackend,
            lambda m: dataclasses.replace(m, kv_last_page_len=m.kv_last_page_len[:1]),
            "metadata.kv_last_page_len",
            "metadata.kv_last_page_len[1]: replay nothing there, in shape (1,), eager 2",
        ),
        (
            FlashInferBackend,
            lambda m: dataclasses.replace(m, max_q_len=1.0),
            "metadata.max_q_len",
            "metadata.max_q_len: replay 1.0, eager 1",
        ),
    ],
)
def test_fields_and_types_are_named(
    backend: type[FlashInferBackend], change: Callable[[Any], Any], field: str, words: str
) -> None:
    """A field that exists on one side only, or has another type or extent, is named."""
    rig = VerifiedRig(backend=backend, observers=(Damage(metadata=change),))
    _wrong_outputs(rig)
    error = rig.failure(3, 4, 5)
    assert error.field == field
    assert words in error.message
    assert "also" not in error.message


def test_a_number_where_eager_has_none_is_named() -> None:
    """NaN is compared as a value: a replay with a number where eager has NaN differs."""
    rig = VerifiedRig(backend=Plain, observers=(Damage(metadata=lambda m: _filled(m, "weights")),))
    _wrong_outputs(rig)
    error = rig.failure(3, 1)
    assert error.field == "metadata.weights"
    assert "metadata.weights[1]: replay 0.0, eager nan" in error.message


def _filled(metadata: Any, name: str) -> Any:
    getattr(metadata, name).zero_()
    return metadata


def test_a_field_that_no_slot_carries_is_refused_and_not_compared() -> None:
    """A tensor without a slot is refused at the lane's door in a verified step too, and not verified."""
    rig = VerifiedRig()
    rig.run(3, 4)
    batch = dataclasses.replace(rig.batch(3, 4), mrope_positions=torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(EngineError, match="the batch carries 'mrope_positions'"):
        rig.lane.run(batch)
    assert rig.verifier.verified == rig.lane.stats.replays == 1


def test_the_verifier_sees_what_the_lane_gets() -> None:
    """The verifier sees what observers after it in the lane's list change, and not what others do."""
    damage = Damage(metadata=lambda m: dataclasses.replace(m, max_q_len=0))
    for rig, field in (
        (VerifiedRig(observers=(damage,)), "metadata.max_q_len"),
        (VerifiedRig(outside=(damage,)), None),
    ):
        _wrong_outputs(rig)
        assert rig.failure(3, 4).field == field


# -- padding rows ----------------------------------------------------------------------------------


def _write_tail(name: str, value: int) -> Callable[[ForwardBatch], Any]:
    return lambda view: getattr(view, name)[3:].fill_(value)


def test_a_padded_row_that_writes_is_the_suspect() -> None:
    """If only padding rows are wrong no field is named; a slot that differs from capture is the suspect."""
    rig = VerifiedRig()
    rig.before_replay(lambda: rig.slot("out_cache_loc")[3:].fill_(SLOTS - 1))
    error = rig.failure(3, 3, 3)
    assert error.field is None
    assert error.suspects == ("view.out_cache_loc",)
    assert "every field agrees in its live rows" in error.message
    assert error.message.endswith(
        f"suspects: view.out_cache_loc[3]: replay {SLOTS - 1}, at capture 0"
        " (slot 'out_cache_loc' of decode inputs)"
    )
    assert "padding policy" in str(error)


@pytest.mark.parametrize("name", ["req_pool_indices", "seq_lens", "positions", "input_ids"])
def test_stale_rows_of_the_view_are_suspects(name: str) -> None:
    """Stale padding rows of the view are the only suspect; fields derived from them are not named."""
    rig = VerifiedRig(observers=(Damage(_write_tail(name, 2)),))
    _wrong_outputs(rig)
    error = rig.failure(3, 3, 3)
    assert (error.field, error.suspects) == (None, (f"view.{name}",))


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [("kv_last_page_len", 3, 2), ("kv_indptr", 4, 8), ("kv_indices", 6, 5)],
)
def test_stale_rows_of_metadata_are_suspects(name: str, at: int, value: int) -> None:
    """Padding rows of metadata are compared with what the backend derives from the view."""
    rig = VerifiedRig()
    rig.before_replay(lambda: rig.slot(f"flashinfer.{name}")[at].fill_(value))
    _wrong_outputs(rig)
    error = rig.failure(3, 3, 3)
    assert (error.field, error.suspects) == (None, (f"metadata.{name}",))
    assert f"metadata.{name}[{at}]: replay {value}, derived from the view " in error.message


class Loose(CudaGraphRunner):
    """A runner that keeps padding rows of ``input_ids`` as they are and captures at other positions."""

    def slots(self) -> list[GraphSlot]:
        """Return the slots; that of ``input_ids`` keeps its padding rows."""
        kept = {"padding_policy": PaddingPolicy.FOREACH_COPY, "reason": "any token is a token"}
        return [
            dataclasses.replace(slot, **kept) if slot.name == "input_ids" else slot
            for slot in super().slots()
        ]

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return a dummy whose positions are not the pad value."""
        dummy = super().dummy(shape)
        dummy.positions.fill_(3)
        return dummy


def test_suspects_that_a_policy_explains_come_last() -> None:
    """Suspects are a stale row, then a pad value that differs from capture, then rows kept by policy."""
    rig = VerifiedRig(runner=Loose, observers=(Damage(_write_tail("req_pool_indices", 2)),))
    rig.lane.run(dataclasses.replace(rig.batch(1, 1, 1, 1), input_ids=torch.full((4,), 5)))
    _wrong_outputs(rig)
    error = rig.failure(3, 3, 3)
    assert error.suspects == ("view.req_pool_indices", "view.positions", "view.input_ids")
    assert "view.positions[3]: replay 0, its pad value, at capture 3" in error.message
    assert "view.input_ids[3]: replay 5, kept because any token is a token" in error.message


def test_a_host_number_of_the_batch_is_a_suspect() -> None:
    """The view has the host number of capture; it is a suspect if the batch has another one."""
    rig = VerifiedRig()
    _wrong_outputs(rig)
    error = rig.failure(3, 4, num_token_non_padded_cpu=2)
    assert (error.field, error.suspects) == (None, ("view.num_token_non_padded_cpu",))
    assert "view.num_token_non_padded_cpu: replay None, eager 2" in error.message


# -- fields that are not named ---------------------------------------------------------------------


class DevicePacking(FlashInferBackend):
    """A backend that fills unread entries of ``kv_indices`` with a page of the last row, live or padding."""

    def fill_metadata(self, view: Any, metadata: FlashInferMetadata) -> None:
        """Fill, then write the entries after the last page."""
        super().fill_metadata(view, metadata)
        pages = metadata.kv_indices
        last = self.context.req_to_token[view.req_pool_indices[-1:], 0] // PAGE
        unread = torch.arange(len(pages)) >= metadata.kv_indptr[-1]
        pages.copy_(torch.where(unread, last, pages))


@functools.cache
def _broken_rig(backend: type[FlashInferBackend], *, in_graph: bool) -> VerifiedRig:
    with torch.inference_mode():
        rig = VerifiedRig(backend=backend, in_graph=in_graph)
        _wrong_outputs(rig)
        return rig


@pytest.mark.few(2)
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("backend", [FlashInferBackend, Plain, WithBound, DevicePacking])
@given(lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=4), garbage=st.integers(0, 99))
@settings(derandomize=True, max_examples=15)
def test_right_fields_are_never_named(
    backend: type[FlashInferBackend],
    lengths: list[int],
    garbage: int,
    in_graph: bool,  # noqa: FBT001  a case
) -> None:
    """If only the recorded work is wrong no field is named, whatever unwritten entries held before."""
    rig = _broken_rig(backend, in_graph=in_graph)
    rig.slot("flashinfer.kv_indices").fill_(garbage)
    error = rig.failure(*lengths)
    assert (error.field, error.suspects) == (None, ())
    assert "padding rows, in the contents of the cache, or in the recorded work" in error.message
    if backend is not DevicePacking:
        assert "changed by padding" not in error.message


@functools.cache
def _right_rig(*, in_graph: bool) -> VerifiedRig:
    with torch.inference_mode():
        return VerifiedRig(in_graph=in_graph)


@pytest.mark.parametrize("in_graph", [False, True])
@given(lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=4), garbage=st.integers(0, 99))
@settings(derandomize=True, max_examples=20)
def test_right_replays_never_raise(
    lengths: list[int],
    garbage: int,
    in_graph: bool,  # noqa: FBT001  a case
) -> None:
    """Batches of any lengths, on a cache with any contents, agree with their eager runs."""
    rig = _right_rig(in_graph=in_graph)
    rig.slot("flashinfer.kv_indices").fill_(garbage)
    rig.run(*lengths)
    assert rig.verifier.largest_difference < 1e-4


class Counting(CudaGraphRunner):
    """A runner with computed slots and an optional one."""

    def slots(self) -> list[GraphSlot]:
        """Return slots of which ``global_num_tokens_gpu`` is always the padded count, and an optional one."""
        registry = build_decode_registry(
            max_bs=4,
            max_num_token=4,
            device=CPU,
            seq_len_fill_value=1,
            enable_mrope=False,
            require_gathered_buffer=True,
            zero_input_ids=True,
        )
        return [*registry, make_slot("encoder_lens", optional=True)]

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return a dummy with the optional field."""
        return dataclasses.replace(
            super().dummy(shape),
            encoder_lens=torch.zeros(shape.batch_size, dtype=torch.int64),
        )


def test_what_is_no_copy_of_the_batch_is_not_held_to_it() -> None:
    """A computed slot, and an optional field that the batch lacks, are no difference."""
    rig = VerifiedRig(runner=Counting)
    _wrong_outputs(rig)
    error = rig.failure(3, 3, 3, global_num_tokens_gpu=torch.tensor([3], dtype=torch.int32))
    assert (error.field, error.suspects) == (None, ())


def test_a_cache_is_no_metadata() -> None:
    """If metadata refers to the KV cache, a wrong key there is not reported as a field of metadata."""
    rig = VerifiedRig(backend=Plain)
    rig.after_replay(lambda outputs: rig.kv.k[0][PAGE].fill_(3e3))
    error = rig.failure(4)
    assert "keys of layer 0 in KV slot" in error.message
    assert (error.field, error.suspects) == (None, ())


def test_what_padding_changes_is_said_beside_the_suspects() -> None:
    """A metadata element that differs only because of padding is reported as such, and is no suspect."""
    rig = VerifiedRig(backend=DevicePacking)
    _wrong_outputs(rig)
    error = rig.failure(3, 3, 3)
    assert "changed by padding, not by the replay: metadata.kv_indices" in error.message
    assert (error.field, error.suspects) == (None, ())


class Fragile(FlashInferBackend):
    """A backend that derives eager metadata only in memory that holds zeros."""

    def fill_metadata(self, view: Any, metadata: FlashInferMetadata) -> None:
        """Fill, or raise if the memory of an eager run is not new."""
        if self._registry is None and int(metadata.kv_last_page_len[0]):
            raise ValueError("not new")
        super().fill_metadata(view, metadata)


def test_a_backend_that_fails_in_the_comparison_hides_nothing() -> None:
    """The error has the difference, the reason why metadata was not compared, and the other suspects."""
    rig = VerifiedRig(backend=Fragile, observers=(Damage(_write_tail("positions", 2)),))
    _wrong_outputs(rig)
    error = rig.failure(3, 3, 3)
    assert "logits of request 0 by 1" in error.message
    assert "metadata could not be compared: ValueError: not new" in error.message
    assert (error.field, error.suspects) == (None, ("view.positions",))


# -- the page table, the lane, the cost ------------------------------------------------------------


def test_a_replay_may_not_change_the_page_table() -> None:
    """A write of recorded work to ``req_to_token`` raises before any eager run, although results agree."""
    rig, unverified = VerifiedRig(), VerifiedRig(share=0.0)
    for each in (rig, unverified):
        each.after_replay(lambda outputs, each=each: each.table[4, 7:].fill_(1))
    batch = unverified.batch(3, 4)
    replayed = unverified.lane.run(batch).clone()
    assert int(unverified.table[4, 7]) == 1
    assert torch.equal(replayed.logits, unverified.lane.run_eager(batch).logits)
    error = rig.failure(3, 4)
    assert error.field == "req_to_token"
    assert "changed the page table: decode[bs=2, tokens=2]: req_to_token[4, 7] was 33 and is 1" in (
        error.message
    )
    assert rig.eager_calls == 0


def test_a_verifier_belongs_to_the_one_lane_that_it_observes() -> None:
    """A verifier has no lane before its first step, and refuses the step of a second lane."""
    rig = VerifiedRig()
    with pytest.raises(EngineError, match=r"observed no step of a lane\n.*observers=\[verifier\]"):
        _ = rig.verifier.lane
    rig.run(1)
    assert rig.verifier.lane is rig.lane
    other = Lane(
        "draft",
        model=rig.model,
        runner=rig.runner,
        backend=rig.lane.backend,
        driver=TapeDriver(CPU),
        eager_reason=EagerReason.NO_GRAPHS,
        observers=[rig.verifier],
    )
    with pytest.raises(EngineError, match="verifier of lane 'decode' cannot also verify lane 'draft'"):
        other.run(rig.batch(1))


def test_an_unverified_step_keeps_nothing() -> None:
    """An unverified step copies and derives nothing, and a step that raised keeps no data."""
    rig = VerifiedRig(share=0.5, seed=1)
    derived: list[int] = []
    real = rig.verifier._backend.init_metadata_eager

    def counted(*args: Any, **more: Any) -> Any:
        derived.append(1)
        return real(*args, **more)

    rig.verifier._backend.init_metadata_eager = counted
    for _ in range(20):
        before = rig.verifier.verified
        for cache in (*rig.shadow.k, *rig.shadow.v):
            cache.fill_(float("nan"))
        derived.clear()
        rig.run(3, 2, 4)
        was_verified = rig.verifier.verified - before
        assert len(derived) == 2 * was_verified  # one of the padded rows, one of the batch
        assert bool(rig.shadow.k[1].isnan().all()) is not bool(was_verified)
    rig.before_replay(lambda: 1 / 0)
    rig.verifier.share = 1
    with pytest.raises(ZeroDivisionError):
        rig.run(3, 2)
    assert rig.verifier._replay is None
    assert rig.verifier._verifying is None
