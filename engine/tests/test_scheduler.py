"""The scheduler against a model that reads the KV cache back, as attention does.

The fake cache holds one token id per slot. A step writes its tokens at ``out_cache_loc``, reads each
sequence through ``req_to_token``, and compares it with prompt and output: a wrong slot, row, length
or position shows at once. The next token is a hash of the sequence read.
"""

import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError, EngineError
from graphpact_engine.batches import BatchBuilder
from graphpact_engine.errors import RequestError
from graphpact_engine.pools import PagePool, RequestPool
from graphpact_engine.request import Request, RequestState, SamplingParams
from graphpact_engine.sampler import Sampler
from graphpact_engine.scheduled import ScheduledBatch
from graphpact_engine.scheduler import Scheduler

VOCAB = 50
EOS = 7


def next_token(tokens: Sequence[int]) -> int:
    """Return the fake model's answer to a sequence."""
    return zlib.crc32(repr(list(tokens)).encode()) % VOCAB


def expected(prompt: list[int], sampling: SamplingParams, max_model_len: int) -> list[int]:
    """Return the output of a request, computed without any scheduler."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        stops = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else {EOS})
        done = len(tokens) - len(prompt) >= sampling.max_new_tokens
        if tokens[-1] in stops or done or len(tokens) >= max_model_len:
            return tokens[len(prompt) :]


class Bench:
    """A scheduler, its pools, and the fake model with its cache of token ids."""

    def __init__(
        self,
        num_pages: int,
        page_size: int = 1,
        *,
        seqs: int = 8,
        admit: int | None = None,
        tokens: int = 64,
        model_len: int = 64,
        choose: Callable[[Sequence[int], Request], int] = lambda seen, _: next_token(seen),
        reserved: int = 1,
        mixed: bool = False,
        chunk: int | None = None,
    ) -> None:
        self.rows = RequestPool(seqs, model_len + reserved - 1, "cpu")
        self.pages = PagePool(num_pages, page_size)
        self.scheduler = Scheduler(
            self.rows,
            self.pages,
            max_num_seqs=admit or seqs,
            max_num_batched_tokens=tokens,
            max_model_len=model_len,
            eos_token_ids=[EOS],
            device="cpu",
            num_reserved=reserved,
            mixed=mixed,
            max_prefill_chunk=chunk,
        )
        self.cache = torch.full((self.pages.num_slots,), -1)
        self.choose = choose
        self.modes: list[ForwardMode] = []
        self.started: set[Request] = set()
        self.steps = 0

    def add(self, name: object, prompt: Iterable[int], **sampling: Any) -> Request:
        """Queue a request and return it."""
        request = Request(str(name), list(prompt), SamplingParams(**sampling))
        self.scheduler.add(request)
        return request

    def read(self, scheduled: ScheduledBatch) -> list[list[int]]:
        """Write the step's tokens to the cache; return each sequence as attention reads it."""
        batch = scheduled.batch
        assert 0 < batch.num_tokens <= self.scheduler.max_num_batched_tokens
        assert batch.batch_size == len(scheduled.requests) <= self.scheduler.max_num_seqs
        assert int(batch.out_cache_loc.min()) >= self.pages.page_size, "page 0 is scratch"
        assert int(batch.req_pool_indices.min()) >= 1, "row 0 is scratch"
        assert not self.rows.req_to_token[0].any()
        assert torch.equal(batch.seq_lens, batch.seq_lens_cpu)
        assert len(set(batch.out_cache_loc.tolist())) == batch.num_tokens
        news = torch.ones(batch.batch_size, dtype=torch.int64)
        if batch.forward_mode.is_ragged:
            assert batch.extend_seq_lens is not None
            assert batch.extend_seq_lens_cpu is not None
            assert torch.equal(batch.extend_seq_lens, batch.extend_seq_lens_cpu)
            news = batch.extend_seq_lens
        else:
            assert batch.extend_seq_lens is None
            assert all(scheduled.samples)
        assert int(news.sum()) == batch.num_tokens
        ends = batch.seq_lens.tolist()
        positions = [at for end, new in zip(ends, news.tolist(), strict=True) for at in range(end - new, end)]
        assert batch.positions.tolist() == positions
        self.cache[batch.out_cache_loc] = batch.input_ids
        table = self.rows.req_to_token[batch.req_pool_indices]
        return [self.cache[slots[:end].long()].tolist() for slots, end in zip(table, ends, strict=True)]

    def step(self) -> ScheduledBatch | None:
        """Schedule, run the fake model, commit, and check all that must hold between steps."""
        running = [(request, request.num_preemptions) for request in self.running]
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return None
        self.steps += 1
        self.modes.append(scheduled.batch.forward_mode)
        self.started = {one for one in (*self.started, *scheduled.requests) if not one.is_finished}
        self.check_turns(scheduled, [one for one, before in running if one.num_preemptions == before])
        tokens: list[list[int]] = []
        for at, (request, seen, samples) in enumerate(
            zip(scheduled.requests, self.read(scheduled), scheduled.samples, strict=True)
        ):
            known = request.prompt_token_ids + request.output_token_ids
            assert seen == known[: len(seen)], f"request {request.request_id} reads other tokens"
            assert samples == (len(seen) == len(known))
            tokens.append([self.choose(seen, request)] if samples else [])
            if scheduled.cache_loc is not None:
                tokens[-1] += self.draft(seen, tokens[-1], request, scheduled.cache_loc[at])
        got = self.scheduler.commit(scheduled, tokens)
        assert got == scheduled.sampled_requests
        self.scheduler.check_invariants()
        self.poison_free_slots()
        return scheduled

    @property
    def running(self) -> list[Request]:
        """The requests that decode, in no order."""
        return [request for request in self.started if request.state is RequestState.RUNNING]

    def check_turns(self, scheduled: ScheduledBatch, running: list[Request]) -> None:
        """Check whose tokens a step computes; ``running``: those that decode and were not preempted."""
        mode, scheduler = scheduled.batch.forward_mode, self.scheduler
        decodes = [one for one in scheduled.requests if one.state is RequestState.RUNNING]
        prompts = [one for one in scheduled.requests if one.state is RequestState.PREFILLING]
        assert scheduled.requests == sorted(scheduled.requests, key=lambda one: one.arrival)
        assert scheduled.requests == [*decodes, *prompts]
        assert mode is (ForwardMode.DECODE if not prompts else self.prefill_mode)
        if scheduler.mixed or not prompts:
            assert set(decodes) == set(running), "a running request waits"
        else:
            assert not decodes
        lengths = scheduled.batch.extend_seq_lens_cpu
        if lengths is not None:
            assert lengths[: len(decodes)].tolist() == [1] * len(decodes)
            assert 0 < int(lengths[len(decodes) :].sum()) <= scheduler.max_prefill_chunk

    @property
    def prefill_mode(self) -> ForwardMode:
        """The mode of every prefill step."""
        return ForwardMode.MIXED if self.scheduler.mixed else ForwardMode.EXTEND

    def draft(
        self, seen: list[int], tokens: list[int], request: Request, cache_loc: torch.Tensor
    ) -> list[int]:
        """Accept some drafts, whose tokens are in the reserved slots, and write nonsense into the others."""
        assert len(set(cache_loc.tolist())) == self.scheduler.num_reserved
        assert {slot // self.pages.page_size for slot in cache_loc.tolist()} <= set(request.pages)
        columns = range(len(seen) - 1, len(seen) - 1 + len(cache_loc))
        assert self.rows.req_to_token[request.row, columns].tolist() == cache_loc.tolist()
        accepted = []
        for _ in range(zlib.crc32(repr(seen).encode()) % len(cache_loc)):
            accepted.append(self.choose([*seen, *tokens, *accepted], request))
        self.cache[cache_loc[1:]] = 99
        written = [*tokens, *accepted][: len(accepted)]  # the newest token has no key yet
        self.cache[cache_loc[1 : 1 + len(accepted)]] = torch.tensor(written, dtype=torch.int64)
        return accepted

    def poison_free_slots(self) -> None:
        """Poison every slot without an owner, so that a read of one is detected."""
        owned = torch.zeros(self.pages.num_pages + 1, dtype=torch.bool)
        owned[list(self.pages.in_use)] = True
        self.cache.view(-1, self.pages.page_size)[~owned] = -1

    def drain(self) -> None:
        """Step until no request is alive; then all memory must be back."""
        while self.step():
            assert self.steps < 200_000, "no progress"
        assert not self.scheduler.has_work
        assert self.pages.num_free == self.pages.num_pages
        assert self.rows.num_free == self.rows.max_requests


def workload(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts and limits of random lengths, none longer than 40 tokens in all."""
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 25))],
            SamplingParams(
                max_new_tokens=rng.randint(1, 15),
                ignore_eos=rng.random() < 0.7,
                stop_token_ids=frozenset({3}) if rng.random() < 0.3 else frozenset(),
            ),
        )
        for _ in range(count)
    ]


def serve(bench: Bench, work: list[tuple[list[int], SamplingParams]]) -> list[Request]:
    """Add a request every other step while the first are under way; run all to their end."""
    requests = [Request(str(at), prompt, limits) for at, (prompt, limits) in enumerate(work)]
    for at, request in enumerate(requests):
        bench.scheduler.add(request)
        if at % 2:
            bench.step()
    bench.drain()
    return requests


@pytest.mark.parametrize(
    ("page_size", "num_pages", "mixed", "chunk"),
    [
        pytest.param(1, 48, False, None, marks=pytest.mark.sweep),
        (16, 4, True, None),
        pytest.param(4, 13, True, 5, marks=pytest.mark.sweep),
    ],
)
def test_a_thousand_requests_in_a_pool_too_small(
    page_size: int, num_pages: int, chunk: int | None, *, mixed: bool
) -> None:
    """1,000 preempted requests get the tokens of a run without preemption, and no memory leaks."""
    work = workload(1000, seed=page_size)
    tight = Bench(num_pages, page_size, tokens=16, model_len=40, mixed=mixed, chunk=chunk)
    pressed = serve(tight, work)
    roomy = Bench(40 * 8, page_size, tokens=320, model_len=40)
    free = serve(roomy, work)
    assert roomy.scheduler.num_preemptions == 0
    assert tight.scheduler.num_preemptions > 20
    assert sum(one.num_preemptions for one in pressed) == tight.scheduler.num_preemptions
    assert set(tight.modes) == {tight.prefill_mode, ForwardMode.DECODE}
    for one, other in zip(pressed, free, strict=True):
        assert one.output_token_ids == other.output_token_ids
        assert one.finish_reason == other.finish_reason
        assert one.output_token_ids == expected(one.prompt_token_ids, one.sampling, 40)


@pytest.mark.parametrize("mixed", [False, True])
def test_preemption_keeps_the_drawn_tokens(*, mixed: bool) -> None:
    """Requests that sample draw the same tokens with and without preemption in between."""

    def draw(seen: Sequence[int], request: Request) -> int:
        source = torch.Generator().manual_seed(zlib.crc32(repr(list(seen)).encode()))
        return Sampler().sample(torch.randn(1, VOCAB, generator=source), [request])[0]

    outputs = []
    for num_pages in (20, 500):
        bench = Bench(num_pages, choose=draw, tokens=8, model_len=20, mixed=mixed)
        requests = [
            bench.add(at, range(1, 5), temperature=1.5, top_p=0.9, seed=at, max_new_tokens=12)
            for at in range(30)
        ]
        bench.drain()
        outputs.append([request.output_token_ids for request in requests])
        assert (bench.scheduler.num_preemptions > 5) == (num_pages == 20)
    assert outputs[0] == outputs[1]
    assert len(set(map(tuple, outputs[0]))) == 30


def test_a_long_prompt_is_computed_in_chunks() -> None:
    """A prompt of 50 tokens at 16 a step takes four extends; only the last one yields a token."""
    bench = Bench(64, tokens=16, seqs=4)
    request = bench.add("long", range(50), max_new_tokens=2, ignore_eos=True)
    steps = [bench.step() for _ in range(4)]
    assert [step.batch.num_tokens for step in steps if step] == [16, 16, 16, 2]
    assert [step.samples for step in steps if step] == [[False], [False], [False], [True]]
    assert request.state is RequestState.RUNNING
    assert request.num_computed == 50
    bench.drain()
    assert request.output_token_ids == expected(list(range(50)), request.sampling, 64)


def test_an_extend_is_followed_by_a_decode() -> None:
    """A decoding request never waits for two extends in a row, whatever prompts arrive."""
    bench = Bench(200, tokens=8, model_len=64)
    first = bench.add("first", [1], max_new_tokens=40, ignore_eos=True)
    bench.step()
    bench.add("long", range(50))
    for at in range(20):
        bench.add(at, range(1, 9))
        bench.step()
    pairs = list(zip(bench.modes[1:20], bench.modes[2:21], strict=True))
    assert (ForwardMode.EXTEND, ForwardMode.EXTEND) not in pairs
    assert bench.modes.count(ForwardMode.EXTEND) >= 10
    assert len(first.output_token_ids) >= 10


def test_running_requests_decode_in_every_mixed_step() -> None:
    """During the chunks of a long prompt, running requests get a token in each step, before the chunk."""
    bench = Bench(200, tokens=10, chunk=4, mixed=True)
    for at in range(2):
        bench.add(at, [at], max_new_tokens=20, ignore_eos=True)
    bench.step()
    bench.add("long", range(10), max_new_tokens=2, ignore_eos=True)
    steps = [bench.step() for _ in range(4)]
    lengths = [step.batch.extend_seq_lens_cpu for step in steps[:3] if step]
    assert [one.tolist() for one in lengths if one is not None] == [[1, 1, 4], [1, 1, 4], [1, 1, 2]]
    samples = [step.samples for step in steps if step]
    assert samples == [[True, True, False], [True, True, False], [True] * 3, [True] * 3]
    assert bench.modes == [ForwardMode.MIXED] * 4 + [ForwardMode.DECODE]
    bench.drain()


@pytest.mark.parametrize(("chunk", "tokens", "first"), [(3, 16, 3), (None, 6, 4), (16, 16, 14)])
def test_decodes_count_in_the_step_and_not_in_the_chunk(chunk: int | None, tokens: int, first: int) -> None:
    """A chunk has max_prefill_chunk tokens beside any number of decodes, if the step has room for both."""
    bench = Bench(200, tokens=tokens, seqs=4, chunk=chunk, mixed=True)
    for at in range(2):
        bench.add(at, [at], max_new_tokens=20, ignore_eos=True)
    bench.step()
    bench.add("long", range(40), max_new_tokens=1)
    step = bench.step()
    assert step is not None
    assert step.batch.extend_seq_lens_cpu is not None
    assert step.batch.extend_seq_lens_cpu.tolist() == [1, 1, first]
    bench.drain()


def test_prompts_share_an_extend() -> None:
    """Short prompts are computed in one batch, oldest first, up to the token limit."""
    bench = Bench(100, tokens=16)
    for at in range(6):
        bench.add(at, range(1, 6))
    step = bench.step()
    assert step is not None
    assert [request.request_id for request in step.requests] == ["0", "1", "2", "3"]
    assert step.samples == [True, True, True, False]
    assert step.sampled_indices == [0, 1, 2]
    assert step.batch.extend_seq_lens_cpu is not None
    assert step.batch.extend_seq_lens_cpu.tolist() == [5, 5, 5, 1]
    bench.drain()


def test_requests_are_admitted_in_queue_order() -> None:
    """A small request waits while the large request before it does not fit."""
    bench = Bench(30, model_len=30)
    bench.add("old", range(10), max_new_tokens=5, ignore_eos=True)
    bench.step()
    bench.add("large", range(20), max_new_tokens=3)
    bench.add("small", [1], max_new_tokens=1)
    starts: list[str] = []
    while step := bench.step():
        starts += [one.request_id for one in step.requests if one.request_id not in starts]
    assert starts == ["old", "large", "small"]


@pytest.mark.parametrize(
    ("page_size", "num_pages", "old_tokens", "young_prompt", "young_state"),
    [
        (1, 12, 7, 5, "running"),  # 7 pages free: 5, one more token, one page for the old request
        (1, 12, 7, 6, "waiting"),
        (1, 12, 7, 7, "waiting"),
        (4, 4, 8, 7, "running"),  # the old request has both pages that it can need
        (4, 4, 9, 7, "waiting"),
    ],
)
def test_admission_leaves_room_to_grow(
    page_size: int, num_pages: int, old_tokens: int, young_prompt: int, young_state: str
) -> None:
    """A request waits until its tokens, one more, and the next page of each other one fit."""
    bench = Bench(num_pages, page_size, model_len=12)
    bench.add("old", range(4), max_new_tokens=old_tokens - 4, ignore_eos=True)
    bench.step()
    bench.step()  # the old request decodes: 5 of its tokens are computed
    young = bench.add("young", range(young_prompt), max_new_tokens=2, ignore_eos=True)
    bench.step()
    assert young.state.value == young_state
    bench.drain()
    assert bench.scheduler.num_preemptions == 0


def test_max_num_seqs_binds_before_the_rows_do() -> None:
    """No more than max_num_seqs requests own memory at once, though rows and pages are free."""
    bench = Bench(64, seqs=4, admit=2)
    for at in range(5):
        bench.add(at, [at], max_new_tokens=4)
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 3)
    bench.drain()


def test_the_youngest_is_preempted_and_returns_in_the_order_of_arrival() -> None:
    """With three growing requests, the oldest is never preempted, and they finish in order."""
    bench = Bench(16, model_len=16)
    requests = [
        bench.add(at, [at], max_new_tokens=15, ignore_eos=True, stop_token_ids=frozenset()) for at in range(3)
    ]
    finished: list[str] = []
    while step := bench.step():
        finished += [one.request_id for one in step.requests if one.is_finished]
    assert requests[0].num_preemptions == 0
    assert requests[1].num_preemptions <= requests[2].num_preemptions
    assert requests[2].num_preemptions >= 1
    assert finished == ["0", "1", "2"]


def test_a_partly_prefilled_request_can_be_preempted() -> None:
    """A decode preempts a younger request in the middle of its prompt, which then starts again."""
    bench = Bench(44, tokens=4, seqs=3, model_len=44)
    old = bench.add("old", [1], max_new_tokens=43, ignore_eos=True)
    bench.step()
    young = bench.add("young", range(40), max_new_tokens=1)
    preempted_in = set()
    while bench.scheduler.has_work:
        before = (young.state, young.num_preemptions)
        bench.step()
        if young.num_preemptions > before[1]:
            preempted_in.add(before[0])
    assert preempted_in == {RequestState.PREFILLING}
    assert old.num_preemptions == 0
    assert young.output_token_ids == expected(list(range(40)), young.sampling, 44)


def test_a_request_that_just_fits_runs_alone() -> None:
    """A request that needs every page of the pool is taken, and finishes without preemption."""
    bench = Bench(5, 4, tokens=7, seqs=2, model_len=20)
    request = bench.add("all", range(17), max_new_tokens=3, ignore_eos=True)
    bench.drain()
    assert len(request.output_token_ids) == 3
    assert request.num_preemptions == 0


@pytest.mark.parametrize(
    ("prompt", "sampling", "model_len", "length", "reason"),
    [
        ([1, 2], {"max_new_tokens": 4, "ignore_eos": True}, 64, 4, "length"),
        ([1, 2], {"max_new_tokens": 50, "ignore_eos": True}, 9, 7, "length"),
        ([1, 2], {"max_new_tokens": 1}, 64, 1, "length"),
        ([5] * 8, {"ignore_eos": True}, 9, 1, "length"),
    ],
)
def test_lengths_end_a_request(
    prompt: list[int], sampling: dict[str, Any], model_len: int, length: int, reason: str
) -> None:
    """A request ends at max_new_tokens or at max_model_len, whichever comes first."""
    bench = Bench(64, model_len=model_len, choose=lambda *_: 11)
    request = bench.add("r", prompt, **sampling)
    bench.drain()
    assert request.output_token_ids == [11] * length
    assert request.finish_reason == reason


@pytest.mark.parametrize(
    ("sampling", "length", "reason"),
    [
        ({}, 3, "stop"),
        ({"ignore_eos": True}, 9, "length"),
        ({"ignore_eos": True, "stop_token_ids": frozenset({EOS})}, 3, "stop"),
        ({"stop_token_ids": frozenset({1})}, 1, "stop"),
        ({"max_new_tokens": 3}, 3, "stop"),
    ],
)
def test_end_and_stop_tokens_end_a_request(sampling: dict[str, Any], length: int, reason: str) -> None:
    """The end token stops a request unless ignored, a stop token always; both are kept."""
    answers = [1, 2, EOS, 3, 4, 5, 6, 8, 9]
    bench = Bench(64, choose=lambda _, request: answers[len(request.output_token_ids)])
    request = bench.add("r", [1], **{"max_new_tokens": 9, **sampling})
    bench.drain()
    assert request.output_token_ids == answers[:length]
    assert request.finish_reason == reason


@pytest.mark.parametrize(
    ("prompt", "max_new", "words"),
    [
        ([], 1, ["empty prompt"]),
        (range(20), 1, ["20 tokens", "at most 19"]),
        (range(9), 4, ["13 tokens", "4 KV pages", "there are 3"]),
        (range(9), 99, ["20 tokens", "5 KV pages", "there are 3"]),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(
    prompt: Iterable[int], max_new: int, words: list[str]
) -> None:
    """`add` refuses prompts that are empty, too long or too large for the pool, and queues none of them."""
    bench = Bench(3, 4, model_len=20)
    with pytest.raises(RequestError) as raised:
        bench.add("r", prompt, max_new_tokens=max_new)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert not bench.scheduler.has_work
    assert bench.scheduler.schedule() is None


def test_an_id_is_unique_among_alive_requests() -> None:
    """The id of a request alive is refused; once it has ended, the id can be used again."""
    bench = Bench(64)
    bench.add("a", [1], max_new_tokens=1)
    with pytest.raises(RequestError, match="'a' is already alive"):
        bench.add("a", [2])
    bench.drain()
    bench.add("a", [2], max_new_tokens=1)
    bench.drain()


def test_abort_frees_a_request_in_any_state() -> None:
    """A waiting, a half prefilled, a running and an in-flight request give all memory back."""
    bench = Bench(40, tokens=8, seqs=3, model_len=40)
    running = bench.add("running", [1], max_new_tokens=30, ignore_eos=True)
    bench.step()
    half = bench.add("half", range(20))
    waiting = bench.add("waiting", range(30))
    bench.step()
    bench.step()
    states = [one.state.value for one in (running, half, waiting)]
    assert states == ["running", "prefilling", "waiting"]
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 1)
    assert bench.scheduler.abort("half")
    assert bench.scheduler.abort("waiting")
    bench.scheduler.check_invariants()
    scheduled = bench.scheduler.schedule()
    assert scheduled is not None
    assert bench.scheduler.abort("running")
    assert bench.scheduler.commit(scheduled, [[1]]) == []
    assert not bench.scheduler.abort("running")
    assert {one.finish_reason for one in (running, half, waiting)} == {"abort"}
    bench.drain()


def test_a_step_is_committed_once_and_only_the_newest() -> None:
    """Committing twice, an older step, or tokens in the wrong places is refused, nothing done."""
    bench = Bench(64, tokens=8)
    request = bench.add("a", range(12), ignore_eos=True)
    first = bench.scheduler.schedule()
    assert first is not None
    for wrong in ([[3]], [], [[], []]):
        with pytest.raises(EngineError, match="yields tokens at"):
            bench.scheduler.commit(first, wrong)
    assert bench.scheduler.commit(first, [[]]) == []
    with pytest.raises(EngineError, match="committed once"):
        bench.scheduler.commit(first, [[]])
    lost = bench.scheduler.schedule()
    again = bench.scheduler.schedule()
    assert lost is not None
    assert again is not None
    with pytest.raises(EngineError, match="newest"):
        bench.scheduler.commit(lost, [[3]])
    assert torch.equal(lost.batch.out_cache_loc, again.batch.out_cache_loc)
    assert bench.scheduler.commit(again, [[3]]) == [request]
    assert request.output_token_ids == [3]


def same_work(one: ScheduledBatch, other: ScheduledBatch) -> bool:
    """Return whether two steps compute the same tokens of the same requests in the same slots."""
    names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "extend_seq_lens")
    fields = [(getattr(one.batch, name), getattr(other.batch, name)) for name in names]
    return (
        one.batch.forward_mode is other.batch.forward_mode
        and one.requests == other.requests
        and one.samples == other.samples
        and all(a is b is None or torch.equal(a, b) for a, b in fields)
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_a_lost_prefill_is_planned_again_while_others_decode(*, mixed: bool) -> None:
    """A failed prefill step is repeated exactly, although requests are decoding."""
    bench = Bench(64, tokens=8, mixed=mixed)
    bench.add("running", [1], ignore_eos=True)
    bench.step()
    bench.add("long", range(20))
    if not mixed:
        bench.step()  # the decode that follows the first prefill
    lost = bench.scheduler.schedule()
    again = bench.step()
    assert lost is not None
    assert again is not None
    assert lost.batch.forward_mode is bench.prefill_mode
    assert same_work(lost, again)
    bench.drain()


def test_memory_taken_by_other_code_is_an_error() -> None:
    """If other code empties the pool, schedule raises instead of returning no step."""
    bench = Bench(8, model_len=8)
    bench.add("a", range(4), ignore_eos=True)
    bench.step()
    assert bench.pages.alloc(4) is not None
    with pytest.raises(EngineError, match="none of 1 requests can advance"):
        bench.step()
    with pytest.raises(EngineError, match="owned and free pages are all pages"):
        bench.scheduler.check_invariants()


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens"),
        ({"max_model_len": 65}, "max_model_len"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_prefill_chunk": 0}, "max_prefill_chunk"),
        ({"max_prefill_chunk": 5}, "max_prefill_chunk"),
        ({"mixed": True, "num_reserved": 2, "max_model_len": 63}, "mixed"),
    ],
)
def test_contradicting_limits_are_refused(limits: dict[str, int], word: str) -> None:
    """Limits out of range, or that the pools or each other cannot hold, raise ConfigError."""
    valid = {"max_num_seqs": 4, "max_num_batched_tokens": 4, "max_model_len": 64}
    with pytest.raises(ConfigError, match=word):
        Scheduler(
            RequestPool(4, 64, "cpu"),
            PagePool(8, 8),
            **{**valid, **limits},
            eos_token_ids=[],
            device="cpu",
        )


def test_host_and_device_tensors_do_not_share_memory() -> None:
    """Writing a batch's seq_lens does not change seq_lens_cpu, on a CPU too."""
    bench = Bench(64)
    bench.add("a", range(5))
    for _ in range(2):
        scheduled = bench.scheduler.schedule()
        assert scheduled is not None
        scheduled.batch.seq_lens.fill_(99)
        assert 99 not in scheduled.batch.seq_lens_cpu
        bench.scheduler.commit(scheduled, [[1]])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_decode_of_the_same_requests_makes_nothing_again(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the same requests decode, each step increments the last one; a change rebuilds all numbers."""
    filled: list[int] = []
    fill = BatchBuilder._fill

    def count(builder: BatchBuilder, decodes: Any, requests: Sequence[Request], *, ahead: bool) -> None:
        filled.append(len(requests))
        fill(builder, decodes, requests, ahead=ahead)

    monkeypatch.setattr(BatchBuilder, "_fill", count)
    bench = Bench(256, page_size, choose=lambda seen, _: len(seen) % 5 + 10)
    for at, (name, length) in enumerate((("a", 40), ("b", 20), ("c", 30))):
        bench.add(name, range(1, 2 + 3 * at), ignore_eos=True, max_new_tokens=length)
    bench.step()
    for _ in range(19):
        bench.step()
    assert filled == [3]  # and in none of the later steps, in whatever pages they were
    bench.add("d", [1, 2], ignore_eos=True, max_new_tokens=2)  # a prefill, a decode, and a decode without "b"
    bench.drain()
    assert filled == [3, 3, 2, 1]


def test_a_decode_that_was_lost_is_planned_again() -> None:
    """A failed decode step is repeated with the same numbers, after incremental steps."""
    bench = Bench(64, 4, choose=lambda seen, _: len(seen) % 5 + 10)
    bench.add("a", range(1, 4), ignore_eos=True)
    bench.add("b", range(1, 8), ignore_eos=True)
    for _ in range(5):
        bench.step()
    lost = bench.scheduler.schedule()
    assert lost is not None
    kept = {name: tensor.clone() for name, tensor in lost.batch.tensors().items()}
    again = bench.scheduler.schedule()
    assert again is not None
    assert again.batch.tensors().keys() == kept.keys()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in again.batch.tensors().items())
    bench.step()  # lost again, and then right
    bench.drain()


def test_steps_may_be_scheduled_in_and_out_of_inference_mode() -> None:
    """A decode scheduled in inference mode can be incremented outside of it, and the other way round."""
    bench = Bench(64, 4)
    bench.add("a", range(1, 4), ignore_eos=True)
    for step in range(12):
        with torch.inference_mode(mode=step % 3 > 0):
            bench.step()
    bench.drain()


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps, lost steps and aborts, in pools of any small size."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        spare=st.integers(0, 12),
        seqs=st.integers(1, 5),
        tokens=st.integers(0, 12),
        turns=st.sampled_from([(True, 1), (True, 1), (True, 1), *((False, n) for n in (1, 2, 5, 17))]),
        chunk=st.none() | st.integers(1, 12),
    )
    def build(
        self, page_size: int, spare: int, seqs: int, tokens: int, turns: tuple[bool, int], chunk: int | None
    ) -> None:
        """Build a pool that holds one request of full length, and ``spare`` more pages."""
        mixed, reserved = turns  # drafts are never mixed
        num_pages = -(-(23 + reserved) // page_size) + spare
        options = {"seqs": seqs, "tokens": seqs + tokens, "model_len": 24, "reserved": reserved}
        chunk = chunk and min(chunk, seqs + tokens)
        self.bench = Bench(num_pages, page_size, **options, mixed=mixed, chunk=chunk)
        self.requests: list[Request] = []

    @rule(prompt=st.lists(st.integers(0, 49), min_size=1, max_size=23), new=st.integers(1, 30))
    def add(self, prompt: list[int], new: int) -> None:
        """Queue a request."""
        name = len(self.requests)
        self.requests.append(self.bench.add(name, prompt, max_new_tokens=new, ignore_eos=True))

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        """Run ``count`` steps."""
        for _ in range(count):
            self.bench.step()

    @rule(then_step=st.booleans())
    def lose_a_step(self, *, then_step: bool) -> None:
        """Plan a step that is never committed, as if the model failed; the next plan is the same."""
        lost = self.bench.scheduler.schedule()
        again = self.bench.step() if then_step else self.bench.scheduler.schedule()
        assert (lost is None) is (again is None)
        assert lost is None or again is None or same_work(lost, again)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort a request; `abort` returns False if it has ended already."""
        if self.requests:
            request = data.draw(st.sampled_from(self.requests))
            alive = not request.is_finished
            assert self.bench.scheduler.abort(request.request_id) == alive

    @invariant()
    def owners(self) -> None:
        """Every page and row has one owner at most, none is lost, and scratch has no owner."""
        if hasattr(self, "bench"):
            self.bench.scheduler.check_invariants()

    def teardown(self) -> None:
        """Finish all requests; each has the tokens of the model itself, or their start if aborted."""
        if not hasattr(self, "bench"):
            return
        self.bench.drain()
        for request in self.requests:
            answer = expected(request.prompt_token_ids, request.sampling, 24)
            if request.finish_reason == "abort":
                answer = answer[: len(request.output_token_ids)]
            assert request.output_token_ids == answer


SchedulerMachine.TestCase.settings = settings(
    derandomize=True,
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerMachine = SchedulerMachine.TestCase
