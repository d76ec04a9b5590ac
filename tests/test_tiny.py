"""A small example of the contract: a model, a lane, and replays that equal eager. Read it first."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from graphpact import (
    BackendContext,
    ForwardBatch,
    ForwardMode,
    GraphSlot,
    Lane,
    LayerSpec,
    Limits,
    PaddingPolicy,
    StepOutputs,
)
from graphpact.runners import RunnerContext
from graphpact.step import Attend
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_flashinfer import FlashInferBackend
from graphpact_tape.tape import TapeDriver

CPU = torch.device("cpu")
DTYPE = torch.float64  # padded and unpadded sums then differ by rounding only, far below any bug
SIZES = [1, 2, 4]
CONTEXT, PAGE, ROWS, VOCAB, HEADS, WIDTH = 12, 4, 6, 11, 2, 4
PAGES = CONTEXT // PAGE
SLOTS = (1 + ROWS * PAGES) * PAGE  # page 0 is scratch


class Tiny:
    """A model with an embedding, one attention layer that calls the backend, and a head."""

    def __init__(self, generator: torch.Generator) -> None:
        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=DTYPE, generator=generator)

        self.embed, self.place = weight(VOCAB, HEADS * WIDTH), weight(CONTEXT, HEADS * WIDTH)
        self.qkv, self.head = weight(HEADS * WIDTH, 3 * HEADS * WIDTH), weight(HEADS * WIDTH, VOCAB)
        self.layer = LayerSpec(0, HEADS, HEADS, WIDTH, WIDTH, scaling=WIDTH**-0.5)
        self.calls = 0

    def __call__(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return one row of logits per request."""
        self.calls += 1
        hidden = self.embed[batch.input_ids] + self.place[batch.positions]
        q, k, v = (hidden @ self.qkv).view(-1, 3, HEADS, WIDTH).unbind(1)
        hidden = hidden + attend(q, k, v, self.layer, metadata).flatten(1)
        return StepOutputs(logits=(hidden @ self.head, "bs"))


