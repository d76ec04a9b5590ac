"""The verifier: right replays pass, wrong logits and stray KV writes do not."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphpact import BackendContext, ForwardBatch, ForwardMode, Lane, LayerSpec, Limits
from graphpact.errors import VerificationError
from graphpact.graphs.tape import TapeDriver
from graphpact.runners import RunnerContext
from graphpact.verify import Verifier
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_flashinfer import FlashInferBackend

CPU = torch.device("cpu")
CONTEXT, PAGE, ROWS, VOCAB, WIDTH = 8, 2, 4, 7, 4
SLOTS = PAGE + ROWS * CONTEXT + PAGE  # scratch first, and a page at the end that nobody owns
LAYERS = [LayerSpec(i, 1, 1, WIDTH, WIDTH, scaling=0.5) for i in range(2)]


def _cache(fill: float = 0.0) -> Any:
    def tensors() -> list[torch.Tensor]:
        return [torch.full((SLOTS, 1, WIDTH), fill) for _ in LAYERS]

    return SimpleNamespace(k=tensors(), v=tensors())


class Rig:
    """A verified lane of two attention layers."""

    def __init__(self, *, share: float = 1.0, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(VOCAB, WIDTH, generator=self.generator) for _ in range(4)]
        self.kv, self.shadow = _cache(), _cache(float("nan"))
        self.table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32)
        for row in range(1, ROWS + 1):
            first = PAGE + (row - 1) * CONTEXT
            self.table[row] = torch.arange(first, first + CONTEXT)
        self.backend = self.make_backend(self.kv)
        runner = CudaGraphRunner(RunnerContext(CPU, self.backend.capabilities, 4, [2, 4]))
        self.eager_calls = 0
        self.lane = Lane(
            "decode",
            model=self.model,
            runner=runner,
            backend=self.backend,
            driver=TapeDriver(CPU),
        )
        runner.capture(self.lane)
        self.eager_calls = 0
        self.verifier = Verifier(
            self.lane,
            make_backend=self.make_backend,
            kv_cache=self.kv,
            shadow=self.shadow,
            share=share,
            page_size=PAGE,
            seed=seed,
        )

    def make_backend(self, kv: Any) -> FlashInferBackend:
        """Return a backend on ``kv``."""
        limits = Limits(4, 4, CONTEXT, PAGE)
        return FlashInferBackend(BackendContext(CPU, torch.float32, LAYERS, limits, self.table, kv))

    def model(self, batch: ForwardBatch, backend: Any, metadata: Any) -> torch.Tensor:
        """Embed, attend twice, unembed."""
        self.eager_calls += 1
        q, k, v = (w[batch.input_ids][:, None] for w in self.weights[:3])
        for layer in LAYERS:
            q = backend.forward(q, k, v, layer, metadata)
        return q[:, 0] @ self.weights[3].t()

    def batch(self, *lengths: int) -> ForwardBatch:
        """Return requests of ``lengths`` on the first rows."""
        lens = torch.tensor(lengths)
        rows = torch.arange(1, len(lengths) + 1)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(lengths),
            input_ids=torch.randint(VOCAB, (len(lengths),), generator=self.generator),
            positions=lens - 1,
            out_cache_loc=self.table[rows, lens - 1].long(),
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
        )

    def before_replay(self, do: Callable[[], None]) -> None:
        """Plant: do something to the slots after each fill, before the graph runs."""
        refresh = self.lane.init_metadata_replay

        def planted(**kwargs: Any) -> Any:
            metadata = refresh(**kwargs)
            do()
            return metadata

        self.lane.init_metadata_replay = planted

    def after_replay(self, do: Callable[[torch.Tensor], Any]) -> None:
        """Plant: do something to the outputs of every graph after it ran."""
        for captured in self.lane._captured.values():
            graph = captured.graph

            def planted(graph: Any = graph, replay: Callable[[], None] = graph.replay) -> None:
                replay()
                do(graph.outputs)

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
    """Plants write to outputs of graphs, which inference mode allows."""
    with torch.inference_mode():
        yield


def test_right_replays_pass_and_are_counted() -> None:
    """With a share of 1 every replay is verified, agrees, and returns the replay's own rows."""
    rig = Rig()
    for lengths in ((1,), (3, 2, 5), (4,), (6, 1, 8, 7), (2, 2, 2)):
        batch = rig.batch(*lengths)
        logits = rig.verifier.run(batch)
        graphs = [c.graph.outputs.data_ptr() for c in rig.lane._captured.values()]
        assert logits.data_ptr() in graphs
        assert logits.shape == (len(lengths), VOCAB)
    assert rig.verifier.verified == rig.lane.stats.replays == rig.eager_calls == 5
    assert rig.verifier.largest_difference < 1e-4


def test_a_share_of_nothing_verifies_nothing() -> None:
    """With a share of 0 the lane runs alone: no eager run, no copy of the cache."""
    rig = Rig(share=0.0)
    rig.after_replay(lambda outputs: outputs.fill_(99))
    for _ in range(20):
        rig.verifier.run(rig.batch(3, 2))
    assert (rig.verifier.verified, rig.eager_calls, rig.lane.stats.replays) == (0, 0, 20)
    assert bool(rig.shadow.k[0].isnan().all())


