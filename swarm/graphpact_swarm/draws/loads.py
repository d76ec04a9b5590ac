"""`draw_scenario`: the requests of a seed, at the landmarks of a started engine.

Engines err where numbers meet: a prompt of a page and one token, of exactly the verification's width, as many
requests as a captured shape. So most numbers are drawn at such landmarks, or one beside them.

Does not: draw features; `graphpact_swarm.draws.configurations` does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from graphpact.engines import InjectedFault, Landmarks
from graphpact_swarm.models import ModelFacts
from graphpact_swarm.scenario import Arrival, ProcessFault, Scenario

_USUAL = 96  # tokens of a prompt, at most, where no landmark asks for more
_MOST = 1500  # tokens of a scenario, at most: a step of an engine on a tape takes tenths of a second
_CROWD = 16  # requests, at most
_STOP_SHARE = 12  # one of so many tokens of the vocabulary ends a request with stop tokens


@dataclass(frozen=True)
class _Limits:
    """The numbers that requests are drawn from.

    Args:
        landmarks: Those of the engine.
        model: The model.
    """

    landmarks: Landmarks
    model: ModelFacts

    @property
    def most(self) -> int:
        """The most tokens of a request, prompt and answer."""
        marks = self.landmarks
        room = marks.cache_tokens - marks.page_size - marks.verify_width
        return max(min(marks.max_len, room, self.model.max_len), 2)

    def points(self, lengths: str) -> Sequence[int]:
        """Return the lengths of prompts for the value of the feature ``lengths``."""
        marks, window = self.landmarks, self.model.window or 0
        return {
            "one": (1, 2),
            "page": tuple(marks.page_size * n for n in (1, 2, 3, 4)),
            "bucket": marks.token_counts or marks.request_counts,
            "chunk": (marks.chunk, 2 * marks.chunk),
            "verify": (marks.verify_width, marks.verify_width * 2),
            "window": (window, window + marks.page_size, 2 * window) if window else (),
            "longest": (self.most - 1,),
        }.get(lengths, ())


def draw_scenario(
    engine: str,
    seed: int,
    choice: Mapping[str, Any],
    load: Mapping[str, Any],
    landmarks: Landmarks,
    model: ModelFacts,
    *,
    ranks: int = 1,
    settings: Mapping[str, Any] | None = None,
    is_strict: bool = False,
) -> Scenario:
    """Return the scenario of ``seed``.

    Args:
        engine: The name of the engine.
        seed: The seed.
        choice: The configuration, with which the engine was started.
        load: The values of the features of the load.
        landmarks: The numbers of the engine.
        model: The model.
        ranks: The processes of the engine.
        settings: The engine's own arguments.
        is_strict: Whether the tape is strict.
    """
    random = Random(f"{engine} requests {seed}")  # noqa: S311  a draw
    limits = _Limits(landmarks, model)
    count = _count(random, load["requests"], landmarks)
    arrivals: list[Arrival] = []
    left = _MOST
    times = _times(random, load["arrivals"], count)
    prompts = _prompts(random, load, limits, count)
    for at, prompt in enumerate(prompts):
        answer = min(_answer(random, load["answers"], landmarks), limits.most - len(prompt))
        left -= len(prompt) + answer
        if left < 0 and arrivals:
            break
        arrivals.append(
            Arrival(
                prompt=tuple(prompt),
                max_new_tokens=max(answer, 1),
                arrives_in=times[at],
                aborted_in=times[at] + random.randint(0, 10)
                if load["aborts"] and random.random() < 0.4
                else None,
                stop_token_ids=_stops(random, model) if load["stops"] and random.random() < 0.7 else (),
                with_logprobs=load["logprobs"] == "all"
                or (load["logprobs"] == "some" and random.random() < 0.5),
            )
        )
    drawn = Scenario(
        engine=engine,
        choice={**choice, **load},
        arrivals=tuple(arrivals),
        seed=seed,
        settings=dict(settings or {}),
        is_strict=is_strict,
    )
    return _with_fault(random, drawn, load.get("fault", "none"), ranks)


def _near(random: Random, points: Sequence[int], least: int, most: int) -> int:
    """Return one of ``points`` or a number next to it."""
    return min(max(random.choice(points) + random.choice((-1, 0, 0, 1)), least), most)


def _count(random: Random, asked: Any, landmarks: Landmarks) -> int:
    if asked == "bucket":
        return _near(random, landmarks.request_counts or (landmarks.max_requests,), 1, _CROWD)
    if asked == "crowd":  # more than a small cache holds
        return _CROWD
    return int(asked)


def _times(random: Random, asked: str, count: int) -> list[int]:
    """Return the pass in which each request arrives."""
    now, times = 0, []
    for _ in range(count):
        times.append(now)
        if asked == "trickle":
            now += random.randint(0, 4)
        elif asked == "bursts":
            now += random.choice((0, 0, 0, 6))
        elif asked == "lulls":
            now += random.choice((0, 1, 45))
    return times


def _answer(random: Random, asked: str, landmarks: Landmarks) -> int:
    """Return the most tokens of an answer."""
    if asked == "one":
        return random.choice((1, 1, 2))
    if asked == "short":
        return random.randint(2, 8)
    long = random.randint(8, 24)
    if asked == "long":
        return long
    # So long that pages, buckets and windows are crossed while the request decodes.
    return random.choice((long, landmarks.page_size + 1, 40))


def _prompts(random: Random, load: Mapping[str, Any], limits: _Limits, count: int) -> list[list[int]]:
    asked, points = load["lengths"], limits.points(load["lengths"])
    most = limits.most - 1
    usual = max(min(most, _USUAL), 1)

    def length() -> int:
        if not points or random.random() < 0.25:
            return random.randint(1, max(min(usual, 40), 1))
        return _near(random, points, 1, most if asked in ("longest", "chunk", "window") else usual)

    def text(size: int) -> list[int]:
        if load["text"] == "repeated":  # drafts by n-grams are accepted
            motif = [random.choice(limits.model.tokens) for _ in range(random.randint(1, 5))]
            return (motif * (size // len(motif) + 1))[:size]
        return [random.choice(limits.model.tokens) for _ in range(size)]

    own = [text(length()) for _ in range(count)]
    if load["prefixes"] == "own":
        return own
    page = limits.landmarks.page_size
    shared = text(_near(random, [page * n for n in (1, 2, 3)], 1, usual))
    if load["prefixes"] == "shared":
        return [(shared + each)[:most] if random.random() < 0.75 else each for each in own]
    if load["prefixes"] == "equal":
        return [(shared + own[0])[:most] if random.random() < 0.75 else each for each in own]
    longest = (shared + max(own, key=len))[:most]
    return [longest[: random.randint(1, len(longest))] if random.random() < 0.75 else each for each in own]


def _stops(random: Random, model: ModelFacts) -> tuple[int, ...]:
    return tuple(sorted(random.sample(model.tokens, max(len(model.tokens) // _STOP_SHARE, 1))))


def _with_fault(random: Random, drawn: Scenario, kind: str, ranks: int) -> Scenario:
    last = max((each.arrives_in for each in drawn.arrivals), default=0)
    at = random.randint(1, last + 8)
    if kind in ("raise", "full"):
        passes = random.randint(1, 12)
        fault = InjectedFault(kind="raise" if kind == "raise" else "full", at=at, passes=passes)
        return replace(drawn, faults=(fault,))
    if kind in ("kill", "slow"):
        rank = random.randrange(ranks)
        return replace(
            drawn,
            process_faults=(ProcessFault(kind="kill" if kind == "kill" else "slow", at=at, rank=rank),),
        )
    return drawn
