"""A strict lane of any forward mode, whose runner implements only `shapes`, and batches for it.

Does not: assert anything.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from graphpact import (
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
from graphpact.runners import RunnerContext
from graphpact.step import Attend
from graphpact_flashinfer import FlashInferBackend
from graphpact_tape.strict_observer import StrictObserver
from graphpact_tape.tape import TapeDriver

CPU = torch.device("cpu")
DTYPE = torch.float64
CONTEXT, PAGE, ROWS, VOCAB, WIDTH = 16, 2, 4, 7, 4
STEPS, DRAFTS = 2, 3
BRANCH_SLOTS = ROWS * 4 * STEPS  # KV slots of draft branches, after those of the rows
SLOTS = PAGE + ROWS * CONTEXT + BRANCH_SLOTS
LAYER = LayerSpec(0, 1, 1, WIDTH, WIDTH, scaling=0.5)
MODES = [mode for mode in ForwardMode if mode is not ForwardMode.IDLE]


class FullGraphs(GraphRunner):
    """A runner of full graphs for any mode, which implements only `shapes`."""

    modes = frozenset(MODES)
    needs = GraphSupport.ALWAYS

    def shapes(self) -> Sequence[GraphShape]:
        """Return a few shapes for up to four requests."""
        context = self.context
        if context.tokens_per_request is None:
            return CaptureSizes.by_tokens(context.mode, [4, 8, 16], batch_size=ROWS).shapes
        sizes = [1, 2, ROWS]
        return CaptureSizes.uniform(context.mode, sizes, context.tokens_per_request).shapes


class ModeRig:
    """A strict lane of one attention layer.

    Args:
        mode: Forward mode of its batches.
        topk: Branches of a draft decode; above 1 a target verify has a tree mask.
        runner: Class of the lane's runner.
        capture: Whether to capture all shapes.
    """

    def __init__(
        self,
        mode: ForwardMode,
        *,
        topk: int = 1,
        runner: type[GraphRunner] = FullGraphs,
        capture: bool = True,
        **lane: Any,
    ) -> None:
        self.mode, self.topk = mode, topk
        self.generator = torch.Generator().manual_seed(0)
        self.weights = [self._random(VOCAB, WIDTH) for _ in range(4)]
        self.kv = SimpleNamespace(
            k=[torch.zeros(SLOTS, 1, WIDTH, dtype=DTYPE)],
            v=[torch.zeros(SLOTS, 1, WIDTH, dtype=DTYPE)],
        )
        self.table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32)
        self.table[1:] = torch.arange(PAGE, PAGE + ROWS * CONTEXT).view(ROWS, CONTEXT)
        limits = Limits(ROWS, 16, CONTEXT, PAGE, DraftLimits(STEPS, topk, DRAFTS))
        backend = FlashInferBackend(
            BackendContext(CPU, DTYPE, [LAYER], limits, self.table, self.kv, mode=mode)
        )
        driver = TapeDriver(CPU, strict=True)
        self.context = RunnerContext(CPU, backend.capabilities, limits, mode=mode, lane=mode.value)
        self.lane = Lane(
            mode.value,
            model=self.model,
            runner=runner(self.context),
            backend=backend,
            driver=driver,
            **({"observers": [StrictObserver(driver)]} | lane),
        )
        if capture:
            self.lane.capture_all()

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=DTYPE, generator=self.generator)

    def model(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Embed tokens and positions, attend (in each step of a draft decode), unembed; one row per token."""
        at = batch.positions[:, None] * 0.1
        q, k, v = ((w[batch.input_ids] + at)[:, None] for w in self.weights[:3])
        for part in metadata.steps if self.mode is ForwardMode.DRAFT_DECODE else [metadata]:
            q = attend(q, k, v, LAYER, part)
        hidden = q[:, 0]
        return StepOutputs(logits=(hidden @ self.weights[3].t(), "tokens"), hidden_states=(hidden, "tokens"))

    def batch(self, lengths: Sequence[int], new: Sequence[int] | None = None) -> ForwardBatch:
        """Return a batch of requests with ``lengths`` tokens before the step, on the first rows.

        Args:
            lengths: Cached tokens of each request.
            new: New tokens of each request, for a ragged mode; by default the mode's tokens per request.
        """
        mode, bs = self.mode, len(lengths)
        count = [self.context.tokens_per_request or 1] * bs if new is None else list(new)
        before, added = torch.tensor(lengths), torch.tensor(count)
        drafts = mode is ForwardMode.DRAFT_DECODE
        uncounted = drafts or mode is ForwardMode.TARGET_VERIFY
        lens = before if uncounted else before + added
        rows, tokens = torch.arange(1, bs + 1), int(added.sum())
        positions = torch.cat(
            [
                torch.full((n,), p) if drafts else torch.arange(p, p + n)
                for p, n in zip(lengths, count, strict=True)
            ]
        )
        of = rows.repeat_interleave(added)
        if drafts and self.topk > 1:
            loc = SLOTS - BRANCH_SLOTS + torch.arange(tokens * STEPS).view(tokens, STEPS)
        elif drafts:
            loc = torch.stack([self.table[of, before + step] for step in range(STEPS)], 1).long()
        else:
            loc = self.table[of, positions].long()
        for cache in (self.kv.k[0], self.kv.v[0]):
            cache[PAGE:] = float("nan")
            for row, length in enumerate(lengths, start=1):
                cache[self.table[row, :length].long()] = self._random(length, 1, WIDTH)
        ragged, extend = mode.is_ragged, mode is ForwardMode.DRAFT_EXTEND
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
            tree_mask=self._tree(bs) if self.topk > 1 and mode is ForwardMode.TARGET_VERIFY else None,
            num_correct_drafts=torch.zeros(bs, dtype=torch.int32) if extend else None,
        )

    @staticmethod
    def _tree(bs: int) -> torch.Tensor:
        """Return a mask in which each draft token sees the first one of its request, and itself."""
        mask = torch.eye(DRAFTS, dtype=torch.bool)
        mask[:, 0] = True
        return mask.repeat(bs, 1)
