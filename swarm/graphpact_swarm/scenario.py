"""`Scenario`: one run of an engine, as a file that says everything about it.

Does not: draw one (`graphpact_swarm.draws` does), or run it (`graphpact_swarm.runs`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from graphpact.engines import InjectedFault, PromptRequest
from graphpact.errors import UsageError
from graphpact.files import read_file, write_file
from graphpact_swarm.records import CLOSED, record_of

FORMAT = 1
_HINT = "give a file that `graphpact swarm` wrote"


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request of a scenario.

    Args:
        prompt: The token ids of the prompt.
        max_new_tokens: The most tokens of the answer.
        arrives_in: The pass in which it arrives.
        aborted_in: The pass in which it is aborted, or None.
        stop_token_ids: Tokens that end it.
        with_logprobs: Whether it asks for the logarithms of the probabilities of its tokens.
    """

    __pydantic_config__: ClassVar = CLOSED

    prompt: tuple[int, ...]
    max_new_tokens: int
    arrives_in: int = 0
    aborted_in: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    with_logprobs: bool = False

    def request(self) -> PromptRequest:
        """Return it for an engine, without results."""
        return PromptRequest(
            token_ids=list(self.prompt),
            max_new_tokens=self.max_new_tokens,
            arrives_in=self.arrives_in,
            aborted_in=self.aborted_in,
            stop_token_ids=list(self.stop_token_ids),
            with_logprobs=self.with_logprobs,
        )


@dataclass(frozen=True, kw_only=True)
class ProcessFault:
    """A fault of one of several ranks.

    Args:
        kind: ``kill``: its process is killed; ``slow``: it sleeps before each pass, in real time.
        at: The pass in which it begins.
        rank: The rank.
    """

    __pydantic_config__: ClassVar = CLOSED

    kind: Literal["kill", "slow"]
    at: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run of an engine.

    Args:
        engine: The name of the engine.
        choice: The value of each feature of its configuration, and ``model``.
        arrivals: The requests.
        seed: The seed that it was drawn from.
        settings: The engine's own arguments, which win over ``choice``.
        is_strict: Whether the tape is strict.
        faults: Faults to inject.
        process_faults: Faults of one rank.
    """

    __pydantic_config__: ClassVar = CLOSED

    engine: str
    choice: Mapping[str, Any]
    arrivals: tuple[Arrival, ...]
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False
    faults: tuple[InjectedFault, ...] = ()
    process_faults: tuple[ProcessFault, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The most tokens of all requests, prompts and answers."""
        return sum(len(each.prompt) + each.max_new_tokens for each in self.arrivals)

    def with_arrivals(self, arrivals: Sequence[Arrival]) -> "Scenario":
        """Return it with other requests."""
        return replace(self, arrivals=tuple(arrivals))

    def with_choice(self, **values: Any) -> "Scenario":
        """Return it with other values of some features."""
        return replace(self, choice={**self.choice, **values})

    def to_json(self) -> dict[str, Any]:
        """Return it, ready for JSON."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, values: Any) -> "Scenario":
        """Return what `to_json` returned.

        Raises:
            UsageError: It is something else.
        """
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise UsageError(f"this is no scenario of the format {FORMAT}", hint=_HINT)
        return record_of(cls, {name: value for name, value in values.items() if name != "format"})

    def save(self, path: Path) -> None:
        """Write it to a file."""
        write_file(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Scenario":
        """Read what `save` wrote.

        Raises:
            UsageError: The file cannot be read, or is no scenario.
        """
        try:
            values = json.loads(read_file(path))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{path}: {error}", hint=_HINT) from error
        return cls.from_json(values)
