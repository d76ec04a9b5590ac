"""`StepLog`: which batches SGLang's scheduler ran, and by which graphs.

The scheduler hands each batch to its worker once. Its lengths are read there, because with the overlapped
schedule they are known only then.

Does not: list the steps of a draft model: they belong to the verification.
"""

from collections.abc import Callable
from typing import Any

from graphpact.engines import EngineStep
from graphpact_guard import GraphKey
from graphpact_sglang.seams.steps import StepCounts


class StepLog:
    """The batches of a scheduler, in their order.

    Args:
        scheduler: SGLang's scheduler.
        counts: The counts of this process.
        at: Returns the number of the pass.
        place_of: Returns the place of a request by SGLang's name.

    Attributes:
        steps: The batches.
        before: Functions that are called before a batch runs, after its memory was allocated.
        after: Functions that are called after a batch ran, unless it raised.
    """

    def __init__(
        self, scheduler: Any, counts: StepCounts, at: Callable[[], int], place_of: Callable[[str], int]
    ) -> None:
        self.steps: list[EngineStep] = []
        self.before: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        self._scheduler, self._at, self._place_of = scheduler, at, place_of
        self._ran: tuple[GraphKey | None, str | None] | None = None
        worker = scheduler.model_worker
        forward = worker.forward_batch_generation

        def logged(batch: Any, *args: Any, **kwargs: Any) -> Any:
            for each in self.before:
                each()
            step, self._ran = self._begun(batch), None
            try:
                result = forward(batch, *args, **kwargs)
            finally:
                graph, reason = self._ran or (None, "nothing was run")
                self.steps.append(
                    EngineStep(**step, graph=None if graph is None else str(graph), reason=reason)
                )
            for each in self.after:
                each()
            return result

        worker.forward_batch_generation = logged
        counts.listeners.append(self._note)

    def _note(self, runner: Any, graph: GraphKey | None, reason: str | None) -> None:
        """Keep what ran the target model first in this step."""
        if self._ran is None and not runner.model_runner.is_draft_worker:
            self._ran = graph, reason

    def _begun(self, batch: Any) -> dict[str, Any]:
        """Return the fields of the step that ``batch`` begins."""
        mode = batch.forward_mode
        lengths = [] if batch.seq_lens is None else batch.seq_lens.tolist()[: len(batch.reqs)]
        if mode.is_idle():
            kind, tokens, computed = "idle", [], []
        elif mode.is_extend():
            kind = "mixed" if mode.is_mixed() else "prefill"
            tokens, computed = list(batch.extend_lens), list(batch.prefix_lens)
        elif batch.spec_algorithm.is_none():
            kind, tokens, computed = "decode", [1] * len(lengths), [length - 1 for length in lengths]
        else:
            width = self._scheduler.server_args.speculative_num_draft_tokens
            kind, tokens, computed = "verify", [width] * len(lengths), lengths
        return {
            "at": self._at(),
            "kind": kind,
            "requests": ()
            if kind == "idle"
            else tuple(self._place_of(request.rid) for request in batch.reqs),
            "tokens": tuple(tokens),
            "computed": tuple(computed),
        }