def test_a_share_is_a_share() -> None:
    """About a quarter of the steps is verified for a share of a quarter; one seed, one choice."""
    counts = []
    for _ in range(2):
        rig = Rig(share=0.25, seed=3)
        chosen = []
        for _ in range(80):
            before = rig.verifier.verified
            rig.verifier.run(rig.batch(1, 1))
            chosen.append(rig.verifier.verified - before)
        counts.append(chosen)
    assert 10 <= sum(counts[0]) <= 32
    assert counts[0] == counts[1]


def test_eager_steps_are_not_verified() -> None:
    """A batch that ran without a graph is returned as it is and not counted."""
    rig = Rig()
    batch = rig.batch(2, 2, 2, 2)
    batch.forward_mode = ForwardMode.EXTEND
    batch.extend_seq_lens = batch.extend_seq_lens_cpu = torch.ones(4, dtype=torch.int64)
    rig.verifier.run(batch)
    assert rig.verifier.verified == 0
    assert rig.eager_calls == 1


def test_the_eager_run_leaves_the_live_cache_alone() -> None:
    """What the replay wrote stays: verification writes its copy only."""
    rig, plain = Rig(), Rig(share=0.0)
    for lengths in ((3, 2), (4, 3), (5, 4)):
        a, b = (r.verifier.run(r.batch(*lengths)) for r in (rig, plain))
        assert torch.equal(a, b)
    for one, other in zip(rig.kv.k + rig.kv.v, plain.kv.k + plain.kv.v, strict=True):
        assert torch.equal(one, other)


def test_wrong_logits_are_named_by_request() -> None:
    """A row that differs raises with lane, request, and by how much."""
    rig = Rig()
    rig.verifier.run(rig.batch(3, 2, 4))
    rig.after_replay(lambda outputs: outputs[1].add_(0.5))
    with pytest.raises(VerificationError, match=r"lane 'decode'.*logits of request 1 by 0\.5"):
        rig.verifier.run(rig.batch(4, 3, 5))


def test_padded_rows_may_hold_anything() -> None:
    """Rows that no request has are not compared."""
    rig = Rig()
    rig.after_replay(lambda outputs: outputs[3:].fill_(float("nan")))
    rig.verifier.run(rig.batch(3, 2, 4))
    assert rig.verifier.verified == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_caught(value: float) -> None:
    """NaN and infinities in a replay raise, though every comparison with NaN is false."""
    rig = Rig()
    rig.after_replay(lambda outputs: outputs[0, 2:3].fill_(value))
    with pytest.raises(VerificationError, match=r"logits of request 0 by (inf|1.8e\+308)"):
        rig.verifier.run(rig.batch(3, 2))


def test_stale_metadata_is_caught() -> None:
    """A replay that attends to other keys differs from eager."""
    rig = Rig()
    rig.verifier.run(rig.batch(1, 1))
    rig.verifier.run(rig.batch(2, 2))
    rig.before_replay(lambda: rig.slot("flashinfer.kv_indices").fill_(0))
    with pytest.raises(VerificationError, match="logits of request"):
        rig.verifier.run(rig.batch(3, 3))


def test_a_stray_write_is_caught_though_logits_agree() -> None:
    """A padded row that writes its key to a live slot is found in the cache, not in the logits."""
    rig = Rig()
    for lengths in ((1, 1, 1), (2, 2, 2)):
        rig.verifier.run(rig.batch(*lengths))
    stray = SLOTS - 1
    rig.before_replay(lambda: rig.slot("out_cache_loc")[3:].fill_(stray))
    batch = rig.batch(3, 3, 3)
    with pytest.raises(VerificationError, match=f"keys of layer 0 in KV slot {stray} by"):
        rig.verifier.run(batch)
    logits = rig.lane.run(batch)
    torch.testing.assert_close(logits, rig.lane.run_eager(batch))


@pytest.mark.parametrize(("part", "layer", "name"), [("k", 1, "keys"), ("v", 0, "values")])
def test_every_layer_and_both_halves_are_compared(part: str, layer: int, name: str) -> None:
    """A change of any cached key or value outside scratch is named by layer and slot."""
    rig = Rig()
    rig.after_replay(lambda outputs: getattr(rig.kv, part)[layer][PAGE].fill_(3e3))
    with pytest.raises(VerificationError, match=f"{name} of layer {layer} in KV slot {PAGE} by"):
        rig.verifier.run(rig.batch(4))


def test_scratch_may_hold_anything() -> None:
    """The whole scratch page is out of the comparison."""
    rig = Rig()
    rig.after_replay(lambda outputs: rig.kv.k[0][:PAGE].fill_(float("nan")))
    rig.verifier.run(rig.batch(4, 3, 2))
    assert rig.verifier.verified == 1


def test_poison_that_nobody_touched_is_no_difference() -> None:
    """Free KV slots that hold NaN, before and after, agree."""
    rig = Rig()
    for cache in rig.kv.k + rig.kv.v:
        cache[-PAGE:] = float("nan")
    rig.verifier.run(rig.batch(1, 1))
