"""Twenty faults, each planted in the real engine of a child process, and what the swarm finds of it.

Ten are in scheduler, pools and the asynchronous loop, ten between capture and replay. A plant patches classes
and modules; processes fork, so a patch ends with its child.

Guards of our engine are off where other engines have none, so that a fault shows as a user would see it:

    scheduler    the check of invariants after each pass, and pools that refuse to free a page twice
    replay       the pact, and verification against eager runs; the plants that keep one say so

Does not: run anything; `test_planted` does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import graphpact.buffers.fills
import graphpact_engine.lanes
from graphpact import ForwardBatch, GraphShape, hookimpl
from graphpact.batch import ForwardMode
from graphpact.errors import EngineError
from graphpact.lane import Lane
from graphpact.runners import GraphRunner
from graphpact_engine.pools import PagePool
from graphpact_engine.request import RequestState
from graphpact_engine.scheduler import Scheduler
from graphpact_fa3 import FA3Backend
from graphpact_flashinfer import FlashInferBackend
from planted_runs import ANSWERS, Plant, patch, plants_in

UNCHECKED: Mapping[str, Any] = {"verify.pact": "off", "verify.replay_against_eager": 0.0}
"""Settings without the checks of replays."""
PACT_ONLY: Mapping[str, Any] = {"verify.replay_against_eager": 0.0}
"""Settings with the pact, which is always on unless it is switched off."""


PLANTS: dict[str, Plant] = {}
"""The plants by name."""
plant = plants_in(PLANTS, settings=UNCHECKED)


def without_guards() -> None:
    """Switch off the scheduler's invariants, and let the pool free what it is given, as engines do."""

    @patch(Scheduler, "check_invariants")
    def _(original: Any, scheduler: Scheduler) -> None:
        pass

    @patch(PagePool, "free")
    def _(original: Any, pool: PagePool, pages: Sequence[int]) -> None:
        pool._give_back([*pages])


# -- scheduler, pools, the asynchronous loop ---------------------------------------------------------


@plant("leak", names="KV pages")
def abort_keeps_pages() -> None:
    """An aborted request does not give its pages back (vllm-ascend 16662)."""
    without_guards()

    @patch(Scheduler, "_finish")
    def _(original: Any, scheduler: Scheduler, request: Any, reason: str) -> None:
        if reason == "abort":
            request.pages = []
        original(scheduler, request, reason)


@plant(*ANSWERS)
def page_freed_twice() -> None:
    """The pages of a request that has ended are freed once more (sglang 18694, vllm 42571)."""
    without_guards()

    @patch(Scheduler, "_finish")
    def _(original: Any, scheduler: Scheduler, request: Any, reason: str) -> None:
        pages = [*request.pages]
        original(scheduler, request, reason)
        scheduler._pages.free(pages)


@plant(*ANSWERS)
def preempted_keeps_computed() -> None:
    """A preempted request keeps its count of computed tokens, whose keys are gone (vllm-gaudi 524)."""
    without_guards()

    @patch(Scheduler, "_preempt")
    def _(original: Any, scheduler: Scheduler, request: Any) -> None:
        computed = request.num_computed
        original(scheduler, request)
        request.num_computed = computed


@plant("stuck", names="not done")
def full_cache_stops() -> None:
    """Decodes that find no free page wait for one, and nobody is preempted (vllm 15996, 45388)."""
    without_guards()

    @patch(Scheduler, "_reserve_decodes")
    def _(original: Any, scheduler: Scheduler) -> Any:
        return [each for each in scheduler._all_running() if scheduler._memory.grow(each)]

    @patch(Scheduler, "schedule")
    def _(original: Any, scheduler: Scheduler) -> Any:
        try:
            return original(scheduler)
        except EngineError:  # "none of the requests can advance": a guard
            return None


@plant("end")
def token_after_end() -> None:
    """A step in flight gives one more token to a request that has ended meanwhile (sglang 6184)."""
    without_guards()

    @patch(Scheduler, "commit")
    def _(original: Any, scheduler: Scheduler, scheduled: Any, token_ids: Any, *more: Any) -> Any:
        ended = [each.is_finished for each in scheduled.requests]
        got = original(scheduler, scheduled, token_ids, *more)
        for request, tokens, has_ended in zip(scheduled.requests, token_ids, ended, strict=True):
            if has_ended:
                request.output_token_ids += tokens
        return got


@plant("end", "leak")
def aborted_waiting_stays() -> None:
    """A request that is aborted while it waits stays in the queue, and runs later (sglang 6855)."""
    without_guards()

    @patch(Scheduler, "_finish")
    def _(original: Any, scheduler: Scheduler, request: Any, reason: str) -> None:
        waits = request.state is RequestState.WAITING
        place = scheduler._waiting.index(request) if waits else 0
        scheduler._alive.setdefault(request.request_id, request)
        original(scheduler, request, reason)
        if waits:
            scheduler._waiting.insert(place, request)
            request.state = RequestState.WAITING


