"""Asynchronous scheduling gives the tokens of synchronous steps, whatever ends, waits, or fails.

It is forced on a CPU, where the step ahead runs at once: its assumptions about the step before are as wrong
or right as on a GPU.
"""

import random
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpact import ForwardBatch, Lane
from graphpact.errors import ConfigError, EngineError
from graphpact.hookspecs import hookimpl
from graphpact_engine import Engine, Request, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.selection import choose_async
from graphpact_engine.timeline import ChromeTrace

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
Around = Generator[None, Any, Any]
STARVED = ("engine.num_pages=14", "engine.page_size=4")
CASES = {
    "roomy": ["engine.page_size=16"],
    "one token a page": ["engine.page_size=1"],
    "starved": [*STARVED],
    "turns": ["engine.mixed=false", "engine.max_prefill_chunk=5", "engine.page_size=4"],
    "chunks": ["engine.max_prefill_chunk=5", "engine.page_size=4"],
    "strict": ["lanes.decode.strict=true", *STARVED],
    "eager": ["lanes.decode.runner=eager", *STARVED],
    "verified": ["verify.replay_against_eager=1.0", *STARVED],
}


def build(*overrides: str, ahead: bool, observers: Any = ()) -> Engine:
    """Return an engine in float64, so that no tie between logits decides a token."""
    settings = [
        f'model.path="{TINY}"',
        'model.dtype="float64"',
        'engine.device="cpu"',
        "engine.max_num_seqs=4",
        "engine.max_model_len=48",
        f"engine.async_scheduling={str(ahead).lower()}",
        *overrides,
    ]
    return Engine(EngineConfig.load(None, env={}, overrides=settings), observers=observers)


def draw_sampling(draw: random.Random, texts: list[str]) -> SamplingParams:
    """Return random parameters: greedy or drawn, ended by tokens, strings or lengths, some with penalties."""
    return SamplingParams(
        max_new_tokens=draw.choice([1, 4, 9, 15, 22, 60]),
        temperature=draw.choice([0.0, 0.0, 0.7, 1.5]),
        top_p=draw.choice([1.0, 0.9]),
        seed=draw.randrange(100),
        stop=draw.choice([None, None, draw.sample(texts, 2)]),
        stop_token_ids=draw.sample(range(256), draw.choice([0, 0, 20])),
        ignore_eos=draw.random() < 0.7,
        repetition_penalty=draw.choice([None, None, None, 20.0]),
        min_new_tokens=0,
    )


def run(engine: Engine, seed: int, *, aborts: bool = False) -> tuple[list[list[int]], list[str | None], int]:
    """Run random requests that arrive over time; return their tokens, reasons, and steps that were ahead.

    Requests are aborted when they have a certain number of tokens, so every run aborts them at the same
    point.
    """
    draw = random.Random(seed)
    left = [
        (
            [draw.randrange(256) for _ in range(draw.randrange(1, 22))],
            draw_sampling(draw, ["a", "e", " ", "th"]),
            draw.choice([None, 1, 3, 7]) if aborts else None,
        )
        for _ in range(14)
    ]
    started: list[tuple[Request, int | None]] = []
    num_ahead, pages = 0, engine.memory.pages
    while left or engine.scheduler.has_work:
        for _ in range(draw.choice([0, 0, 1, 3])):
            if left:
                prompt, sampling, most = left.pop()
                started.append((engine.add(prompt, sampling), most))
        before = {one.request_id: len(one.output_token_ids) for one, _ in started}
        got = engine.step()
        assert all(len(one.output_token_ids) == before[one.request_id] + 1 for one in got)
        num_ahead += getattr(engine._loop, "_flight", None) is not None
        engine.scheduler.check_invariants()
        for one, most in started:
            if most is not None and len(one.output_token_ids) >= most:
                engine.abort(one)
    assert pages.num_free == pages.num_pages
    return (
        [one.output_token_ids for one, _ in started],
        [one.finish_reason for one, _ in started],
        num_ahead,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [*CASES])
def test_random_work_gives_the_tokens_of_synchronous_steps(case: str) -> None:
    """Stops, lengths, aborts, preemption and chunks: tokens, reasons and random numbers are the same."""
    with build(*CASES[case], ahead=False) as sync, build(*CASES[case], ahead=True) as engine:
        assert (sync.is_async, engine.is_async) == (False, True)
        total = 0
        for seed, aborts in enumerate((False, True)):
            tokens, reasons, none = run(sync, seed, aborts=aborts)
            same, likewise, num_ahead = run(engine, seed, aborts=aborts)
            assert same == tokens
            assert likewise == reasons
            assert none == 0
            total += num_ahead
        assert total > 3
        if "engine.num_pages=14" in CASES[case]:
            assert engine.scheduler.num_preemptions > 0


def test_a_request_that_arrives_is_not_kept_waiting() -> None:
    """A request that arrives while others decode ahead gets its first token with the second step."""
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    with build(ahead=True) as engine:
        engine.add([1, 2, 3], sampling)
        for _ in range(4):
            engine.step()
        assert engine._loop._flight is not None
        late = engine.add([4, 5], sampling)
        engine.step()
        assert engine.step()[-1] is late


