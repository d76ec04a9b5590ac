"""`LoadOffer` and `LoadedEngine`: how an integration runs its engine under generated load.

`graphpact swarm` draws a configuration and requests, starts the engine, and forks. The child runs the
requests:

    offer.prepare()                                # imports the engine, once in a process
    engine = offer.start(EngineStart(choice={"page_size": 16}, model=Path("llama")))
    engine.run(requests, most_passes=500, on_pass=clock.tick)
    engine.steps, engine.faults(), engine.leaks()  # what is judged

Does not: draw or judge; `graphpact_swarm` does.
"""

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from graphpact.errors import EngineError


@dataclass(kw_only=True)
class PromptRequest:
    """One request to an engine in this process.

    Tokens are chosen greedily. The model's own end tokens do not end it.

    Args:
        token_ids: The prompt.
        max_new_tokens: The most tokens of the answer; so many are generated but for a stop token or an abort.
        arrives_in: The pass of the engine's loop in which it arrives.
        aborted_in: The pass in which it is aborted, or None.
        stop_token_ids: Tokens that end it. The one that did is the last of the answer.
        with_logprobs: Whether it asks for the logarithms of the probabilities of its tokens.
        output_ids: The answer, after the run.
        output_logprobs: The logarithm of the probability of each token of the answer, if it asked for them.
        finish_reason: Why it ended: ``length``, ``stop`` or ``abort``; None if it never did.
        num_ends: How often the engine said that it ended; an engine may say nothing of an abort.
    """

    token_ids: Sequence[int]
    max_new_tokens: int
    arrives_in: int = 0
    aborted_in: int | None = None
    stop_token_ids: Sequence[int] = ()
    with_logprobs: bool = False
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    num_ends: int = 0


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One choice in the configuration of an engine.

    Args:
        name: Its name, such as ``page_size``.
        plain_share: How often a seed has the plainest value; the others share the rest.
        values: The values to choose from, ready for JSON. The first is the plainest one, towards which a
            failing run is simplified.
    """

    name: str
    values: tuple[Any, ...]
    plain_share: float = 0.35


@dataclass(frozen=True, kw_only=True)
class Landmarks:
    """Numbers of a started engine; loads are drawn at them and next to them.

    Args:
        request_counts: Captured numbers of requests.
        token_counts: Captured numbers of new tokens.
        page_size: Tokens per page of the KV cache.
        chunk: The most new tokens of a step.
        verify_width: Tokens of a request that a verification reads; 1 without drafts.
        max_len: The most tokens of a request, prompt and answer.
        max_requests: The most requests of a step.
        cache_tokens: Tokens that the KV cache holds.
    """

    request_counts: tuple[int, ...] = ()
    token_counts: tuple[int, ...] = ()
    page_size: int
    chunk: int
    verify_width: int = 1
    max_len: int
    max_requests: int
    cache_tokens: int


@dataclass(frozen=True, kw_only=True)
class EngineStep:
    """One batch that an engine ran.

    Args:
        at: The pass of the engine's loop.
        kind: ``decode``, ``prefill``, ``mixed``, ``verify``, ``draft``, ``draft_extend`` or ``idle``.
        requests: Which requests are in it, by their places in the list that was given, in the batch's order.
        tokens: New tokens of each.
        computed: Tokens of each in the KV cache before the step.
        graph: The graph that was replayed, such as ``DecodeCudaGraphRunner[4]``; None for an eager step.
        reason: Why the step ran eagerly, in words; None for a replay.
    """

    at: int
    kind: str
    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    computed: tuple[int, ...]
    graph: str | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class GraphFault:
    """A disagreement between a capture and a replay, or a read or write of memory that no request owns.

    Args:
        rule: The id of the broken rule, such as ``GP01``.
        field: Owner and field, such as ``FlashInferBackend.kv_indptr``.
        graph: The graph.
        text: What was captured and what is there now.
    """

    rule: str
    field: str
    graph: str
    text: str


@dataclass(frozen=True, kw_only=True)
class KnownFinding:
    """A finding that was looked into: a bug of a release of the engine.

    Args:
        kind: The kind of the finding, such as ``tokens``.
        text: A pattern of its text, in which ``*`` stands for any text.
        choice: Values of features without which it is another finding, by the name of the feature.
        reason: What is wrong in the engine's code.
        thread: The address of a public thread; empty if it is not reported.
    """

    kind: str
    text: str = "*"
    choice: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    reason: str
    thread: str = ""

    def covers(self, kind: str, text: str, choice: Mapping[str, Any]) -> bool:
        """Return whether a finding of a configuration is this one."""
        return (
            kind == self.kind
            and fnmatch.fnmatchcase(text, self.text)
            and all(choice.get(name) in values for name, values in self.choice.items())
        )


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A fault that a run gets on purpose.

    Args:
        kind: ``raise``: the model raises `InjectedError` in one step; ``full``: the KV cache has no free
            page.
        at: The pass in which it begins.
        passes: For how many passes the cache is full.
    """

    kind: Literal["raise", "full"]
    at: int
    passes: int = 1


