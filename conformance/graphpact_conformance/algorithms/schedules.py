"""Orders of steps: requests decoded together; and chunks, preemption, requests that join and leave.

Does not: compare tokens; see `drafting`.
"""

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from graphpact_conformance.algorithms.decoding import MAX_MODEL_LEN, DecodedRequest, Decoding
from graphpact_conformance.algorithms.random_models import VOCAB

Schedule: TypeAlias = Callable[[Decoding, random.Random], list[DecodedRequest]]
"""Runs requests to their ends, and returns them."""

TOKENS = 10
"""Tokens that a request gets at least."""


def prompt(rng: random.Random, length: int) -> list[int]:
    """Return a random prompt."""
    return [rng.randrange(VOCAB) for _ in range(length)]


def together(decoding: Decoding, rng: random.Random) -> list[DecodedRequest]:
    """Decode three requests of different lengths together, then one alone."""
    requests = [decoding.join(prompt(rng, length)) for length in (2, 9, 5)]
    decoding.extend(requests)
    _decode(decoding, requests, TOKENS)
    for request in requests:
        decoding.leave(request)
    alone = decoding.join(prompt(rng, 4))
    decoding.extend([alone])
    _decode(decoding, [alone], TOKENS)
    return [*requests, alone]


def with_changes(decoding: Decoding, rng: random.Random) -> list[DecodedRequest]:
    """Read prompts in chunks, preempt a request and read it again, and let others join and leave."""
    first, second = (decoding.join(prompt(rng, length)) for length in (9, 4))
    decoding.extend({first: 3, second: 4})
    decoding.extend({first: 7})
    decoding.decode([second])
    decoding.extend({first: 9})
    decoding.decode([second, first])
    decoding.leave(second)
    third = decoding.join(prompt(rng, 6))
    decoding.extend([third])
    decoding.decode([third, first])
    decoding.admit(second)
    half = len(second.tokens) // 2
    decoding.extend({second: half})
    decoding.decode([first, third])
    decoding.extend([second])
    decoding.decode([third, second])
    decoding.leave(third)
    decoding.leave(first)
    decoding.admit(first)
    fourth = decoding.join(prompt(rng, 2))
    decoding.extend([fourth, first])
    requests = [first, fourth, second]
    _decode(decoding, requests, TOKENS)
    for request in requests:
        decoding.leave(request)
    return [*requests, third]


def of_every_length(decoding: Decoding, rng: random.Random) -> list[DecodedRequest]:
    """Decode prompts of one token and of almost `MAX_MODEL_LEN` tokens up to that length."""
    requests = [decoding.join(prompt(rng, length)) for length in (1, MAX_MODEL_LEN - 4, 2, MAX_MODEL_LEN - 1)]
    decoding.extend(requests)
    _decode(decoding, requests, MAX_MODEL_LEN)
    return requests


def _decode(decoding: Decoding, requests: Sequence[DecodedRequest], count: int) -> None:
    """Decode requests until each has ``count`` new tokens, or the length of the model."""

    def is_live(request: DecodedRequest) -> bool:
        return len(request.generated) < count and len(request.tokens) < MAX_MODEL_LEN

    while live := [request for request in requests if is_live(request)]:
        decoding.decode(live)