class TinyLane:
    """A lane, the memory under it, and batches on that memory."""

    def __init__(self, seed: int, runner: type[CudaGraphRunner] = CudaGraphRunner) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.random = random.Random(seed)
        self.model = Tiny(self.generator)
        self.kv = SimpleNamespace(
            k=[torch.zeros(SLOTS, HEADS, WIDTH, dtype=DTYPE)],
            v=[torch.zeros(SLOTS, HEADS, WIDTH, dtype=DTYPE)],
        )
        self.table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32)
        limits = Limits(max(SIZES), max(SIZES), CONTEXT, PAGE)
        layers = [self.model.layer]
        backend = FlashInferBackend(BackendContext(CPU, DTYPE, layers, limits, self.table, self.kv))
        policy = runner(RunnerContext(CPU, backend.capabilities, limits, batch_sizes=SIZES))
        driver = TapeDriver(CPU)
        self.lane = Lane("tiny", model=self.model, runner=policy, backend=backend, driver=driver)
        self.lane.capture_all()

    def batch(self, size: int) -> ForwardBatch:
        """Return a batch of random requests; unowned memory is poisoned."""
        rows = self.random.sample(range(1, ROWS + 1), size)
        lengths = [self.random.randint(1, CONTEXT) for _ in rows]
        self.table[1:] = SLOTS + 1  # an unowned row has no valid slot
        for cache in (self.kv.k[0], self.kv.v[0]):
            cache[PAGE:] = float("nan")  # an unowned slot holds NaN
        for row, length in zip(rows, lengths, strict=True):
            slots = torch.arange(length, dtype=torch.int32) + PAGE * (1 + (row - 1) * PAGES)
            self.table[row, :length] = slots
            self.table[row, length:] = slots[0] // PAGE * PAGE
            for cache in (self.kv.k[0], self.kv.v[0]):
                shape = (length - 1, HEADS, WIDTH)
                cache[slots[:-1]] = torch.randn(shape, dtype=DTYPE, generator=self.generator)
        lens, owners = torch.tensor(lengths), torch.tensor(rows)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            input_ids=torch.randint(VOCAB, (size,), generator=self.generator),
            positions=lens - 1,
            out_cache_loc=self.table[owners, lens - 1].long(),
            req_pool_indices=owners,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
        )

    def step(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return replayed and eager logits of a random batch; assert that both wrote the same KV."""
        batch = self.batch(size)
        for captured in self.lane.captured.values():
            captured.graph.outputs.logits.fill_(float("nan"))
        before = [cache.clone() for cache in (self.kv.k[0], self.kv.v[0])]
        replayed = self.lane.run(batch).logits.clone()
        written = [cache.clone() for cache in (self.kv.k[0], self.kv.v[0])]
        for cache, old in zip((self.kv.k[0], self.kv.v[0]), before, strict=True):
            cache.copy_(old)
        eager = self.lane.run_eager(batch).logits
        for cache, new in zip((self.kv.k[0], self.kv.v[0]), written, strict=True):
            torch.testing.assert_close(new[PAGE:], cache[PAGE:], equal_nan=True)
        return replayed, eager


@torch.inference_mode()
def test_replayed_batches_equal_eager_whatever_came_before() -> None:
    """Random decode batches of every size, in random order, give the same logits replayed and run eagerly."""
    tiny = TinyLane(seed=1)
    captured_calls = tiny.model.calls
    sizes = [size for size in range(1, 5) for _ in range(8)]
    tiny.random.shuffle(sizes)
    for size in sizes:
        replayed, eager = tiny.step(size)
        torch.testing.assert_close(replayed, eager, rtol=0, atol=1e-9)
    stats = tiny.lane.stats
    assert stats.replays == stats.pact_checks == len(sizes)
    assert {shape.batch_size: s.replays for shape, s in stats.shapes.items()} == {4: 16, 2: 8, 1: 8}
    assert not stats.eager
    assert tiny.model.calls == captured_calls + len(sizes)  # those of the eager runs


@torch.inference_mode()
def test_shrink_after_grow_in_one_shape() -> None:
    """If three requests follow four in one shape, the stale fourth row does not change their results."""
    tiny = TinyLane(seed=2)
    for size in (4, 3, 4, 3, 3):
        replayed, eager = tiny.step(size)
        assert replayed.shape == (size, VOCAB)
        torch.testing.assert_close(replayed, eager, rtol=0, atol=1e-9)


@torch.inference_mode()
def test_larger_than_the_largest_shape_runs_eagerly() -> None:
    """A batch that is larger than the largest shape runs eagerly, and its reason is counted."""
    tiny = TinyLane(seed=3)
    replayed, eager = tiny.step(5)
    torch.testing.assert_close(replayed, eager, rtol=0, atol=1e-9)
    assert tiny.lane.stats.replays == 0
    assert [reason.name for _, reason in tiny.lane.stats.eager.elements()] == ["over_largest"]


class KeepsRows(CudaGraphRunner):
    """A runner that keeps earlier request rows in the padding, for a wrong reason."""

    def slots(self) -> list[GraphSlot]:
        """Return the slots, one with a wrong policy."""
        kept = {"padding_policy": PaddingPolicy.KEEP_PAD, "reason": "they are valid rows"}
        return [
            replace(slot, **kept) if slot.name == "req_pool_indices" else slot for slot in super().slots()
        ]


@torch.inference_mode()
def test_a_stale_row_is_caught_when_planted() -> None:
    """With poisoned memory, a stale request row in the padding raises or gives wrong logits."""
    tiny = TinyLane(seed=4, runner=KeepsRows)
    tiny.step(4)
    wrong = 0
    for _ in range(4):
        try:
            replayed, eager = tiny.step(3)
        except IndexError:  # the stale row has no valid slot
            wrong += 1
        else:
            wrong += not torch.allclose(replayed, eager)
    assert wrong
