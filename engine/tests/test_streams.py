"""Many consumers of one engine: each gets its own tokens, in order, and all memory comes back."""

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from graphpact.batch import ForwardBatch
from graphpact.errors import EngineError, UsageError
from graphpact_engine import DeltaStream, Engine, Request, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import RequestError

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
PROMPTS = ("Return a ", "The ", "If ", "x", "Raise an error if the ")


def build(*overrides: str) -> Engine:
    """Return an engine with few seats and pages, so that requests wait and are preempted."""
    return Engine(
        EngineConfig.load(
            None,
            env={},
            overrides=[
                f'model.path="{TINY}"',
                'engine.device="cpu"',
                "engine.max_num_seqs=3",
                "engine.max_num_batched_tokens=24",
                "engine.max_model_len=64",
                "engine.num_pages=8",
                "engine.page_size=8",
                *overrides,
            ],
        )
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    """Yield an engine that the tests of this module share; each leaves it idle."""
    with build() as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """Yield the shared engine, and check that the test gave all memory back."""
    yield shared
    gc.collect()
    assert is_idle(shared)
    shared.scheduler.check_invariants()


def is_idle(engine: Engine) -> bool:
    """Return whether no request is alive and every page and row is free."""
    memory = engine.memory
    return (
        not engine.scheduler.has_work
        and memory.pages.num_free == memory.pages.num_pages
        and memory.requests.num_free == memory.requests.max_requests
    )


_ALONE: dict[tuple[str, int], list[int]] = {}


def alone(engine: Engine, prompt: str, count: int) -> list[int]:
    """Return the greedy tokens of a prompt in an engine that serves nothing else."""
    key = (prompt, count)
    if key not in _ALONE:
        assert is_idle(engine)
        _ALONE[key] = engine.generate([prompt], tokens(count))[0].token_ids
    return _ALONE[key]


def tokens(count: int) -> SamplingParams:
    """Return greedy parameters of a length."""
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


# -- the cases that were reported ------------------------------------------------------------------


def test_two_streams_each_get_their_tokens(engine: Engine) -> None:
    """A stream that is read after another has ended has all its tokens."""
    expected = [alone(engine, prompt, 6) for prompt in ("The ", "If ")]
    streams = [engine.stream([prompt], tokens(6)) for prompt in ("The ", "If ")]
    assert [[delta.token_id for delta in stream] for stream in streams] == expected


def test_generate_inside_a_stream_takes_nothing_from_it(engine: Engine) -> None:
    """A stream whose loop generates another text with the same engine has all its tokens."""
    outer, inner = alone(engine, "The ", 6), alone(engine, "If ", 4)
    got = []
    for delta in engine.stream(["The "], tokens(6)):
        got.append(delta.token_id)
        assert engine.generate(["If "], tokens(4))[0].token_ids == inner
    assert got == outer


# -- the class -------------------------------------------------------------------------------------


class Consumers(RuleBasedStateMachine):
    """Streams, nested calls, requests stepped by hand and aborts, in any order, on one engine."""

    engine: Engine
    alone: Callable[[str, int], list[int]]

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[tuple[DeltaStream, list[tuple[str, int]], list[list[Any]]]] = []
        self.by_hand: list[tuple[Request, str, int]] = []

    prompts = st.lists(st.tuples(st.sampled_from(PROMPTS), st.integers(1, 20)), min_size=0, max_size=3)
    which = st.integers(0, 9)

    @rule(prompts=prompts)
    def open_stream(self, prompts: list[tuple[str, int]]) -> None:
        """Open a stream; it may never be read."""
        stream = self.engine.stream([p for p, _ in prompts], [tokens(n) for _, n in prompts])
        self.streams.append((stream, prompts, [[] for _ in prompts]))

    @rule(which=which, count=st.integers(1, 8))
    def pull(self, which: int, count: int) -> None:
        """Read a few tokens of any stream."""
        if not self.streams:
            return
        stream, _, got = self.streams[which % len(self.streams)]
        for _ in range(count):
            if (delta := next(stream, None)) is not None:
                got[delta.index].append(delta)

    @rule(which=which)
    def exhaust(self, which: int) -> None:
        """Read any stream to its end: each prompt has its tokens, and the reason with the last."""
        if not self.streams:
            return
        stream, prompts, got = self.streams.pop(which % len(self.streams))
        for delta in stream:
            got[delta.index].append(delta)
        for (prompt, count), deltas, request in zip(prompts, got, stream.requests, strict=True):
            if request.finish_reason != "abort":
                assert [d.token_id for d in deltas] == self.alone(prompt, count)
                assert [d.finish_reason for d in deltas] == [None] * (count - 1) + ["length"]
                text = "".join(d.text for d in deltas)
                assert text == bytes(t for t in request.output_token_ids if t < 256).decode()

    @rule(which=which, how=st.sampled_from(["close", "drop", "with"]))
    def abandon(self, which: int, how: str) -> None:
        """Abandon any stream: its requests end with it."""
        if not self.streams:
            return
        stream, _, _ = self.streams.pop(which % len(self.streams))
        requests = stream.requests
        if how == "close":
            stream.close()
            assert next(stream, None) is None
        elif how == "with":
            with suppress(ZeroDivisionError), stream:
                raise ZeroDivisionError
        del stream
        assert all(request.is_finished for request in requests)

    @rule(which=which)
    def abort_one(self, which: int) -> None:
        """Abort one request of any stream; the others go on."""
        if not self.streams or not self.streams[which % len(self.streams)][1]:
            return
        stream, prompts, _ = self.streams[which % len(self.streams)]
        request = stream.requests[which % len(prompts)]
        was_alive = not request.is_finished
        assert self.engine.abort(request) == was_alive
        assert not self.engine.abort(request.request_id)

    @rule(prompt=st.sampled_from(PROMPTS), count=st.integers(1, 12))
    def nest(self, prompt: str, count: int) -> None:
        """Generate a text while all others wait."""
        (done,) = self.engine.generate([prompt], tokens(count))
        assert done.token_ids == self.alone(prompt, count)

    @rule(prompt=st.sampled_from(PROMPTS), count=st.integers(1, 12))
    def add(self, prompt: str, count: int) -> None:
        """Queue a request by hand."""
        self.by_hand.append((self.engine.add(prompt, tokens(count)), prompt, count))

    @rule()
    def step(self) -> None:
        """Run a step by hand, for all alive requests."""
        self.engine.step()

    @invariant()
    def each_has_a_prefix_of_its_own_tokens(self) -> None:
        """The tokens that each stream or request got so far are the beginning of its expected tokens."""
        for stream, prompts, got in self.streams:
            for (prompt, count), deltas in zip(prompts, got, strict=True):
                given_so_far = [delta.token_id for delta in deltas]
                assert given_so_far == self.alone(prompt, count)[: len(given_so_far)]
            assert len(stream.requests) == len(prompts)
        for request, prompt, count in self.by_hand:
            so_far = request.output_token_ids
            assert so_far == self.alone(prompt, count)[: len(so_far)]
        self.engine.scheduler.check_invariants()

    def teardown(self) -> None:
        """Read half of the streams to their ends; drop the rest."""
        while len(self.streams) > 1:
            self.exhaust(0)
        self.streams.clear()
        while any(not request.is_finished for request, _, _ in self.by_hand):
            self.engine.step()
        for request, prompt, count in self.by_hand:
            assert request.output_token_ids == self.alone(prompt, count)
        assert is_idle(self.engine)


def test_consumers_in_any_order_see_their_own_tokens(engine: Engine) -> None:
    """Whatever code runs the steps, each request gets the tokens of its prompt, and no page is kept."""
    known = {(prompt, count): alone(engine, prompt, count) for prompt in PROMPTS for count in [20]}

    class Bound(Consumers):
        pass

    Bound.engine = engine
    Bound.alone = staticmethod(lambda prompt, count: known[prompt, 20][:count])
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Bound,
        settings=settings(derandomize=True, deadline=None, max_examples=25, stateful_step_count=25),
    )
    assert engine.scheduler.num_preemptions > 0