@plant(*ANSWERS)
def shifted_commit() -> None:
    """A commit takes the rows of requests as if those that have ended had none (vllm-ascend 13865)."""
    without_guards()

    @patch(Scheduler, "commit")
    def _(original: Any, scheduler: Scheduler, scheduled: Any, token_ids: Any, *more: Any) -> Any:
        rows = iter(token_ids)
        shifted = [
            tokens if request.is_finished else next(rows)
            for request, tokens in zip(scheduled.requests, token_ids, strict=True)
        ]
        return original(scheduler, scheduled, shifted, *more)


@plant(*ANSWERS)
def chunk_samples() -> None:
    """A chunk that does not complete its prompt yields a token, which is kept (tenstorrent/tt-xla 5830)."""
    without_guards()

    @patch(Scheduler, "_prefill_batch")
    def _(original: Any, scheduler: Scheduler, chunks: Any) -> Any:
        return replace(original(scheduler, chunks), samples=[True] * len(chunks))

    @patch(Scheduler, "_commit_chunk")
    def _(original: Any, scheduler: Scheduler, request: Any, computed: int, *, is_complete: bool) -> None:
        original(scheduler, request, computed, is_complete=computed == request.num_tokens)


@plant("raised", names="extend_seq_lens_cpu")
def prompt_of_one_chunk() -> None:
    """A prompt's last chunk has the length modulo the chunk, which is 0 for whole chunks (mlxcel 183)."""
    without_guards()

    @patch(Scheduler, "_prefill_batch")
    def _(original: Any, scheduler: Scheduler, chunks: Any) -> Any:
        planned = original(scheduler, chunks)
        for at, (request, length) in enumerate(chunks):
            is_last = request.num_computed + length == len(request.prompt_token_ids)
            if is_last and length == scheduler.max_prefill_chunk:
                planned.batch.extend_seq_lens[at] = 0
                planned.batch.extend_seq_lens_cpu[at] = 0
        return planned


@plant("end")
def mixed_ignores_stops() -> None:
    """A step with prompts and decodes does not look for stop tokens (like sglang 2158)."""
    without_guards()

    @patch(Scheduler, "commit")
    def _(original: Any, scheduler: Scheduler, scheduled: Any, token_ids: Any, *more: Any) -> Any:
        if scheduled.batch.forward_mode is not ForwardMode.MIXED:
            return original(scheduler, scheduled, token_ids, *more)
        kept = [request.end_tokens for request in scheduled.requests]
        for request in scheduled.requests:
            request.end_tokens = frozenset()
        got = original(scheduler, scheduled, token_ids, *more)
        for request, tokens in zip(scheduled.requests, kept, strict=True):
            request.end_tokens = tokens
        return got


# -- capture and replay ------------------------------------------------------------------------------


def keep_tail_of(name: str) -> None:
    """Leave the padding rows of an input as an earlier batch left them."""

    @patch(graphpact.buffers.fills, "_tail")
    def _(original: Any, slot: Any, context: Any) -> Any:
        return None if slot.name == name else original(slot, context)


@plant(*ANSWERS)
def stale_cache_loc() -> None:
    """Padding rows write the KV slots of an earlier batch, which are a live request's (vllm 21196)."""
    keep_tail_of("out_cache_loc")


@plant("raised", rule="GP02", names="'req_pool_indices'", is_strict=True)
def stale_request_rows() -> None:
    """Padding rows read the page table of requests of an earlier batch (sglang 26292).

    No token is wrong: the rows are cut off. The strict tape sees the read.
    """
    keep_tail_of("req_pool_indices")


@plant(*ANSWERS, fixed={"backend": "fa3"})
def lengths_of_prefix() -> None:
    """The graph's lengths leave out the new token (sglang, KNOWN_FAILURES.md C.3)."""

    @patch(FA3Backend, "fill_metadata")
    def _(original: Any, backend: FA3Backend, view: ForwardBatch, metadata: Any) -> None:
        original(backend, view, metadata)
        if backend.driver is not None and backend.driver.is_capturing:
            metadata.cache_seqlens.sub_(1).clamp_(min=1)


