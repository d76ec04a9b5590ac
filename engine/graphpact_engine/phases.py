"""`PhaseObserver`: an observer that wraps the phases of an engine too, and `HookObserver`, a base class.

    step        one call of `Engine.step`: all of the following
    schedule    `Scheduler.schedule`, or `Scheduler.schedule_ahead`
    launch      `Lane.launch`: the replay, or the eager run
    capture     `Lane.capture`: one shape, while the engine is built
    sample      `Sampler.sample`; `Sampler.sample_after` under speculation; `Sampler.start` if the tokens are
                read later
    wait        `PendingTokens.read` of such a step
    commit      `Scheduler.commit`

Phases are wrapped once, when the engine is built: without such an observer a step calls the methods
themselves.

Does not: wrap hooks; a `PhaseObserver` wraps them as any other observer does, by ``@hookimpl(wrapper=True)``.
"""

import abc
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, runtime_checkable

from graphpact.batch import ForwardBatch
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane, PreparedStep
from graphpact.shapes import GraphShape
from graphpact.step import StepOutputs

P = ParamSpec("P")
T = TypeVar("T")
Around = Generator[None, Any, Any]
Phase = Literal["step", "schedule", "launch", "capture", "sample", "wait", "commit"]


@runtime_checkable
class PhaseObserver(Protocol):
    """An observer that wraps phases.

    Those that a caller passes to `Engine` wrap the phases of the engine and of every lane; those of the
    configuration, which each lane has of its own, wrap the phases of their lane, and those of the first lane
    the engine's.
    """

    def phase(self, name: Phase, call: Callable[P, T], lane: Lane | None) -> Callable[P, T]:
        """Return ``call``, wrapped. The result takes, returns and raises what ``call`` does.

        Args:
            name: The phase.
            call: The method that runs it, possibly wrapped by another observer.
            lane: The lane of a launch or a capture; None for the phases of the engine.
        """


def observed(
    observers: Sequence[object], name: Phase, call: Callable[P, T], lane: Lane | None = None
) -> Callable[P, T]:
    """Return ``call``, wrapped by every `PhaseObserver` of ``observers``, the first outermost."""
    for observer in reversed(observers):
        if isinstance(observer, PhaseObserver):
            call = observer.phase(name, call, lane)
    return call


class ObservedLane(Lane):
    """A lane whose captures and launches are phases of its observers.

    Args:
        name: See `graphpact.Lane`.
        observers: See `graphpact.Lane`.
        others: All other arguments of `graphpact.Lane`.
    """

    def __init__(self, name: str, *, observers: Sequence[object] = (), **others: Any) -> None:
        super().__init__(name, observers=observers, **others)
        self._launch = observed(observers, "launch", super().launch, self)
        self._capture = observed(observers, "capture", super().capture, self)

    def launch(self, prepared: PreparedStep) -> StepOutputs:
        """See `graphpact.Lane.launch`."""
        return self._launch(prepared)

    def capture(self, shape: GraphShape, batch: ForwardBatch | None = None) -> None:
        """See `graphpact.Lane.capture`."""
        self._capture(shape, batch)


class HookObserver(abc.ABC):
    """Base class of observers that treat the four hooks alike: one method wraps each of them."""

    @abc.abstractmethod
    def around(
        self, hook: str, shape: GraphShape, *, batch: ForwardBatch | None = None, captured: Any = None
    ) -> Around:
        """Wrap one call of a hook: yield once, and return the result.

        Args:
            hook: The name of the hook.
            shape: The shape that it prepares.
            batch: The live batch, or the dummy of a capture; None for the hooks of metadata.
            captured: The metadata of the capture; None for hooks that do not get it.
        """

    @hookimpl(wrapper=True)
    def populate(self, batch: ForwardBatch, shape: GraphShape) -> Around:
        """Wrap ``populate``."""
        return (yield from self.around("populate", shape, batch=batch))

    @hookimpl(wrapper=True)
    def prepare_replay(self, batch: ForwardBatch, shape: GraphShape) -> Around:
        """Wrap ``prepare_replay``."""
        return (yield from self.around("prepare_replay", shape, batch=batch))

    @hookimpl(wrapper=True)
    def init_metadata_capture(self, shape: GraphShape) -> Around:
        """Wrap ``init_metadata_capture``."""
        return (yield from self.around("init_metadata_capture", shape))

    @hookimpl(wrapper=True)
    def init_metadata_replay(self, shape: GraphShape, captured: Any) -> Around:
        """Wrap ``init_metadata_replay``."""
        return (yield from self.around("init_metadata_replay", shape, captured=captured))