# -- unplanned ends --------------------------------------------------------------------------------


def test_a_stream_in_a_cycle_gives_its_memory_back(engine: Engine) -> None:
    """A stream that only garbage collection finds, in the middle of a step too, leaves nothing behind."""

    class Holder:
        stream: DeltaStream
        itself: "Holder"

    def drop_one() -> None:
        holder = Holder()
        holder.stream, holder.itself = engine.stream(["The "], tokens(30)), holder
        next(holder.stream)

    scheduler = engine.scheduler
    grow = scheduler._grow

    def collect_and_grow(request: Request) -> None:
        gc.collect()
        grow(request)

    expected = alone(engine, "If ", 6)
    drop_one()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_grow", collect_and_grow)
        assert engine.generate(["If "], tokens(6))[0].token_ids == expected
    assert is_idle(engine)


def test_a_failed_step_ends_the_stream_that_ran_it_and_no_other(engine: Engine) -> None:
    """The error of a step reaches the stream that ran it, whose requests end; others lose no token."""
    expected = alone(engine, "The ", 8)
    mine, other = engine.stream(["The "], tokens(8)), engine.stream(["If "], tokens(8))
    got = [next(mine).token_id, next(mine).token_id]

    def fail(batch: ForwardBatch) -> Any:
        raise EngineError("the model failed")

    with pytest.MonkeyPatch.context() as patch:
        for lane in engine.lanes:
            patch.setattr(lane, "run", fail)
        with pytest.raises(EngineError, match="the model failed"):
            list(other)
    assert [request.finish_reason for request in other.requests] == ["abort"]
    assert list(other) == []
    assert got + [delta.token_id for delta in mine] == expected


