"""`PipelineStage`: what a stage gets from the stage before, and passes on.

    receive    hidden states of the stage before, into `ForwardBatch.extra`, from which a slot copies them
    send       hidden states of this stage's last layer, to the stage after
    tokens     the tokens that the last stage samples, on all stages

Each rank exchanges them with the rank at its place in the neighbouring stage, outside of the graphs.

Does not: split a model, or have several batches in flight: while one stage computes, the others wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from graphpact.batch import ForwardBatch
from graphpact.buffers.inputs import PROXIES
from graphpact.step import StepOutputs
from graphpact_engine.ranks.processes import EngineRanks

STAGE_OUTPUT = "hidden_states"
"""The name of what stages pass on: the output of the last layer of a stage, ``[T, hidden_size]``."""


class PipelineStage:
    """The stage of this process.

    Args:
        ranks: The ranks.
        width: That of the hidden states.
        dtype: Their dtype.
        device: Their device.

    Attributes:
        is_first: Whether it reads token ids, and no hidden states.
        is_last: Whether it returns logits, and no hidden states.
    """

    def __init__(self, ranks: EngineRanks, *, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group = ranks.pipeline
        self._members = dist.get_process_group_ranks(ranks.pipeline)
        self._watch = ranks.watch
        self._stage = ranks.layout.stage
        self.is_first = self._stage == 0
        self.is_last = self._stage == ranks.layout.pipeline - 1
        self._width, self._dtype, self._device = width, dtype, device

    def receive(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a batch with the hidden states of the stage before; in the first stage the batch itself.

        Raises:
            RuntimeError: They did not come in time; see `graphpact.ranks.RankWatch`.
        """
        if self.is_first:
            return batch
        hidden = torch.empty(batch.num_tokens, self._width, dtype=self._dtype, device=self._device)
        if batch.num_tokens:
            sender = self._members[self._stage - 1]
            self._watch.doing = f"waiting for the hidden states of rank {sender}"
            dist.recv(hidden, src=sender, group=self._group)
        return replace(batch, extra={**batch.extra, f"{PROXIES}{STAGE_OUTPUT}": hidden})

    def send(self, outputs: StepOutputs) -> None:
        """Pass the hidden states of a step on; the last stage has none to pass on."""
        if self.is_last:
            return
        hidden = outputs[STAGE_OUTPUT]
        if len(hidden):
            receiver = self._members[self._stage + 1]
            self._watch.doing = f"sending hidden states to rank {receiver}"
            dist.send(hidden.contiguous(), dst=receiver, group=self._group)

    def tokens(self, sample: Callable[[], Sequence[int]], count: int) -> list[int]:
        """Return the tokens that the last stage samples.

        Args:
            sample: Samples them; only the last stage calls it.
            count: Their number, which all stages know.
        """
        tokens = torch.zeros(count, dtype=torch.int64, device=self._device)
        if self.is_last:
            tokens.copy_(torch.tensor(sample(), dtype=torch.int64))
            self._watch.doing = "passing tokens to the stages before"
        else:
            self._watch.doing = f"waiting for the tokens of rank {self._members[-1]}"
        dist.broadcast(tokens, src=self._members[-1], group=self._group)
        listed: list[int] = tokens.tolist()
        return listed
