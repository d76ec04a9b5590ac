"""A lane over a model of a few attention layers, in any forward mode, and random batches for it.

By default all memory that no request of a batch owns is poisoned: KV slots with NaN, table entries with an
invalid slot. Numbers are float64: padded and unpadded sums then differ far less than by any bug.

Does not: assert anything.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from graphpact import (
    AttentionBackend,
    BackendContext,
    CaptureSizes,
    ForwardBatch,
    ForwardMode,
    GraphRunner,
    GraphShape,
    Lane,
    LayerSpec,
    Limits,
    StepOutputs,
)
from graphpact.attention import DraftLimits, GraphSupport
from graphpact.graphs import GraphDriver
from graphpact.runners import EagerRunner, RunnerContext
from graphpact.step import Attend
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_flashinfer import FlashInferBackend
from graphpact_tape.tape import TapeDriver

CPU = torch.device("cpu")
DTYPE = torch.float64
CONTEXT, PAGE, ROWS, MAX_BS, VOCAB, WIDTH = 8, 2, 5, 4, 7, 4
STEPS, DRAFTS = 2, 3
BRANCH_SLOTS = MAX_BS * 4 * STEPS  # KV slots of draft branches, after those of the rows
SLOTS = PAGE + ROWS * CONTEXT + BRANCH_SLOTS
NO_SLOT = SLOTS + 1
LAYER = LayerSpec(0, 1, 1, WIDTH, WIDTH, scaling=0.5)
HOOKS = ("populate", "prepare_replay", "init_metadata_capture", "init_metadata_replay")
"""The hooks that plugins implement; observers can also wrap ``run_step``."""
SHAPE_OF = {n: GraphShape(ForwardMode.DECODE, n, n) for n in (1, 2, 4)}
MODES = [mode for mode in ForwardMode if mode is not ForwardMode.IDLE]


class FullGraphs(GraphRunner):
    """A runner of full graphs for any mode, which implements only `shapes`."""

    modes = frozenset(MODES)
    needs = GraphSupport.ALWAYS

    def shapes(self) -> Sequence[GraphShape]:
        """Return a few shapes for up to `MAX_BS` requests."""
        context = self.context
        if context.tokens_per_request is None:
            return CaptureSizes.by_tokens(context.mode, [4, 8, 16], batch_size=MAX_BS).shapes
        return CaptureSizes.uniform(context.mode, [1, 2, MAX_BS], context.tokens_per_request).shapes


def lane_of(
    backend: AttentionBackend,
    runner: type[GraphRunner],
    model: Any,
    *,
    driver: GraphDriver | None = None,
    strict: bool = False,
    ownership: Any = None,
    observers: Sequence[object] = (),
    batch_sizes: Sequence[int] | None = None,
    context: Mapping[str, Any] | None = None,
    **lane: Any,
) -> Lane:
    """Return a lane without graphs that is named after the mode of ``backend``.

    Args:
        backend: Its backend.
        runner: Class of its runner.
        model: Its model.
        driver: Its driver; by default a tape.
        strict: Whether the tape is strict; the observer of a strict driver is added to the lane.
        ownership: The `Ownership` that this observer calls.
        observers: More observers, inside the strict one.
        batch_sizes: Capture sizes of the runner.
        context: More fields of the `RunnerContext`.
        lane: More arguments of `Lane`.
    """
    given, driver = backend.context, driver or TapeDriver(CPU, strict=strict)
    made = RunnerContext(
        CPU,
        backend.capabilities,
        given.limits,
        mode=given.mode,
        batch_sizes=None if batch_sizes is None else [*batch_sizes],
        lane=given.mode.value,
        **(context or {}),
    )
    outer = [driver.strict_observer(ownership)] if driver.strict else []
    return Lane(
        given.mode.value,
        model=model,
        runner=runner(made),
        backend=backend,
        driver=driver,
        observers=[*outer, *observers],
        **lane,
    )


class LaneRig:
    """A lane, the memory under it, and batches on that memory.

    Args:
        mode: Forward mode of the lane.
        topk: Branches of a draft decode; above 1 a target verify has a tree mask.
        num_layers: Attention layers of the model.
        dtype: Dtype of weights and KV cache.
        backend: Class of the lane's backend.
        runner: Class of the lane's runner; by default decode graphs, and `FullGraphs` in other modes.
        observers: Observers of the lane, or a function that makes them after the memory is allocated.
        poisons: Whether each batch poisons what it does not own; otherwise every row of the table has slots,
            with random keys and values in them.
        batch_sizes: Capture sizes of the runner.
        capture: Whether to capture all shapes.
        lane: More arguments of `lane_of`.
    """

    def __init__(
        self,
        mode: ForwardMode = ForwardMode.DECODE,
        *,
        topk: int = 1,
        num_layers: int = 1,
        dtype: torch.dtype = DTYPE,
        backend: type[AttentionBackend] = FlashInferBackend,
        runner: type[GraphRunner] | None = None,
        observers: Sequence[object] | Callable[[], Sequence[object]] = (),
        poisons: bool = True,
        batch_sizes: Sequence[int] = (1, 2, MAX_BS),
        capture: bool = True,
        **lane: Any,
    ) -> None:
        self.mode, self.topk, self.dtype, self.poisons = mode, topk, dtype, poisons
        self.generator = torch.Generator().manual_seed(0)
        self.layers = [LayerSpec(at, 1, 1, WIDTH, WIDTH, scaling=0.5) for at in range(num_layers)]
        self.weights = [self.random(VOCAB, WIDTH) for _ in range(4)]
        self.kv = self.new_cache()
        self.table = torch.full((ROWS + 1, CONTEXT), NO_SLOT, dtype=torch.int32)
        self.table[0] = 0
        if not poisons:
            everything = torch.full((ROWS,), CONTEXT)
            self._own(everything, everything)
        self.backend = self.make_backend(backend, self.kv)
        if runner is None:
            runner = CudaGraphRunner if mode is ForwardMode.DECODE else FullGraphs
        sizes = None if runner is EagerRunner else batch_sizes
        self.lane = lane_of(
            self.backend,
            runner,
            self.model,
            observers=observers() if callable(observers) else observers,
            batch_sizes=sizes,
            **lane,
        )
        self.runner: Any = self.lane.runner
        if capture:
            self.lane.capture_all()

    def random(self, *shape: int) -> torch.Tensor:
        """Return random numbers."""
        return torch.randn(shape, dtype=self.dtype, generator=self.generator)

    def new_cache(self, fill: float = 0.0) -> Any:
        """Return a KV cache of all layers with ``k`` and ``v``, each ``[SLOTS, 1, WIDTH]``."""
        k, v = ([torch.full((SLOTS, 1, WIDTH), fill, dtype=self.dtype) for _ in self.layers] for _ in "kv")
        return SimpleNamespace(k=k, v=v)

    def make_backend(self, kind: type[AttentionBackend], kv: Any) -> AttentionBackend:
        """Return a new backend on the rig's table and a KV cache."""
        decode = self.mode is ForwardMode.DECODE
        draft = DraftLimits() if decode else DraftLimits(STEPS, self.topk, DRAFTS)
        limits = Limits(MAX_BS, 16, CONTEXT, PAGE, draft)
        return kind(BackendContext(CPU, self.dtype, self.layers, limits, self.table, kv, mode=self.mode))

    @property
    def caches(self) -> list[torch.Tensor]:
        """All tensors of the KV cache."""
        return [*self.kv.k, *self.kv.v]

    def model(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Embed tokens and positions, attend in each layer and step, unembed.

        A decode returns logits per request; other modes return logits and hidden states per token.
        """
        at = batch.positions[:, None] * 0.1
        q, k, v = ((w[batch.input_ids] + at)[:, None] for w in self.weights[:3])
        for layer in self.layers:
            for part in metadata.steps if self.mode is ForwardMode.DRAFT_DECODE else [metadata]:
                q = attend(q, k, v, layer, part)
        hidden = q[:, 0]
        logits = hidden @ self.weights[3].t()
        if self.mode is ForwardMode.DECODE:
            return StepOutputs(logits=(logits, "bs"))
        return StepOutputs(logits=(logits, "tokens"), hidden_states=(hidden, "tokens"))

    def batch(
        self, *lengths: int, new: Sequence[int] | None = None, mode: ForwardMode | None = None
    ) -> ForwardBatch:
        """Return a batch on the first request rows; memory that it does not own is poisoned.

        Args:
            lengths: Its ``seq_lens``, including the new tokens of the step, but not unverified drafts.
            new: New tokens of each request in a ragged mode; by default the mode's tokens per request.
            mode: The forward mode; by default that of the lane.
        """
        mode, bs = mode or self.mode, len(lengths)
        count = [self.runner.context.tokens_per_request or 1] * bs if new is None else [*new]
        lens, added, rows = torch.tensor(lengths), torch.tensor(count), torch.arange(1, bs + 1)
        drafts = mode is ForwardMode.DRAFT_DECODE
        before = lens if drafts or mode is ForwardMode.TARGET_VERIFY else lens - added
        if self.poisons:
            self._own(before, before + (STEPS if drafts else added))
        each, owner = before.repeat_interleave(added), rows.repeat_interleave(added)
        tokens = len(each)
        within = torch.arange(tokens) - (added.cumsum(0) - added).repeat_interleave(added)
        positions = each if drafts else each + within
        if drafts and self.topk > 1:
            loc = SLOTS - BRANCH_SLOTS + torch.arange(tokens * STEPS).view(tokens, STEPS)
        elif drafts:
            loc = torch.stack([self.table[owner, each + step] for step in range(STEPS)], 1).long()
        else:
            loc = self.table[owner, positions].long()
        ragged, tree = mode.is_ragged, self.topk > 1 and mode is ForwardMode.TARGET_VERIFY
        return ForwardBatch(
            forward_mode=mode,
            batch_size=bs,
            input_ids=torch.randint(VOCAB, (tokens,), generator=self.generator),
            positions=positions,
            out_cache_loc=loc,
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            extend_seq_lens=added if ragged else None,
            extend_seq_lens_cpu=added.clone() if ragged else None,
            tree_mask=_tree_mask(bs) if tree else None,
            num_correct_drafts=torch.zeros(bs, dtype=torch.int32)
            if mode is ForwardMode.DRAFT_EXTEND
            else None,
        )

    def _own(self, cached: torch.Tensor, owned: torch.Tensor) -> None:
        """Poison all memory; then give the first rows ``owned`` slots, ``cached`` of them with KV."""
        self.table[1:] = NO_SLOT
        for cache in self.caches:
            cache[PAGE:] = float("nan")
        for row, (length, most) in enumerate(zip(cached.tolist(), owned.tolist(), strict=True)):
            first = PAGE + row * CONTEXT
            self.table[row + 1, :most] = torch.arange(first, first + most, dtype=torch.int32)
            for cache in self.caches:
                cache[first : first + length] = self.random(length, 1, WIDTH)

    def agrees(self, *lengths: int) -> bool:
        """Return whether a replay of a batch of ``lengths`` gives the logits of an eager run."""
        batch = self.batch(*lengths)
        for captured in self.lane.captured.values():
            captured.graph.outputs.logits.fill_(float("nan"))
        replayed = self.lane.run(batch).clone()
        return torch.allclose(replayed.logits, self.lane.run_eager(batch).logits, rtol=0, atol=1e-9)


def _tree_mask(bs: int) -> torch.Tensor:
    """Return a tree mask in which each draft token sees the first one of its request and itself."""
    mask = torch.eye(DRAFTS, dtype=torch.bool)
    mask[:, 0] = True
    return mask.repeat(bs, 1)