@plant(*ANSWERS)
def positions_rebound() -> None:
    """The positions of a step are a new tensor, and the graph holds that of the capture (vllm 13353)."""
    populate = GraphRunner.populate

    @hookimpl
    def without_positions(self: Any, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        positions = registry.get_slot("positions").slice_for(shape.batch_size, shape.num_tokens)
        kept = positions.clone()
        populate(self, registry, batch, shape)
        positions.copy_(kept)

    GraphRunner.populate = without_positions  # type: ignore[method-assign]


@plant(*ANSWERS, fixed={"backend": "fa3"})
def pages_of_capture() -> None:
    """A replay refreshes the columns of the page table that the lengths at capture needed (sglang 26019)."""

    @patch(FA3Backend, "fill_metadata")
    def _(original: Any, backend: FA3Backend, view: ForwardBatch, metadata: Any) -> None:
        original(backend, view, metadata)
        if backend.driver is not None and backend.driver.is_capturing:
            metadata.page_table[:, 1:].zero_()


@plant("raised", names="page_table", fixed={"backend": "fa3"})
def longest_of_capture() -> None:
    """The bound of the lengths in a graph is that of the batch at capture (vllm 9285)."""

    @patch(FA3Backend, "allocate_metadata")
    def _(original: Any, backend: FA3Backend, view: ForwardBatch, shape: GraphShape, buffers: Any) -> Any:
        metadata = original(backend, view, shape, buffers)
        if buffers.in_graph:
            metadata.max_seqlen_k = int(view.seq_lens_cpu.max())
            metadata.page_table = metadata.page_table[:, :1]
        return metadata


def on_replay(backend: type[Any], change: Callable[[Any, Any], Any]) -> None:
    """Let replays of a backend refresh metadata by its hook, and ``change`` what they return.

    Args:
        backend: The class.
        change: Gets the metadata of the capture and a copy of it as it was then, and returns the replay's.
    """
    backend.fill_is_device_only = False
    capture, refresh = backend.init_metadata_capture, backend.init_metadata_replay
    copies: dict[int, Any] = {}

    @hookimpl
    def init_metadata_capture(self: Any, view: ForwardBatch, shape: GraphShape) -> Any:
        metadata = capture(self, view=view, shape=shape)
        names = [
            name
            for name in metadata.__dataclass_fields__
            if isinstance(getattr(metadata, name), torch.Tensor)
        ]
        copies[id(metadata)] = {name: getattr(metadata, name).clone() for name in names}
        return metadata

    @hookimpl
    def init_metadata_replay(self: Any, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        fresh = refresh(self, view=view, shape=shape, captured=captured)
        return change(fresh, copies[id(captured)])

    backend.init_metadata_capture = init_metadata_capture
    backend.init_metadata_replay = init_metadata_replay


@plant(*ANSWERS, fixed={"backend": "flashinfer"})
def offsets_of_capture() -> None:
    """Replays read the offsets of the pages that the capture wrote (flashinfer 2511)."""

    def change(fresh: Any, at_capture: Mapping[str, torch.Tensor]) -> Any:
        fresh.kv_indptr.copy_(at_capture["kv_indptr"])
        return fresh

    on_replay(FlashInferBackend, change)


@plant("raised", rule="GP01", names="metadata.cache_seqlens", settings=PACT_ONLY, fixed={"backend": "fa3"})
def metadata_rebound() -> None:
    """A replay makes the lengths in new memory, which the graph does not read (rtp-llm 1259).

    The pact is on: it names the field before a token is wrong.
    """

    def change(fresh: Any, at_capture: Mapping[str, torch.Tensor]) -> Any:
        return replace(fresh, cache_seqlens=fresh.cache_seqlens.clone())

    on_replay(FA3Backend, change)


@plant(*ANSWERS)
def larger_graph_of_a_full_batch() -> None:
    """A batch of a captured size is padded for it, and replays the next larger graph (vllm-ascend 7460)."""

    @patch(Lane, "prepare")
    def _(original: Any, lane: Lane, batch: ForwardBatch) -> Any:
        prepared = original(lane, batch)
        fit = prepared.fit
        if (
            isinstance(fit, GraphShape)
            and batch.forward_mode.is_decode
            and batch.batch_size == fit.batch_size
        ):
            larger = [each for each in lane.captured if each.batch_size > fit.batch_size]
            if larger:
                prepared.fit = min(larger, key=lambda each: each.batch_size)
        return prepared


@plant(*ANSWERS, models=("experts",))
def counts_requests() -> None:
    """Layers with experts get the number of requests as that of real tokens (sglang 22404)."""

    @patch(graphpact_engine.lanes, "_counted")
    def _(original: Any, batch: ForwardBatch) -> ForwardBatch:
        counted = original(batch)
        if batch.forward_mode.is_ragged:
            counted.num_token_non_padded.fill_(batch.batch_size)
            counted.num_token_non_padded_cpu = batch.batch_size
        return counted  # type: ignore[no-any-return]
