"""`StepLog`: what each batch of a run was.

A batch is what vLLM's scheduler gives to its executor. Its graph, or why it has none, is what `StepCounts`
sees while the model runs it. Several ones of a batch are pieces, of which the first is taken; replays while
vLLM samples are those of a drafter.

Does not: change a batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from graphpact.engines import EngineStep
from graphpact_guard import GraphKey
from graphpact_vllm.load.in_process import InProcessEngine
from graphpact_vllm.seams.steps import StepCounts

Seen = tuple[GraphKey | None, str | None]
"""A graph that was replayed and None, or None and why there was none."""


def forwards_of(seen: Sequence[Seen]) -> Iterator[Seen]:
    """Yield the first graph of each run of a model: one that was seen in a run begins the next one."""
    run: set[Seen] = set()
    for each in seen:
        if not run or each in run:
            run.clear()
            yield each
        run.add(each)


class StepLog:
    """The batches of one engine.

    Args:
        engine: The engine.
        counts: What sees its graphs.

    Attributes:
        steps: The batches, in their order.
        at: The pass of the engine's loop, which the owner sets.
        before: Are called with what the scheduler gave, before each batch.
        after: The same after it, and after its tokens were sampled, with which a drafter runs.
    """

    def __init__(self, engine: InProcessEngine, counts: StepCounts) -> None:
        self.steps: list[EngineStep] = []
        self.at = 0
        self.before: list[Callable[[Any], None]] = []
        self.after: list[Callable[[Any], None]] = []
        self._engine = engine
        self._places: dict[str, int] = {}
        self._graphs: list[Seen] = []
        self._batch: Any = None
        counts.listeners.append(lambda key, reason: self._graphs.append((key, reason)))
        executor = engine.core.model_executor
        self._execute, self._sample = executor.execute_model, executor.sample_tokens
        self._idle = executor.execute_dummy_batch
        executor.execute_model = self._run_batch
        executor.sample_tokens = self._run_sampling
        executor.execute_dummy_batch = self._run_idle

    def name(self, name: str, place: int) -> None:
        """Note vLLM's name of a request, and its place among those that were given."""
        self._places[name] = place

    def _run_batch(self, scheduled: Any, **kwargs: Any) -> Any:
        tokens: Mapping[str, int] = scheduled.num_scheduled_tokens
        if not tokens:
            self._batch = None
            return self._execute(scheduled, **kwargs)
        computed = _computed_of(scheduled)
        kind = self._kind_of(scheduled, computed)
        self._batch = scheduled
        for hook in self.before:
            hook(scheduled)
        self._graphs.clear()
        try:
            result = self._execute(scheduled, **kwargs)
        finally:
            names = [name for name in self._order() if name in tokens] or [*tokens]
            self._note(
                kind,
                tuple(self._places.get(name, -1) for name in names),
                tuple(tokens[name] for name in names),
                tuple(computed[name] for name in names),
            )
        for hook in self.after:
            hook(scheduled)
        return result

    def _run_sampling(self, *args: Any, **kwargs: Any) -> Any:
        self._graphs.clear()
        result = self._sample(*args, **kwargs)
        for forward in forwards_of(self._graphs):
            target = self.steps[-1]
            self._graphs = [forward]
            self._note("draft", target.requests, (1,) * len(target.requests), target.computed)
        if self._batch is not None:
            for hook in self.after:
                hook(self._batch)
        return result

    def _run_idle(self) -> Any:
        self._graphs.clear()
        result = self._idle()
        self._note("idle", (), (), ())
        return result

    def _note(
        self, kind: str, requests: tuple[int, ...], tokens: tuple[int, ...], computed: tuple[int, ...]
    ) -> None:
        """Note a batch with the first graph that was seen."""
        key, reason = self._graphs[0] if self._graphs else (None, "the model did not run")
        self._graphs = []
        self.steps.append(
            EngineStep(
                at=self.at,
                kind=kind,
                requests=requests,
                tokens=tokens,
                computed=computed,
                graph=None if key is None else str(key),
                reason=reason,
            )
        )

    def _order(self) -> list[str]:
        """Return the names of the requests of the last batch, in the order of its rows."""
        runner = self._engine.model_runner
        if not hasattr(runner, "req_states"):  # V1
            return list(runner.input_batch.req_ids)
        state = runner.execute_model_state
        return [] if state is None else list(state.input_batch.req_ids)

    def _kind_of(self, scheduled: Any, computed: Mapping[str, int]) -> str:
        tokens, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        if all(count == 1 for count in tokens.values()):
            return "decode"
        known = self._engine.core.scheduler.requests
        prefills = [
            count - len(drafts.get(name, ())) > 1 or computed[name] + 1 < known[name].num_tokens
            for name, count in tokens.items()
        ]
        if all(prefills):
            return "prefill"
        return "mixed" if any(prefills) else "verify"


def _computed_of(scheduled: Any) -> dict[str, int]:
    """Return the tokens in the KV cache of each request of a batch, by its name."""
    cached = scheduled.scheduled_cached_reqs
    return {each.req_id: each.num_computed_tokens for each in scheduled.scheduled_new_reqs} | dict(
        zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    )
