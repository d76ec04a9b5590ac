"""`StartedEngine`: this engine under generated load, one call of `Engine.step` for each pass.

Its verification compares every replay with an eager run, and the pact and the strict tape raise; so what they
find ends the run as an error. After each pass the scheduler's own invariants are checked.

Does not: start a thread.
"""

import gc
from collections.abc import Callable, Sequence

from graphpact.engines import (
    EngineStep,
    GraphFault,
    InjectedError,
    InjectedFault,
    Landmarks,
    LoadedEngine,
    NotDoneError,
    PromptRequest,
)
from graphpact.errors import EngineError
from graphpact_engine.config import EngineConfig
from graphpact_engine.engine import Engine
from graphpact_engine.load.watching import LoadObserver
from graphpact_engine.request import Request, SamplingParams


class StartedEngine(LoadedEngine):
    """An engine of a configuration, with its shapes captured.

    Args:
        config: The configuration.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._observer = LoadObserver()
        self.engine = Engine(config, observers=[self._observer])
        self.steps: list[EngineStep] = self._observer.steps
        self._observer.steps.clear()
        memory, lanes = self.engine.memory, self.engine.lanes
        drafting = config.speculative.algorithm is not None
        shapes = {lane.runner.context.mode.value: lane.shapes for lane in lanes}
        requests = shapes.get("target_verify" if drafting else "decode", ())
        prefill = [shape for mode in ("extend", "mixed") for shape in shapes.get(mode, ())]
        self.landmarks = Landmarks(
            request_counts=tuple(sorted({shape.batch_size for shape in requests})),
            token_counts=tuple(sorted({shape.num_tokens for shape in prefill})),
            page_size=memory.pages.page_size,
            chunk=self.engine.scheduler.max_prefill_chunk,
            verify_width=self.engine.speculation.draft.num_draft_tokens if self.engine.speculation else 1,
            max_len=memory.max_model_len,
            max_requests=self.engine.scheduler.max_num_seqs,
            cache_tokens=memory.pages.num_pages * memory.pages.page_size - memory.num_reserved + 1,
        )
        gc.freeze()  # forks copy what a collection touches

    def run(
        self,
        requests: Sequence[PromptRequest],
        *,
        most_passes: int,
        on_pass: Callable[[int], None],
        faults: Sequence[InjectedFault] = (),
    ) -> None:
        """Run requests to their ends; see `LoadedEngine.run`."""
        alive: dict[int, Request] = {}
        last = max((max(each.arrives_in, each.aborted_in or 0) for each in requests), default=0)
        held: list[int] = []
        at = 0
        try:
            while at <= last or self.engine.scheduler.has_work:
                if at > most_passes:
                    raise NotDoneError(
                        f"{len(self._observer.places)} requests: not done in {most_passes} passes"
                    )
                self._observer.at = at
                on_pass(at)
                held = self._inject(at, faults, held)
                self._arrive(at, requests, alive)
                if self.engine.scheduler.has_work:
                    self._step(requests, is_full=bool(held))
                if not held:
                    self.engine.scheduler.check_invariants()
                at += 1
        finally:
            self.engine.memory.pages.free(held)
            for place, request in alive.items():
                asked = requests[place]
                asked.output_ids = list(request.output_token_ids)
                asked.finish_reason = request.finish_reason
                if asked.with_logprobs:
                    chosen = self._observer.logprobs.get(request.request_id, [])
                    asked.output_logprobs = chosen[: len(asked.output_ids)]

    def faults(self) -> list[GraphFault]:
        """Return nothing: what the pact, the strict tape and verification find is raised."""
        return []

    def leaks(self) -> list[str]:
        """Return rows and pages that are allocated, and requests that are alive."""
        scheduler, memory = self.engine.scheduler, self.engine.memory
        counts = {
            "KV pages are allocated": len(memory.pages.in_use),
            "rows of the request pool are allocated": len(memory.requests.in_use),
            "requests are running": scheduler.num_running,
            "requests are waiting": scheduler.num_waiting,
        }
        return [f"{count} {what}" for what, count in counts.items() if count]

    def _inject(self, at: int, faults: Sequence[InjectedFault], held: list[int]) -> list[int]:
        """Begin and end the faults of a pass; return the pages that are held so that the cache is full."""
        pages = self.engine.memory.pages
        for fault in faults:
            if fault.kind == "raise" and fault.at == at:
                self._observer.raises = True
            if fault.kind == "full":
                if fault.at <= at < fault.at + fault.passes:
                    held = [*held, *(pages.alloc(pages.num_free) or [])]
                elif held:
                    pages.free(held)
                    held = []
        return held

    def _arrive(self, at: int, requests: Sequence[PromptRequest], alive: dict[int, Request]) -> None:
        for place, each in enumerate(requests):
            if each.arrives_in == at:
                sampling = SamplingParams(
                    max_new_tokens=each.max_new_tokens,
                    stop_token_ids=each.stop_token_ids,
                    ignore_eos=True,
                )
                alive[place] = added = self.engine.add(list(each.token_ids), sampling)
                self._observer.places[added.request_id] = place
            if each.aborted_in == at and place in alive:
                each.num_ends += self.engine.abort(alive[place])

    def _step(self, requests: Sequence[PromptRequest], *, is_full: bool) -> None:
        """Run a step, and count the requests that it ends."""
        try:
            got = self.engine.step()
        except InjectedError:
            return  # the next step repeats it
        except EngineError as error:
            if is_full and "can advance" in error.message:
                return  # nothing fits into a cache that is full; the next step tries again
            raise
        for request in got:
            requests[self._observer.places[request.request_id]].num_ends += request.is_finished
