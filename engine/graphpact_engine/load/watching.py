"""`LoadObserver`: an observer of an engine that notes batches and probabilities, and injects an error.

Does not: change a step, but for the injected error.
"""

from collections import deque
from collections.abc import Generator
from typing import Any

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.engines import EngineStep, InjectedError
from graphpact.hookspecs import hookimpl
from graphpact.lane import PreparedStep
from graphpact.shapes import EagerReason
from graphpact_engine.request import Request

_KINDS = {
    ForwardMode.DECODE: "decode",
    ForwardMode.EXTEND: "prefill",
    ForwardMode.MIXED: "mixed",
    ForwardMode.TARGET_VERIFY: "verify",
    ForwardMode.DRAFT_DECODE: "draft",
    ForwardMode.DRAFT_EXTEND: "draft_extend",
    ForwardMode.IDLE: "idle",
}


class LoadObserver:
    """What happened in a run.

    Attributes:
        steps: The batches.
        places: The place of each request in the list of the run, by its id.
        at: The pass of the loop.
        raises: Whether the next step raises `InjectedError`, instead of choosing tokens.
        logprobs: The logarithms of the probabilities of each request's tokens, by its id.
    """

    def __init__(self) -> None:
        self.steps: list[EngineStep] = []
        self.places: dict[str, int] = {}
        self.at = 0
        self.raises = False
        self.logprobs: dict[str, list[float]] = {}
        self._rows: dict[int, int] = {}  # the place of the request of each row of the request pool
        self._pending: dict[str, deque[dict[tuple[int, ...], torch.Tensor]]] = {}

    @hookimpl(wrapper=True)
    def launch(self, prepared: PreparedStep) -> Generator[None, Any, Any]:
        """Note a batch that runs."""
        outputs = yield
        self.steps.append(self._step(prepared))
        return outputs

    @hookimpl(wrapper=True)
    def engine_phase(self, phase: str, call: Any) -> Generator[None, Any, Any]:
        """Note the logits from which tokens were chosen, and the requests of rows.

        The injected error is raised after a lane has run, before tokens are chosen: verification would report
        an error inside of a replay as a fault of the replay.
        """
        if self.raises and phase == "sample":
            self.raises = False
            raise InjectedError("a step was made to raise")
        result = yield
        if phase == "schedule" and result is not None:
            rows = result.batch.req_pool_indices.tolist()
            for row, request in zip(rows, result.requests, strict=True):
                self._rows[row] = self.places.get(request.request_id, -1)
        elif phase == "sample":
            logits, requests, *drafts = call.args
            self._note(logits, requests, drafts[0] if drafts and drafts[0] is not None else None)
        elif phase == "commit":
            scheduled, tokens, *_ = call.args
            for request, its in zip(scheduled.requests, tokens, strict=True):
                self._take(request, its)
        return result

    def _step(self, prepared: PreparedStep) -> EngineStep:
        batch: ForwardBatch = prepared.batch
        mode, rows = batch.forward_mode, batch.req_pool_indices.tolist()
        lengths, count = batch.seq_lens_cpu.tolist(), batch.batch_size
        if mode.is_ragged and batch.extend_seq_lens_cpu is not None:
            tokens = batch.extend_seq_lens_cpu.tolist()
        else:
            tokens = [batch.num_tokens // max(count, 1)] * count
        before = mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE)
        eager = isinstance(prepared.fit, EagerReason)
        return EngineStep(
            at=self.at,
            kind=_KINDS[mode],
            requests=tuple(self._rows.get(row, -1) for row in rows),
            tokens=tuple(tokens),
            computed=tuple(
                length if before else length - new for length, new in zip(lengths, tokens, strict=True)
            ),
            graph=None if eager else str(prepared.fit),
            reason=prepared.fit.text if isinstance(prepared.fit, EagerReason) else None,
        )

    def _note(self, logits: torch.Tensor, requests: list[Request], drafts: Any) -> None:
        """Keep the logarithms of probability after each request's tokens and drafts, until `_take`."""
        rows = logits.detach().double().log_softmax(-1)
        new: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
        for at, request in enumerate(requests):
            after = () if drafts is None else tuple(drafts[at])
            new.setdefault(request.request_id, {})[after] = rows[at]
        for name, its in new.items():
            self._pending.setdefault(name, deque()).append(its)

    def _take(self, request: Request, tokens: list[int]) -> None:
        """Add the logarithms of the probabilities of tokens that a request was given."""
        if not tokens:
            return
        pending = self._pending[request.request_id].popleft()
        for at, token in enumerate(tokens):
            value = pending[tuple(tokens[:at])][token].item()
            self.logprobs.setdefault(request.request_id, []).append(value)
