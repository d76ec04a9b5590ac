"""One request: its prompt, sampling parameters, output so far, and memory.

Does not: change its own state or allocate memory (the scheduler does both), or handle text: prompts and
outputs are token ids.
"""

import enum
import math
from dataclasses import InitVar, dataclass, field
from typing import Literal

import torch

from graphpact_engine.errors import RequestError

FinishReason = Literal["stop", "length", "abort"]
"""Why a request ended: a stop or end token, a length limit, or `Scheduler.abort`."""

_MAX_SEED = 2**64 - 1


class RequestState(enum.Enum):
    """The state of a request.

    Attributes:
        WAITING: Owns no memory: new, or preempted.
        PREFILLING: Owns memory; some of its known tokens are not yet in the KV cache.
        RUNNING: All known tokens except the newest are in the KV cache; its next step is a decode.
        FINISHED: Ended; owns no memory.
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters by which the tokens of one request are chosen, and by which it ends.

    Args:
        max_new_tokens: Maximum number of tokens to generate; 1 or more.
        temperature: 0: greedy. Above 0: logits are divided by it before a token is drawn.
        top_p: Draw from the smallest set of likeliest tokens with at least this probability; above 0, at most
            1.
        top_k: Draw from this many likeliest tokens; 0 for all.
        seed: Seed of the request's random numbers, 0 to 2**64 - 1; None uses the seed of the engine.
        stop_token_ids: Tokens that end the request, in addition to the model's end tokens. The token is part
            of the output.
        ignore_eos: Whether the model's end tokens do not end this request.

    Raises:
        RequestError: A value is out of its range; the message names field, value and range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(_is_int(self.max_new_tokens, 1), "max_new_tokens", self.max_new_tokens, ">= 1")
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "finite and >= 0",
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "> 0 and <= 1")
        _require(_is_int(self.top_k, 0), "top_k", self.top_k, "a whole number >= 0, 0 for off")
        _require(
            self.seed is None or (_is_int(self.seed, 0) and self.seed <= _MAX_SEED),
            "seed",
            self.seed,
            "None or 0 to 2**64 - 1",
        )
        _require(
            all(_is_int(token, 0) for token in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "token ids >= 0",
        )


def _is_int(value: object, at_least: int) -> bool:
    """Return whether ``value`` is an int, not a bool, of at least ``at_least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _require(valid: bool, field_name: str, value: object, allowed: str) -> None:  # noqa: FBT001  a result, not a mode
    """Raise RequestError if a sampling parameter is not valid."""
    if not valid:
        raise RequestError(f"sampling parameter {field_name} must be {allowed}; got {value!r}")


@dataclass(slots=True, eq=False)
class Request:
    """One prompt with its output so far.

    Args:
        request_id: The caller's name of the request, unique among alive requests.
        prompt_token_ids: The prompt.
        sampling: The sampling parameters and end conditions.
        default_seed: Seed of the random numbers if ``sampling.seed`` is None.
        output_token_ids: Tokens generated so far; preemption keeps them.
        state: Its state.
        row: Its row in the request pool; None if it owns none.
        pages: Its KV pages, in order of position.
        num_computed: Number of leading tokens whose keys and values are in the cache.
        finish_reason: Why it ended; None before.
        num_preemptions: How often it was preempted: its memory freed, its tokens computed again.
        arrival: Its index in the order of arrival; set by the scheduler.
        generator: Its random number generator on the host, seeded once; preemption keeps its state.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    default_seed: InitVar[int] = 0
    output_token_ids: list[int] = field(default_factory=list, init=False)
    state: RequestState = field(default=RequestState.WAITING, init=False)
    row: int | None = field(default=None, init=False)
    pages: list[int] = field(default_factory=list, init=False)
    num_computed: int = field(default=0, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    num_preemptions: int = field(default=0, init=False)
    arrival: int = field(default=-1, init=False)
    generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self, default_seed: int) -> None:
        seed = self.sampling.seed
        self.generator = torch.Generator(device="cpu")
        self.generator.manual_seed(default_seed if seed is None else seed)

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether it ended, for any reason."""
        return self.state is RequestState.FINISHED

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the known tokens of positions ``start`` to ``end - 1``, prompt then output."""
        prompt = self.prompt_token_ids
        at = len(prompt)
        if end <= at:
            return prompt[start:end]
        return prompt[start:] + self.output_token_ids[max(start - at, 0) : end - at]