class InjectedError(RuntimeError):
    """The error of the fault ``raise``."""


class NotDoneError(EngineError):
    """Requests were not done after the most passes of the engine's loop."""


@dataclass(frozen=True, kw_only=True)
class EngineStart:
    """How an engine is started.

    Args:
        choice: The value of each feature, by name.
        model: The folder of a checkpoint.
        settings: The engine's own arguments, by name. They win over those that follow from ``choice``.
        drafts: Folders of draft models, by the value of the feature ``drafts``.
        is_strict: Whether the tape is strict, and memory that no live request owns is poisoned before each
            step.
        is_eager: Whether nothing is captured, without drafts: the run to which others are compared.
        rank: The rank of this process.
        port: A free port of this machine, by which several ranks find each other.
    """

    choice: Mapping[str, Any]
    model: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    drafts: Mapping[str, Path] = field(default_factory=dict)
    is_strict: bool = False
    is_eager: bool = False
    rank: int = 0
    port: int = 0


class LoadedEngine(ABC):
    """A started engine in this process, with its graphs captured on a tape, every replay of which is guarded.

    Attributes:
        landmarks: Its numbers.
        steps: The batches of the run, in their order; a warm-up is none.
    """

    landmarks: Landmarks
    steps: list[EngineStep]

    @abstractmethod
    def run(
        self,
        requests: Sequence[PromptRequest],
        *,
        most_passes: int,
        on_pass: Callable[[int], None],
        faults: Sequence[InjectedFault] = (),
    ) -> None:
        """Run requests to their ends, and fill in their results and ``steps``. A process calls it once.

        The same requests give the same steps, whatever the time and the load of the machine.

        Args:
            requests: The requests. Those of a pass arrive before it, in the order of the list.
            most_passes: The most passes of the engine's loop.
            on_pass: Is called with the number of a pass before it.
            faults: Faults to inject.

        Raises:
            NotDoneError: The requests are not done after ``most_passes``. What they have got is filled in.
            InjectedError: The engine ended by the injected fault ``raise``, instead of going on.
        """

    @abstractmethod
    def faults(self) -> list[GraphFault]:
        """Return what the guard and the tape found so far, each fault once, in order of their discovery."""

    @abstractmethod
    def leaks(self) -> list[str]:
        """Return what is still allocated after a run in which all requests ended; empty if nothing is.

        Pages that are kept for hits of the prefix cache are no leak, if they can be freed.
        """


class LoadOffer(ABC):
    """What an integration offers for generated load. It is built without arguments, and imports no engine.

    Attributes:
        draft_models: Values of the feature ``drafts`` that need a folder in `EngineStart.drafts`.
    """

    draft_models: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def features(self) -> Sequence[Feature]:
        """Return the features of configurations."""

    def refused(self, how: EngineStart) -> str | None:
        """Return why the engine itself refuses a combination of values, or one with this model; or None."""
        del how
        return None

    def ranks(self, choice: Mapping[str, Any]) -> int:
        """Return the number of processes of a configuration, 1 for the plainest. Each is a started engine."""
        del choice
        return 1

    def shares_requests(self, choice: Mapping[str, Any]) -> bool:
        """Return whether all ranks run all requests; else request ``i`` is run by rank ``i % ranks``."""
        del choice
        return True

    def variables(self) -> Mapping[str, str]:
        """Return environment variables that must be set before the engine is imported."""
        return {}

    def known(self) -> Sequence[KnownFinding]:
        """Return findings of this release that were looked into; a run with only these is no failure."""
        return ()

    @abstractmethod
    def prepare(self) -> None:
        """Import the engine. Processes fork afterwards, so no thread may be started."""

    @abstractmethod
    def start(self, how: EngineStart) -> LoadedEngine:
        """Start the engine in this process, which `prepare` was called in; once in a process.

        The process forks afterwards, for each run, unless there are several ranks.
        """