class Panic(BaseException):
    """The error of a panic in a tokenizer written in Rust; it is not an Exception."""


@pytest.mark.parametrize("stop", [None, "never"])
def test_a_tokenizer_that_panics_leaves_the_engine_usable(
    stop: str | None, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A BaseException of the tokenizer's encode or decode ends the call, and every request of it."""
    params = SamplingParams(max_new_tokens=5, stop=stop)

    def panic(*args: Any, **kwargs: Any) -> Any:
        raise Panic

    for name in ("encode", "decode"):
        with monkeypatch.context() as patch:
            patch.setattr(engine.tokenizer, name, panic)
            with pytest.raises(Panic):
                engine.generate([[84, 104], "If "], params)
        assert is_idle(engine)
    assert engine.generate(["If "], params)[0].text


def test_a_step_inside_a_step_is_refused(engine: Engine) -> None:
    """An observer, or another thread, that steps an engine during a step is refused; the step goes on."""
    lane = engine.lanes[0]
    run = type(lane).run
    refusals = []

    def step_and_run(batch: ForwardBatch) -> Any:
        with pytest.raises(UsageError, match="already running") as raised:
            engine.step()
        refusals.append(raised)
        return run(lane, batch)

    expected = alone(engine, "If ", 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane, "run", step_and_run)
        assert engine.generate(["If "], tokens(4))[0].token_ids == expected
    assert refusals


# -- abort -----------------------------------------------------------------------------------------


def test_abort_takes_requests_and_ids_of_its_own_engine_only(engine: Engine) -> None:
    """A request of another engine with the same id is not changed; other objects are refused."""
    request = engine.add("The ", tokens(8))
    stranger = Request(request.request_id, [1], tokens(8))
    assert not engine.abort(stranger)
    assert not engine.abort("no such id")
    assert engine.abort(request)
    assert (request.finish_reason, request.output_token_ids) == ("abort", [])
    for bad in (None, 0, request.prompt_token_ids):
        with pytest.raises(RequestError, match="cannot abort"):
            engine.abort(bad)  # type: ignore[arg-type]


def test_an_abort_from_inside_a_step_takes_effect_after_it(engine: Engine) -> None:
    """An observer may abort a request in the middle of its step; its memory is free after the step."""
    lane = engine.lanes[0]
    run = type(lane).run
    request = engine.add("The ", tokens(8))

    def abort_and_run(batch: ForwardBatch) -> Any:
        assert engine.abort(request)
        return run(lane, batch)

    engine.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane, "run", abort_and_run)
        engine.step()
    assert request.finish_reason == "abort"
    assert is_idle(engine)


def test_completions_of_an_aborted_prompt_say_so(engine: Engine) -> None:
    """`generate` returns what an aborted prompt has so far, with the reason abort."""
    lane = engine.lanes[0]
    run = type(lane).run

    def abort_and_run(batch: ForwardBatch) -> Any:
        (alive,) = engine.scheduler._alive
        if len(engine.scheduler._alive[alive].output_token_ids) == 2:
            engine.abort(alive)
        return run(lane, batch)

    expected = alone(engine, "The ", 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane, "run", abort_and_run)
        (done,) = engine.generate(["The "], tokens(8))
    assert (done.finish_reason, done.token_ids) == ("abort", expected[:3])
