"""`Scheduler`: chooses the requests of each step and allocates their memory.

Continuous batching with chunked prefill, first come first served:

- A prefill step computes chunks of prompts, at most ``max_prefill_chunk`` tokens of them. With ``mixed``,
  every running request decodes in it too, with one token each before the chunks, so running requests get a
  token in every step. Without ``mixed``, two prefill steps never follow each other while any request decodes,
  so a decoding request waits for at most one prefill step between its tokens. A step without prompt tokens is
  a decode batch.
- A request is admitted when the free pages hold all its known tokens and those of its next step, and enough
  pages are left for the next step of every admitted request (otherwise it would soon be preempted again).
  Requests are admitted in queue order.
- A decode reserves the KV slots of ``num_reserved`` tokens for each request: one, or as many as drafts
  need. Pages without a committed token are given back once the step is committed.
- A decode that finds no free page preempts the youngest admitted request. That request frees its memory,
  returns to the front of the queue, and is computed again from prompt and output. The oldest request is
  never preempted and always fits by itself (`Scheduler.add` checks this), so it always advances.

All admitted requests are older than all waiting requests: admission takes from the front of the queue,
and preemption returns the youngest to the front. All running requests are older than those whose prompt is
not complete: chunks are given oldest first, and a younger request gets one only if the older one ends.

Does not: run the model, choose tokens, handle text or vocabulary, or lock: one thread calls it.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

import torch

from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError, EngineError
from graphpact_engine.batches import BatchBuilder
from graphpact_engine.errors import RequestError
from graphpact_engine.logs import log_event
from graphpact_engine.pools import PagePool, RequestPool
from graphpact_engine.request import FinishReason, Request, RequestState
from graphpact_engine.request_memory import RequestMemory
from graphpact_engine.scheduled import ScheduledBatch

_log = logging.getLogger(__name__)


class Scheduler:
    """The queue of requests, and the owner of their memory from admission to finish.

    Args:
        request_pool: The pool of request rows, used by this scheduler only.
        page_pool: The pool of KV pages, used by this scheduler only.
        max_num_seqs: Maximum number of admitted requests.
        max_num_batched_tokens: Maximum number of new tokens in one batch.
        max_model_len: Maximum length of a sequence, prompt and output.
        eos_token_ids: Tokens that end every request without ``ignore_eos``.
        device: Device of the batches and of ``request_pool``.
        num_reserved: KV slots that a decode step reserves for each request.
        max_prefill_chunk: Maximum number of prompt tokens in one batch; None for ``max_num_batched_tokens``.
        mixed: Whether running requests decode in prefill steps, whose batches then all have the mode mixed.

    Attributes:
        num_added: Requests that were queued.
        num_finished: Requests that ended, by reason.
        num_prefilled: Tokens computed in prefill, those computed again after a preemption too.
        num_generated: Tokens that requests received.
        num_preemptions: Preemptions.

    Raises:
        ConfigError: A limit is below 1, ``max_num_batched_tokens`` is below ``max_num_seqs`` or
            ``max_prefill_chunk``, ``max_model_len`` exceeds the length of a request row without reserved
            slots, or ``mixed`` is asked for with more than one reserved slot.
    """

    def __init__(
        self,
        request_pool: RequestPool,
        page_pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        device: torch.device | str,
        num_reserved: int = 1,
        max_prefill_chunk: int | None = None,
        mixed: bool = False,
    ) -> None:
        if max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs must be 1 or more; got {max_num_seqs}")
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs, {max_num_seqs}, because a "
                f"decode step has one token per request; got {max_num_batched_tokens}"
            )
        chunk = max_num_batched_tokens if max_prefill_chunk is None else max_prefill_chunk
        if not 1 <= chunk <= max_num_batched_tokens:
            raise ConfigError(
                f"max_prefill_chunk must be from 1 to max_num_batched_tokens, {max_num_batched_tokens}; got"
                f" {chunk}"
            )
        if mixed and num_reserved > 1:
            raise ConfigError(
                f"a mixed step has one token per decoding request; got num_reserved {num_reserved}"
            )
        longest = request_pool.max_context_len - num_reserved + 1
        if not 2 <= max_model_len <= longest:
            raise ConfigError(
                f"max_model_len must be from 2 to the columns of the request pool, {longest}"
                f"{' without reserved ones' if num_reserved > 1 else ''}; got {max_model_len}"
            )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prefill_chunk = chunk
        self.mixed = mixed
        self.max_model_len = max_model_len
        self.num_reserved = num_reserved
        self.eos_token_ids = frozenset(eos_token_ids)
        self.num_added = 0
        self.num_finished: Counter[FinishReason] = Counter()
        self.num_prefilled = 0
        self.num_generated = 0
        self.num_preemptions = 0
        self._rows = request_pool
        self._pages = page_pool
        self._memory = RequestMemory(
            request_pool, page_pool, num_reserved=num_reserved, max_model_len=max_model_len
        )
        self._builder = BatchBuilder(
            request_pool,
            page_pool,
            torch.device(device),
            num_reserved=num_reserved,
            prefill_mode=ForwardMode.MIXED if mixed else ForwardMode.EXTEND,
        )
        self._waiting: deque[Request] = deque()  # oldest first
        self._admitted: list[Request] = []  # oldest first, all older than _waiting
        self._alive: dict[str, Request] = {}
        self._step = 0
        self._in_flight: list[ScheduledBatch] = []  # scheduled and not committed, oldest first; at most two
        self._last_was_prefill = False
        self._running: list[Request] | None = None  # replaced, not changed: `BatchBuilder` compares identity

    @property
    def has_work(self) -> bool:
        """Whether any request is alive."""
        return bool(self._alive)

    @property
    def num_running(self) -> int:
        """Number of admitted requests, which own memory; includes prefilling requests."""
        return len(self._admitted)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue, including preempted ones."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: The prompt is empty or leaves no room for a new token, the request may need more
                pages than exist, or its id is that of an alive request. Nothing was queued.
        """
        self.require_servable(request)
        prompt_len, sampling = len(request.prompt_token_ids), request.sampling
        request.end_tokens = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else self.eos_token_ids
        )
        request.max_output_tokens = min(sampling.max_new_tokens, self.max_model_len - prompt_len)
        request.arrival = self.num_added
        self.num_added += 1
        self._alive[request.request_id] = request
        self._waiting.append(request)

    def require_servable(self, request: Request) -> None:
        """Raise `RequestError` for a request that `add` refuses."""
        prompt_len = len(request.prompt_token_ids)
        name = f"request {request.request_id!r}"
        if request.request_id in self._alive:
            raise RequestError(f"{name} is already alive", hint="give each request a unique id")
        if prompt_len == 0:
            raise RequestError(f"{name} has an empty prompt", hint="give at least one token")
        if prompt_len > self.max_model_len - 1:
            raise RequestError(
                f"{name} has a prompt of {prompt_len} tokens; at most {self.max_model_len - 1} "
                f"leave room for a new one within max_model_len {self.max_model_len}",
                hint="shorten the prompt, or raise engine.max_model_len up to the limit of the model",
            )
        longest = self._memory.most_slots(request)
        needed = self._pages.pages_for(longest)
        if needed > self._pages.num_pages:
            raise RequestError(
                f"{name} may grow to {longest} tokens, {needed} KV pages of "
                f"{self._pages.page_size}; there are {self._pages.num_pages}",
                hint="lower max_new_tokens or give the KV cache more pages",
            )

    def schedule(self) -> ScheduledBatch | None:
        """Return the next step, or None if no request is alive.

        If a step is never committed because the model failed, the next call plans it again.

        Raises:
            EngineError: Requests are alive and none can advance, because other code allocated from the pools.
        """
        self._step += 1
        self._in_flight.clear()
        planned = self._plan()
        if planned is not None:
            self._in_flight.append(planned)
        elif self.has_work:
            raise EngineError(
                f"none of {len(self._alive)} requests can advance; free: "
                f"{self._pages.num_free} of {self._pages.num_pages} KV pages and "
                f"{self._rows.num_free} of {self._rows.max_requests} rows",
                hint="use a pool in one scheduler only",
            )
        return planned

    def schedule_ahead(self, tokens: torch.Tensor) -> ScheduledBatch | None:
        """Return the decode that follows the decode in flight, before that one is committed.

        It has the same requests. The commit of this step skips a request that ended with the step in flight.
        Return None, and do nothing, if the next step depends on results that are not known yet: if a request
        ends by its length, if a prompt may be computed, if a page is missing, or if a request was aborted.
        Return None also if no decode is in flight, or two.

        Args:
            tokens: ``[bs]`` int64, on the device: the tokens of the step in flight.
        """
        if len(self._in_flight) != 1 or self.num_reserved > 1:
            return None
        (running,) = self._in_flight
        requests, size = running.requests, self._pages.page_size
        if (
            running.computed is not None
            or running.requests is not self._running
            or self._is_prefilling()
            or (self._waiting and len(self._admitted) < self.max_num_seqs and self._rows.num_free)
            or any(len(one.output_token_ids) + 1 >= one.max_output_tokens for one in requests)
        ):
            return None
        growing = [
            requests[at]
            for at in self._builder.entering_pages(requests, ahead=True)
            if requests[at].num_computed + 2 > len(requests[at].pages) * size
        ]
        pages = self._pages.alloc(len(growing))
        if pages is None:
            return None
        for request, page in zip(growing, pages, strict=True):
            request.pages.append(page)
        self._step += 1
        planned = self._decode_batch(requests, tokens)
        self._in_flight.append(planned)
        return planned

    def forget(self, *, ahead_only: bool = False) -> None:
        """Drop the steps in flight, or only that which was scheduled ahead; they are planned again."""
        del self._in_flight[1 if ahead_only else 0 :]
        self._running = None

    def commit(
        self,
        scheduled: ScheduledBatch,
        token_ids: Sequence[Sequence[int]],
        is_stopped: Callable[[Request], bool] = lambda _: False,
    ) -> list[Request]:
        """Append the tokens of a step; finish the requests that end, and free their memory.

        A request that ends with one of its tokens does not get those after it.

        Args:
            scheduled: The oldest step in flight: the newest result of `schedule`, then what was scheduled
                ahead of its commit.
            token_ids: The tokens of each request of the batch; empty for a request that yields none.
            is_stopped: Whether the text of a request has a stop string; asked after each token of requests
                with stop strings.

        Returns:
            The requests that received a token, in batch order; those that ended have ``is_finished``.
            Requests that were aborted since `schedule` are skipped.

        Raises:
            EngineError: The step is not in flight or not the oldest, was already committed, or ``token_ids``
                does not match ``scheduled.samples``. Nothing was changed.
        """
        if not self._in_flight or scheduled is not self._in_flight[0]:
            raise EngineError(
                f"cannot commit step {scheduled.step}: step {self._step} is the newest, and a step is "
                f"committed once"
            )
        if [len(tokens) > 0 for tokens in token_ids] != scheduled.samples:
            raise EngineError(
                f"step {scheduled.step} yields tokens at {scheduled.sampled_indices} of "
                f"{len(scheduled.requests)} requests; got {list(token_ids)}"
            )
        del self._in_flight[0]
        self._last_was_prefill = not scheduled.batch.forward_mode.is_decode
        got: list[Request] = []
        computed = scheduled.computed
        for at, (request, tokens) in enumerate(zip(scheduled.requests, token_ids, strict=True)):
            if request.state is RequestState.FINISHED:
                continue
            if computed is None:  # the keys of its newest token and of accepted drafts
                request.num_computed += len(tokens)
            else:
                self._commit_chunk(request, computed[at], is_complete=len(tokens) > 0)
            if tokens:
                got.append(request)
                self._append(request, tokens, is_stopped)
        return got

    def abort(self, request: Request | str) -> bool:
        """End a request and free its memory; return False if it is not alive in this scheduler.

        Args:
            request: The request or its id.
        """
        alive = self._find(request)
        if alive is not None:
            self._finish(alive, "abort")
            self._tell_finished(alive)
        return alive is not None

    def is_alive(self, request: Request | str) -> bool:
        """Return whether a request, or the request of an id, is alive in this scheduler."""
        return self._find(request) is not None

    def check_invariants(self) -> None:
        """Check that every page and row has at most one owner, and that the queue is in order.

        For tests and debugging; the time is proportional to the size of the pools.

        Raises:
            EngineError: Names the first broken rule.
        """
        pages = [page for request in self._admitted for page in request.pages]
        rows = [request.row for request in self._admitted]
        admitted_states = [request.state for request in self._admitted]
        in_order = [*self._admitted, *self._waiting]
        size = self._pages.page_size
        rules = {
            "each page has one owner": len(set(pages)) == len(pages),
            "owned and free pages are all pages": set(pages) == self._pages.in_use
            and len(pages) + self._pages.num_free == self._pages.num_pages,
            "page 0 has no owner": 0 not in pages,
            "each row has one owner": len(set(rows)) == len(rows),
            "owned and free rows are all rows": set(rows) == self._rows.in_use
            and len(rows) + self._rows.num_free == self._rows.max_requests,
            "row 0 has no owner": 0 not in rows,
            "admitted requests are at most max_num_seqs": len(rows) <= self.max_num_seqs,
            "waiting requests own nothing": all(
                at.row is None and not at.pages and at.num_computed == 0 for at in self._waiting
            ),
            "computed tokens lie in owned pages": all(
                at.num_computed <= len(at.pages) * size for at in self._admitted
            ),
            "a running request has one token to compute": all(
                at.num_computed == at.num_tokens - 1 for at in self._in_state(RequestState.RUNNING)
            ),
            "running requests are older than prefilling ones": admitted_states
            == sorted(admitted_states, key=lambda state: state is RequestState.PREFILLING),
            "requests are in the order of arrival": in_order == sorted(in_order, key=lambda at: at.arrival),
            "alive requests are admitted or waiting": set(map(id, in_order))
            == set(map(id, self._alive.values())),
        }
        for rule, holds in rules.items():
            if not holds:
                raise EngineError(f"the scheduler violates the rule: {rule}")

    def _find(self, request: Request | str) -> Request | None:
        """Return an alive request, given itself or its id."""
        alive = self._alive.get(request if isinstance(request, str) else request.request_id)
        return alive if request is alive or isinstance(request, str) else None

    def _in_state(self, state: RequestState) -> list[Request]:
        """Return the admitted requests of one state, oldest first."""
        return [request for request in self._admitted if request.state is state]

    def _commit_chunk(self, request: Request, computed: int, *, is_complete: bool) -> None:
        """Set the computed tokens of a request after a prefill step; it runs once all are computed."""
        if request.state is RequestState.PREFILLING:
            self.num_prefilled += computed - request.num_computed
        request.num_computed = computed
        if is_complete and request.state is RequestState.PREFILLING:
            request.state = RequestState.RUNNING
            self._running = None

    def _append(self, request: Request, tokens: Sequence[int], is_stopped: Callable[[Request], bool]) -> None:
        """Append tokens to a running request; finish it if it ends, else give back unused pages."""
        output, sampling = request.output_token_ids, request.sampling
        for token in tokens:
            output.append(token)
            self.num_generated += 1
            if not (token in request.end_tokens or len(output) >= request.max_output_tokens or sampling.stop):
                continue
            reason = self._reason_to_finish(request, token)
            if reason is not None:
                self._finish(request, reason)
            if sampling.stop and is_stopped(request):
                reason = self._stop(request)
            if reason is not None:
                self._tell_finished(request)
                return
        if self.num_reserved > 1:
            self._memory.give_back(request)

    def _stop(self, request: Request) -> FinishReason:
        """Set the finish reason "stop", because the text has a stop string; end the request if alive."""
        if request.is_finished:  # by a limit, with the same token
            request.finish_reason = "stop"
        else:
            self._finish(request, "stop")
        return "stop"

    def _plan(self) -> ScheduledBatch | None:
        """Return the next step, or None if no request can advance."""
        decodes = self._reserve_decodes() if self.mixed or self._last_was_prefill else []
        if self.mixed or not decodes:
            chunks = self._take_chunks(self.max_num_batched_tokens - len(decodes))
            if chunks:
                return self._prefill_batch([*((request, 1) for request in decodes), *chunks])
        decodes = decodes or self._reserve_decodes()
        if not decodes:
            return None
        return self._decode_batch(decodes)

    def _take_chunks(self, num_free: int) -> list[tuple[Request, int]]:
        """Continue started prefills, oldest first, then admit requests while tokens and memory last.

        Args:
            num_free: The tokens of the step that decodes do not use.

        Returns:
            Each request with the number of its tokens to compute.
        """
        if not self._waiting and not self._is_prefilling():
            return []
        budget = min(self.max_prefill_chunk, num_free)
        chunks: list[tuple[Request, int]] = []
        prefilling = iter(self._in_state(RequestState.PREFILLING))
        while budget > 0 and (request := next(prefilling, None) or self._admit()):
            length = min(budget, request.num_tokens - request.num_computed)
            chunks.append((request, length))
            budget -= length
        return chunks

    def _reserve_decodes(self) -> list[Request]:
        """Give each running request the slots of its decode, oldest first; preempt if needed."""
        running = self._all_running()
        for at in self._builder.entering_pages(running):
            if running[at].state is RequestState.RUNNING:  # an older one may have preempted it
                self._grow(running[at])
        return self._all_running()

    def _all_running(self) -> list[Request]:
        """Return the running requests, oldest first: the same list object until they change."""
        if self._running is None:
            self._running = self._in_state(RequestState.RUNNING)
        return self._running

    def _is_prefilling(self) -> bool:
        """Return whether a request is prefilling: these are younger than all running ones."""
        return bool(self._admitted) and self._admitted[-1].state is RequestState.PREFILLING

    def _admit(self) -> Request | None:
        """Admit the head of the queue with its row and pages; return None, and do nothing, if none fits."""
        if not self._waiting or len(self._admitted) >= self.max_num_seqs:
            return None
        request = self._waiting[0]
        if not self._memory.admit(request, sum(map(self._memory.pages_to_grow, self._admitted))):
            return None
        request.state = RequestState.PREFILLING
        self._admitted.append(self._waiting.popleft())
        return request

    def _grow(self, request: Request) -> None:
        """Allocate the slots of a decode step; preempt the youngest requests first, this one last."""
        while not self._memory.grow(request):
            youngest = self._admitted[-1]
            self._preempt(youngest)
            if youngest is request:
                return

    def _preempt(self, request: Request) -> None:
        """Send the youngest admitted request back to the front of the queue."""
        self._release(request)
        request.state = RequestState.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)
        log_event(
            _log,
            logging.INFO,
            "request preempted",
            request=request.request_id,
            tokens=request.num_tokens,
            times=request.num_preemptions,
        )

    def _release(self, request: Request) -> None:
        """Free the memory of an admitted request."""
        self._running = None
        self._admitted.remove(request)
        self._memory.release(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state."""
        del self._alive[request.request_id]
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        else:
            self._release(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason

    def _tell_finished(self, request: Request) -> None:
        """Count and log a request that ended; its reason is final."""
        reason = request.finish_reason or "abort"
        self.num_finished[reason] += 1
        log_event(
            _log,
            logging.INFO,
            "request finished",
            request=request.request_id,
            reason=reason,
            prompt_tokens=len(request.prompt_token_ids),
            generated_tokens=len(request.output_token_ids),
            preemptions=request.num_preemptions,
        )

    def _reason_to_finish(self, request: Request, token: int) -> FinishReason | None:
        """Return why the request ends with its newest token, ``token``; None if it does not end."""
        if token in request.end_tokens:
            return "stop"
        return "length" if len(request.output_token_ids) >= request.max_output_tokens else None

    def _decode_batch(self, requests: list[Request], tokens: torch.Tensor | None = None) -> ScheduledBatch:
        """Build the batch whose input is the newest token of each request; see `BatchBuilder.decode`."""
        batch, cache_loc = self._builder.decode(requests, tokens)
        return ScheduledBatch(batch, requests, [True] * len(requests), self._step, cache_loc)

    def _prefill_batch(self, chunks: list[tuple[Request, int]]) -> ScheduledBatch:
        """Build the batch whose input is the next ``length`` tokens of each request."""
        requests = [request for request, _ in chunks]
        batch, computed = self._builder.prefill(requests, [length for _, length in chunks])
        samples = [end == request.num_tokens for request, end in zip(requests, computed, strict=True)]
        return ScheduledBatch(batch, requests, samples, self._step, computed=computed)
