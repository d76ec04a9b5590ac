"""The phases of an engine, which observers of the hook ``engine_phase`` wrap; `HookObserver`, a base class.

    step        one call of `Engine.step`: all of the following
    schedule    `Scheduler.schedule`, or `Scheduler.schedule_ahead`
    sample      `Sampler.sample`; `Sampler.sample_after` under speculation; `Sampler.start` if the tokens are
                read later
    wait        `PendingTokens.read` of such a step
    commit      `Scheduler.commit`

Observers that a caller passes to `Engine` wrap the phases of the engine and every lane. Those of the
configuration are built once for each lane; those of the first lane wrap the phases of the engine too.

Does not: wrap a step of a lane; the hooks ``run_step``, ``launch`` and ``capture`` are the lane's.
"""

import abc
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

from graphpact.batch import ForwardBatch
from graphpact.hooks import Hooks
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape

P = ParamSpec("P")
T = TypeVar("T")
Around = Generator[None, Any, Any]
Phase = Literal["step", "schedule", "sample", "wait", "commit"]


class EnginePhases:
    """The phases of one engine, as its observers wrap them.

    Args:
        observers: The observers, the first outermost.
    """

    def __init__(self, observers: Sequence[object]) -> None:
        self._hooks = Hooks([self], observers)

    def observed(self, phase: Phase, method: Callable[P, T]) -> Callable[P, T]:
        """Return ``method``, wrapped by every observer of phases; ``method`` itself if there is none."""
        run = self._hooks.resolve("engine_phase")
        if run is None or not self._hooks.is_observed("engine_phase"):
            return method

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            result: T = run(phase=phase, call=functools.partial(method, *args, **kwargs))
            return result

        return call

    @hookimpl
    def engine_phase(self, phase: str, call: Callable[[], T]) -> T:
        """Run the phase."""
        del phase
        return call()


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
