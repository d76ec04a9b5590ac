"""What the suite asks of the process of a rank, and what the process answers.

Does not: import ``torch.distributed``, which some builds of torch lack; the suite's own process does not need
it.
"""

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from graphpact.attention import AttentionBackend, ProviderName
from graphpact.runners import GraphRunner
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_runner import ReferenceRunner, SegmentsRunner
from graphpact_conformance.results import Finding

Kind = Literal["attention_backend", "runner"]
Classes = tuple[type[AttentionBackend], type[GraphRunner] | None]
"""A backend, and a runner; None for the suite's own runner."""


@dataclass(frozen=True)
class ClassSource:
    """Where a process finds the plugin. Classes that tests make cannot be sent.

    Args:
        make: A function, as ``package.module:name``. It returns a context that yields `Classes`.
        arguments: Its arguments.
    """

    make: str
    arguments: tuple[Any, ...] = ()

    @contextmanager
    def lane(self, task: "RankTask") -> Iterator[LaneUnderTest]:
        """Yield the lane of a task in this process."""
        context = pkgutil.resolve_name(self.make)(*self.arguments)
        with context as (backend, runner):
            own = runner or (SegmentsRunner if task.config.case.segments else ReferenceRunner)
            lane = LaneUnderTest(task.config, backend, own, task.kind, task.provider)
            lane.listed = frozenset(task.examines)
            yield lane


@dataclass(frozen=True)
class RankTask:
    """One lane for all ranks.

    Args:
        config: The configuration of the lane.
        source: Its classes.
        kind: The kind of the checked plugin.
        provider: Kernel provider of the backend.
        examines: Ids of the rules that findings may have.
    """

    config: Config
    source: ClassSource
    kind: Kind
    provider: ProviderName
    examines: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """The part of a lane's work in which something was found.

    Args:
        layout: How the ranks share requests, in words.
        scene: The batches of the ranks, in words; or that the lane is built and captured.
        batch: The batch of each rank; None outside steps.
        shape: The replayed shape; None outside replays.
    """

    layout: str
    scene: str
    batch: str | None = None
    shape: str | None = None

    def __str__(self) -> str:
        return f"{self.scene}; {self.layout}"


Symptom = Literal["capture count", "count", "gathered", "padding", "repeat", "shared rows", "rows"]
"""The kinds of wrong values: a count at capture or replay, results that padding or another replay changes,
and wrong results, of work across ranks or of attention.
"""


@dataclass(frozen=True)
class Wrong:
    """A wrong value on one rank.

    Args:
        symptom: Its kind.
        culprit: The rank whose inputs are at fault, if that is known; otherwise the rank that has the value.
        field: What is wrong.
        expected: The right value.
        actual: The value.
        place: Where it was found.
    """

    symptom: Symptom
    culprit: int
    field: str
    expected: str
    actual: str
    place: Place


@dataclass(frozen=True)
class Stop:
    """The error that ended a rank's work.

    Args:
        finding: The error as a finding.
        place: Where it was raised.
        is_waiting: Whether this rank only waited for others, which did not come.
        in_capture: Whether the lane was built or captured.
    """

    finding: Finding
    place: Place
    is_waiting: bool
    in_capture: bool


@dataclass
class RankReport:
    """What one rank found in one lane.

    Args:
        rank: The rank.
        replays: The number of replays.
        declined: The declared reason of the runner for the last batch that it left to an eager step.
        refused: The undeclared reason of the runner for a batch that a captured shape holds.
        wrong: The wrong values, the first of each symptom and culprit in each layout.
        stop: The error that ended its work; None if it ended as planned.
        fault: An error of the suite itself; None if there was none.
    """

    rank: int
    replays: int = 0
    declined: str | None = None
    refused: str | None = None
    wrong: list[Wrong] = field(default_factory=list)
    stop: Stop | None = None
    fault: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the rank did all its work, and can do more."""
        return self.stop is None and self.fault is None


@dataclass(frozen=True)
class LostRank:
    """A rank whose process ended, or did not answer in time.

    Args:
        rank: The rank.
        how: How it ended, as a clause.
        said: Lines about it: where it was, and what it last wrote to stderr.
    """

    rank: int
    how: str
    said: tuple[str, ...] = ()
