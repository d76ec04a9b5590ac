"""One request: its prompt, sampling parameters, output so far, and memory.

Does not: change its own state or allocate memory (the scheduler does both), or decode text (`OutputText`
does).
"""

import enum
import numbers
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, NoReturn

import torch

from graphpact.errors import named_options
from graphpact_engine.errors import RequestError
from graphpact_engine.prompts import require_tokens
from graphpact_engine.text import OutputText

FinishReason = Literal["stop", "length", "abort"]
"""Why a request ended: an end token, stop token or stop string, a length limit, or `Engine.abort`."""

_MAX_SEED = 2**64 - 1
_UNIFORMS_AT_ONCE = 32


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


@named_options
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters by which the tokens of one request are chosen, and by which it ends.

    The default is greedy, whatever the checkpoint recommends. Fields whose default is None take the value of
    the checkpoint's generation config, or have no effect if it has none. Logits are changed in this order:
    ``logit_bias``, ``repetition_penalty``, presence and frequency penalties, suppressed tokens; then
    temperature, ``top_k``, ``top_p`` and ``min_p``.

    Args:
        max_new_tokens: Maximum number of tokens to generate; 1 or more.
        min_new_tokens: Number of tokens before which no end token, stop token or stop string ends the
            request.
        temperature: 0 for greedy. If above 0, logits are divided by it before a token is drawn.
        top_p: Draw from the smallest set of likeliest tokens with at least this probability; above 0, at most
            1.
        top_k: Draw from this many likeliest tokens; 0 for all.
        min_p: Draw from tokens with at least this share of the likeliest token's probability; 0 for all.
        repetition_penalty: Logits of tokens of prompt and output are divided by it if positive, else
            multiplied; 0.01 to 100.
        presence_penalty: Subtracted from the logits of tokens of the output; -2 to 2.
        frequency_penalty: Subtracted from the logit of a token for each time that the output contains it; -2
            to 2.
        logit_bias: Numbers, from -100 to 100, that are added to the logits of tokens.
        suppress_tokens: Tokens that are never generated.
        seed: Seed of the request's random numbers, 0 to 2**64 - 1; None uses the seed of the engine.
        stop: Strings that end the request, or one string. The text is cut before the first, the tokens are
            not.
        stop_token_ids: Tokens that end the request, in addition to the model's end tokens. The token is part
            of the output.
        ignore_eos: Whether to continue after the model's end tokens.

    Raises:
        RequestError: A value is out of its range; the message names field, value and range.
        UnknownOptionError: A parameter has another name; the message names the nearest.
    """

    max_new_tokens: int = 128
    min_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    suppress_tokens: Collection[int] | None = None
    seed: int | None = None
    stop: Sequence[str] | None = None
    stop_token_ids: Collection[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._keep("stop", lambda stop: (stop,) if isinstance(stop, str) else tuple(stop))
        self._keep("stop_token_ids", frozenset)
        self._keep("suppress_tokens", frozenset)
        self._keep("logit_bias", dict)
        for name, (holds, allowed) in _RANGES.items():
            value = getattr(self, name)
            if not (value is None and name in _MAY_BE_NONE) and not holds(value):
                _refuse(name, value, allowed)
        if self.min_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            _refuse(
                "min_new_tokens",
                self.min_new_tokens,
                f"at most max_new_tokens, {self.max_new_tokens}",
            )

    def _keep(self, name: str, convert: Callable[[Any], object]) -> None:
        """Replace a collection by a copy of one type, which its owner cannot change."""
        value = getattr(self, name)
        if value is None and name in _MAY_BE_NONE:
            return
        try:
            object.__setattr__(self, name, convert(value))
        except (TypeError, ValueError):
            _refuse(name, value, _RANGES[name][1])

    def require_served(self, vocab_size: int, end_token_ids: Collection[int]) -> None:
        """Check the parameters against the vocabulary of a model and its end tokens.

        Raises:
            RequestError: A token id is outside the vocabulary, or every token is suppressed.
        """
        for name in ("suppress_tokens", "logit_bias", "stop_token_ids"):
            tokens = sorted(getattr(self, name) or ())
            require_tokens(tokens, vocab_size, f"sampling parameter {name} has")
        if len(self.suppressed(0, end_token_ids)) >= vocab_size:
            raise RequestError(
                "sampling parameters suppress every token of the vocabulary",
                hint="remove tokens from suppress_tokens or stop_token_ids",
            )

    def suppressed(self, num_new_tokens: int, end_token_ids: Collection[int]) -> Collection[int]:
        """Return the tokens that must not be generated after ``num_new_tokens`` tokens."""
        never = self.suppress_tokens or ()
        if num_new_tokens >= (self.min_new_tokens or 0):
            return never
        return {*never, *self.stop_token_ids, *(() if self.ignore_eos else end_token_ids)}

    @property
    def changes_logits(self) -> bool:
        """Whether a bias, a penalty or a suppressed token changes the logits in any step."""
        return bool(
            self.logit_bias
            or self.suppress_tokens
            or self.min_new_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty not in {None, 1.0}
        )


_MAY_BE_NONE = {"min_new_tokens", "repetition_penalty", "suppress_tokens", "seed", "stop"}
"""Parameters that may be None."""


def _is_int(value: object, at_least: int) -> bool:
    """Return whether ``value`` is an int, not a bool, of at least ``at_least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _is_number(value: Any, lowest: float, highest: float = sys.float_info.max) -> bool:
    """Return whether ``value`` is a number, not a bool, in a closed range; False for NaN."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and bool(lowest <= value <= highest)


def _are_tokens(value: Collection[object]) -> bool:
    """Return whether every element is a token id."""
    return all(_is_int(token, 0) for token in value)


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda x: _is_int(x, 1), "a whole number >= 1"),
    "min_new_tokens": (lambda x: _is_int(x, 0), "a whole number >= 0"),
    "temperature": (lambda x: _is_number(x, 0), "finite and >= 0"),
    "top_p": (lambda x: _is_number(x, 0, 1) and x > 0, "> 0 and <= 1"),
    "top_k": (lambda x: _is_int(x, 0), "a whole number >= 0, 0 for off"),
    "min_p": (lambda x: _is_number(x, 0, 1), ">= 0 and <= 1"),
    "repetition_penalty": (lambda x: _is_number(x, 0.01, 100), ">= 0.01 and <= 100"),
    "presence_penalty": (lambda x: _is_number(x, -2, 2), ">= -2 and <= 2"),
    "frequency_penalty": (lambda x: _is_number(x, -2, 2), ">= -2 and <= 2"),
    "logit_bias": (
        lambda x: _are_tokens(x) and all(_is_number(bias, -100, 100) for bias in x.values()),
        "a mapping of token ids >= 0 to numbers >= -100 and <= 100",
    ),
    "suppress_tokens": (_are_tokens, "token ids >= 0"),
    "seed": (lambda x: _is_int(x, 0) and x <= _MAX_SEED, "None or 0 to 2**64 - 1"),
    "stop": (
        lambda x: all(isinstance(each, str) and each != "" for each in x),
        "strings that are not empty",
    ),
    "stop_token_ids": (_are_tokens, "token ids >= 0"),
    "ignore_eos": (lambda x: isinstance(x, bool), "True or False"),
}
"""For each parameter: a check of its value, and the valid values in words."""


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise RequestError(f"sampling parameter {name} must be {allowed}; got {value!r}")


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
        end_tokens: Tokens that end it; set by the scheduler.
        max_output_tokens: Number of tokens at which it ends; set by the scheduler.
        generator: Its random number generator on the host, seeded once. Preemption keeps its state, which is
            ahead of the numbers that tokens have used.
        text: The text of its output, as far as it was read; None before.
        changes_logits: Whether its parameters change logits before a token is chosen.
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
    end_tokens: frozenset[int] = field(default=frozenset(), init=False, repr=False)
    max_output_tokens: int = field(default=0, init=False, repr=False)
    generator: torch.Generator = field(init=False, repr=False)
    text: OutputText | None = field(default=None, init=False, repr=False)
    changes_logits: bool = field(init=False, repr=False)
    _counts: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _num_counted: int = field(default=0, init=False, repr=False)
    _uniforms: deque[float] = field(default_factory=deque, init=False, repr=False)

    def __post_init__(self, default_seed: int) -> None:
        seed = self.sampling.seed
        self.generator = torch.Generator(device="cpu")
        self.generator.manual_seed(default_seed if seed is None else seed)
        self.changes_logits = self.sampling.changes_logits

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

    def output_counts(self, drafts: Sequence[int] = ()) -> Mapping[int, int]:
        """Return how often output and ``drafts`` contain each known token; 0 for other prompt tokens."""
        if not self._counts:
            self._counts = dict.fromkeys(self.prompt_token_ids, 0)
        for token in self.output_token_ids[self._num_counted :]:
            self._counts[token] = self._counts.get(token, 0) + 1
        self._num_counted = len(self.output_token_ids)
        if not drafts:
            return self._counts
        counts = dict(self._counts)
        for token in drafts:
            counts[token] = counts.get(token, 0) + 1
        return counts

    def uniform(self, ahead: int = 0) -> float:
        """Return the random number in [0, 1) of the token that is ``ahead`` tokens after the next one.

        It stays the same until `use_uniforms` counts it as used.
        """
        while len(self._uniforms) <= ahead:  # a block takes as long as one number, and has the same numbers
            drawn = torch.rand(_UNIFORMS_AT_ONCE, generator=self.generator, dtype=torch.float64)
            self._uniforms.extend(drawn.tolist())
        return self._uniforms[ahead]

    def use_uniforms(self, count: int = 1) -> None:
        """Drop the random numbers of the next ``count`` tokens, which were drawn by `uniform`."""
        for _ in range(min(count, len(self._uniforms))):
            self._uniforms.popleft()