def test_streams_and_texts_are_those_of_synchronous_steps() -> None:
    """Deltas of a stream with a stop string are the same, piece by piece."""
    sampling = SamplingParams(max_new_tokens=30, stop=["of", "\n\n"])
    prompts = ["The result of ", "If ", "def f(", "Once", "Return a ", "x = "]
    with build(ahead=False) as sync, build(ahead=True) as engine:
        expected = [
            (one.index, one.token_id, one.text, one.finish_reason) for one in sync.stream(prompts, sampling)
        ]
        given = [
            (one.index, one.token_id, one.text, one.finish_reason) for one in engine.stream(prompts, sampling)
        ]
    for at in range(len(prompts)):
        assert [one for one in given if one[0] == at] == [one for one in expected if one[0] == at]


class Fails:
    """An observer that ends some steps of a lane with an error, or gives them logits of NaN."""

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises
        self.at: set[int] = set()
        self.num_steps = 0

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> Around:
        """Fail in the chosen steps."""
        self.num_steps += 1
        if self.raises and self.num_steps in self.at:
            raise EngineError("planted")
        outputs = yield
        if self.num_steps in self.at:
            outputs.logits[-1].fill_(torch.nan)
        return outputs


@pytest.mark.few(1)
@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("first", range(2, 7))
def test_a_step_that_fails_is_repeated(first: int, *, raises: bool) -> None:
    """Whichever step fails, in flight or ahead, the next call goes on and no token is lost or drawn twice."""
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True)
    prompts = ["The ", "If ", "One"]
    with build(ahead=False) as sync:
        expected = [one.token_ids for one in sync.generate(prompts, sampling)]
    fails = Fails(raises=raises)
    fails.at = {first, first + 1, first + 4}
    errors: list[str] = []
    with build(ahead=True, observers=[fails]) as engine:
        requests = [engine.add(prompt, sampling) for prompt in prompts]
        while engine.scheduler.has_work:
            try:
                engine.step()
            except EngineError as error:
                errors.append(str(error))
            engine.scheduler.check_invariants()
    assert [one.output_token_ids for one in requests] == expected
    assert len(errors) > 1
    assert all(("planted" if raises else "contain NaN") in error for error in errors)


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_read(tmp_path: Path) -> None:
    """Each call launches the next step, then waits, then commits; the last call only waits."""
    path = tmp_path / "trace.json"
    with ChromeTrace(path) as trace, build(ahead=True, observers=[trace]) as engine:
        engine.generate(["The "], SamplingParams(max_new_tokens=5, ignore_eos=True))
    names = [
        line.split('"name":"')[1].split('"')[0] for line in path.read_text().splitlines() if '"name"' in line
    ]
    wanted = ["schedule", "lane decode", "sample", "wait", "commit", "step"]
    steps = " ".join(name for name in names if name in wanted).split(" step")
    ahead = "schedule lane decode sample"
    assert [one.strip() for one in steps[1:-1]] == [
        f"{ahead} {ahead} wait commit",
        f"{ahead} wait commit",
        f"{ahead} wait commit",
        "schedule wait commit",
    ]


def test_where_it_is_used() -> None:
    """By default on a GPU without speculation and ranks; with them it is refused."""

    def choose(device: str, *overrides: str) -> bool:
        config = EngineConfig.load(None, env={}, overrides=[*overrides])
        return choose_async(config, torch.device(device))

    eagle = 'speculative.algorithm="eagle"'
    assert [choose("cuda"), choose("cpu"), choose("cuda", eagle)] == [True, False, False]
    assert choose("cpu", "engine.async_scheduling=true")
    assert not choose("cuda", "engine.async_scheduling=false")
    assert choose("cuda", "engine.async_scheduling=auto")
    with pytest.raises(ConfigError, match=r"speculative\.algorithm is set"):
        choose("cpu", "engine.async_scheduling=true", eagle)
    for size in ("tensor", "data", "pipeline"):
        assert not choose("cuda", f"parallel.{size}=2")
        with pytest.raises(ConfigError, match="several ranks"):
            choose("cpu", "engine.async_scheduling=true", f"parallel.{size}=2")
    with pytest.raises(ConfigError, match="expected auto, true or false"):
        choose("cpu", "engine.async_scheduling=maybe")


def test_an_aborted_request_of_a_step_in_flight_is_dropped() -> None:
    """All requests aborted while a step is in flight: their memory is free, and later ones are served."""
    make: Callable[[], SamplingParams] = lambda: SamplingParams(max_new_tokens=8, ignore_eos=True)  # noqa: E731
    with build(ahead=True) as engine:
        requests = [engine.add([1, 2, at], make()) for at in range(3)]
        for _ in range(3):
            engine.step()
        assert engine._loop._flight is not None
        for request in requests:
            assert engine.abort(request)
        assert engine.memory.pages.num_free == engine.memory.pages.num_pages
        assert not engine.scheduler.has_work
        assert engine.step() == []
        assert engine._loop._flight is None
        counts = [len(request.output_token_ids) for request in requests]
        (later,) = engine.generate([[5, 6]], make())
        assert [len(request.output_token_ids) for request in requests] == counts
    with build(ahead=False) as sync:
        assert sync.generate([[5, 6]], make())[0].token_ids == later.token_ids


def test_invalid_logits_of_an_aborted_request_end_no_step() -> None:
    """Logits of NaN for a request aborted while its step was in flight do not end the step."""
    fails = Fails(raises=False)
    with build(ahead=True, observers=[fails]) as engine:
        sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
        kept, aborted = (engine.add([1, at], sampling) for at in (2, 3))
        engine.step()
        fails.at = {fails.num_steps + 2}  # the step ahead, whose last row is the aborted request's
        engine.step()
        assert engine._loop._flight is not None
        assert engine.abort(aborted)
        while engine.scheduler.has_work:
            engine.step()
    assert len(kept.output_token_ids) == 8
