"""A lane over a model of one attention layer, and random batches for it.

Does not: assert anything.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from graphpact import (
    BackendContext,
    ForwardBatch,
    ForwardMode,
    GraphRunner,
    GraphShape,
    Lane,
    LayerSpec,
    Limits,
    StepOutputs,
)
from graphpact.runners import EagerRunner, RunnerContext
from graphpact.step import Attend
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_flashinfer import FlashInferBackend
from graphpact_tape.tape import TapeDriver

CPU = torch.device("cpu")
DTYPE = torch.float64
CONTEXT, ROWS, VOCAB, WIDTH = 8, 5, 7, 4
SLOTS = 1 + ROWS * CONTEXT
LAYER = LayerSpec(0, 1, 1, WIDTH, WIDTH, scaling=0.5)
HOOKS = ("populate", "prepare_replay", "init_metadata_capture", "init_metadata_replay")
"""The hooks that plugins implement; observers can also wrap ``run_step``."""
SHAPE_OF = {n: GraphShape(ForwardMode.DECODE, n, n) for n in (1, 2, 4)}


class Rig:
    """A lane over a model of one attention layer, and random batches for it."""

    def __init__(
        self,
        *,
        backend: type[FlashInferBackend] = FlashInferBackend,
        runner: type[GraphRunner] = CudaGraphRunner,
        observers: Sequence[object] = (),
        capture: bool = True,
        **lane: Any,
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.weights = [self._random(VOCAB, WIDTH) for _ in range(4)]
        self.kv = SimpleNamespace(
            k=[torch.zeros(SLOTS, 1, WIDTH, dtype=DTYPE)],
            v=[torch.zeros(SLOTS, 1, WIDTH, dtype=DTYPE)],
        )
        self.table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32)
        limits = Limits(4, 4, CONTEXT, 1)
        self.backend = backend(BackendContext(CPU, DTYPE, [LAYER], limits, self.table, self.kv))
        sizes = None if runner is EagerRunner else [1, 2, 4]
        self.runner = runner(
            RunnerContext(CPU, self.backend.capabilities, limits, batch_sizes=sizes, lane="decode")
        )
        self.lane = Lane(
            "decode",
            model=self.model,
            runner=self.runner,
            backend=self.backend,
            observers=observers,
            **({"driver": TapeDriver(CPU)} | lane),
        )
        if capture:
            self.lane.capture_all()

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=DTYPE, generator=self.generator)

    def model(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Embed, attend, unembed."""
        q, k, v = (w[batch.input_ids][:, None] for w in self.weights[:3])
        attended = attend(q, k, v, LAYER, metadata)[:, 0]
        return StepOutputs(logits=(attended @ self.weights[3].t(), "bs"))

    def batch(self, *lengths: int, mode: ForwardMode = ForwardMode.DECODE) -> ForwardBatch:
        """Return a batch of ``lengths`` on the first rows; unowned KV and table entries are poisoned."""
        lens, size = torch.tensor(lengths), len(lengths)
        self.table[1:] = SLOTS + 1
        for cache in (self.kv.k[0], self.kv.v[0]):
            cache[1:] = float("nan")
        for row, length in enumerate(lengths, start=1):
            first = 1 + (row - 1) * CONTEXT
            self.table[row, :length] = torch.arange(first, first + length, dtype=torch.int32)
            for cache in (self.kv.k[0], self.kv.v[0]):
                cache[first : first + length - 1] = self._random(length - 1, 1, WIDTH)
        rows = torch.arange(1, size + 1)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=size,
            input_ids=torch.randint(VOCAB, (size,), generator=self.generator),
            positions=lens - 1,
            out_cache_loc=self.table[rows, lens - 1].long(),
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            extend_seq_lens=torch.ones_like(lens) if mode is ForwardMode.EXTEND else None,
            extend_seq_lens_cpu=torch.ones_like(lens) if mode is ForwardMode.EXTEND else None,
        )

    def agrees(self, *lengths: int) -> bool:
        """Return whether a replay of a batch of ``lengths`` gives the logits of an eager run."""
        batch = self.batch(*lengths)
        for captured in self.lane.captured.values():
            captured.graph.outputs.logits.fill_(float("nan"))
        replayed = self.lane.run(batch).clone()
        return torch.allclose(replayed.logits, self.lane.run_eager(batch).logits, rtol=0, atol=1e-9)
