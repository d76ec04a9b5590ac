"""`LaneUnderTest`: the checked backend and runner in one configuration; its subjects are rigs.

Does not: draw batches, or run all experiments (see `graphpact_conformance.suite`).
"""

import abc
import contextlib
import copy
import gc
import inspect
import sys
import traceback
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from graphpact.attention import AttentionBackend, GraphSupport, ProviderName
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import SharedBuffers
from graphpact.graphs import GraphDriver
from graphpact.lane import PactMode
from graphpact.plugin_calls import short_path
from graphpact.runners import GraphRunner, RunnerContext
from graphpact.shapes import EagerReason, GraphShape
from graphpact_conformance.lane.reference import (
    PaddedReferenceBackend,
    ReferenceBackend,
    ReferenceRunner,
    SegmentsRunner,
)
from graphpact_conformance.lane.rig import (
    CPU,
    Rig,
    drawn_batch,
    fields_of,
    own_reasons,
    planned_shapes,
    runner_context,
)
from graphpact_conformance.oracle import Answer
from graphpact_conformance.subject.global_state import StateWatch
from graphpact_conformance.subject.raised import causes, need_of
from graphpact_conformance.subject.under_test import CannotCaptureError, Reporting, Subject, Way, poison_slot
from graphpact_conformance.world.lanes import Case, Config, declares_graphs, support_of
from graphpact_conformance.world.problems import Drawn, Problem, corner, draw
from graphpact_tape.poison import is_poison
from graphpact_tape.strict_observer import is_due
from graphpact_tape.tape import TapeDriver
from graphpact_tape.trees import tensors_of

_SUITE = Path(__file__).parents[1]
_KITS = {SegmentsRunner, *PaddedReferenceBackend.__mro__, *ReferenceRunner.__mro__}
_OWN_PACKAGES = {"graphpact", "graphpact_conformance"}


@dataclass
class LaneUnderTest(Reporting):
    """A backend and a runner in one configuration; one of them may be the suite's own.

    Args:
        config: The configuration of the lane.
        backend: The backend class.
        runner: The runner class.
        kind: The kind of the checked plugin.
        provider: Kernel provider of the backend.
        device: The device of the lane.
        driver: Graph driver; None for the tape, fast or strict as experiments need it.
        listed: The rules that the current experiment lists; None for every rule.
        watch: Charges changes of the process's state to the plugin's calls.

    Attributes:
        rig_class: The class of its rigs.
    """

    config: Config
    backend: type[AttentionBackend] = ReferenceBackend
    runner: type[GraphRunner] = ReferenceRunner
    kind: Literal["attention_backend", "runner"] = "attention_backend"
    provider: ProviderName = "auto"
    device: torch.device = CPU
    driver: type[GraphDriver] | None = None
    listed: frozenset[str] | None = None
    watch: StateWatch = field(default_factory=StateWatch, compare=False, repr=False)
    rig_class: ClassVar[type[Rig]] = Rig
    _rigs: dict[tuple[Way, bool], Rig] = field(default_factory=dict, init=False)
    _answers: dict[int, tuple[Problem, Answer]] = field(default_factory=dict, init=False)
    _drawn: dict[int, list[Drawn]] = field(default_factory=dict, init=False)  # by seed
    _ways: list[tuple[Way, ...]] = field(default_factory=list, init=False)
    _asked: GraphRunner | None = field(default=None, init=False)
    _counted: list[Rig] = field(default_factory=list, init=False)  # of all lanes made by `like`
    _before: Counter[EagerReason | None] = field(default_factory=Counter, init=False)

    # -- rigs ------------------------------------------------------------------------------------

    def build(
        self,
        way: Way = "graph",
        *,
        guarded: bool = False,
        pact: PactMode = "off",
        capture: bool = True,
        copies_attention: bool = False,
        share_pool: SharedBuffers | None = None,
    ) -> Rig:
        """Return a new rig.

        Args:
            way: The producer of metadata.
            guarded: See `Rig`; the tape is strict if set, otherwise fast and traced.
            pact: See `Rig`.
            capture: See `Rig`.
            copies_attention: See `Rig`.
            share_pool: See `Rig`.
        """
        driver: Callable[[torch.device], GraphDriver] = partial(TapeDriver, traced=True)
        if guarded:
            driver = partial(TapeDriver, strict=True)
        elif self.driver is not None:
            driver = self.driver
        return self.rig_class(
            self.config,
            backend=self.backend,
            runner=self.runner,
            driver=driver,
            guarded=guarded,
            in_graph=None if way == "graph" else False,
            provider=self.provider,
            device=self.device,
            pact=pact,
            capture=capture,
            copies_attention=copies_attention,
            watch=self.watch,
            share_pool=share_pool,
        )

    def build_sharing(self) -> tuple[Rig, Rig]:
        """Return two new rigs that share the memory of their inputs."""
        pool = SharedBuffers()
        return self.build(share_pool=pool), self.build(share_pool=pool)

    def rig(self, way: Way = "graph") -> Rig:
        """Return the experiment's rig on a fast tape without checks; built once.

        Raises:
            CannotCaptureError: The lane cannot be captured.
        """
        return self._kept(way, guarded=False)

    def guarded(self, way: Way = "graph") -> Rig:
        """Return the experiment's strict rig, with a pact check of every replay; built once.

        Raises:
            CannotCaptureError: The lane cannot be captured.
        """
        return self._kept(way, guarded=True)

    def _kept(self, way: Way, *, guarded: bool) -> Rig:
        key = way, guarded
        if key not in self._rigs:
            try:
                with torch.inference_mode():
                    pact: PactMode = "always" if guarded else "off"
                    self._rigs[key] = self.build(way, guarded=guarded, pact=pact)
                self._counted.append(self._rigs[key])
            except (Exception, SystemExit) as error:
                if need_of(error) is not None:
                    raise
                raise CannotCaptureError(error) from error
        return self._rigs[key]

    def anew(self, listed: Iterable[str] | None = None) -> "LaneUnderTest":
        """Return the same lane without rigs, so that an experiment sees no state of another one.

        Caches of the plugin's functions are cleared too. Drawn batches and their answers are kept: they do
        not depend on what the plugin did.

        Args:
            listed: The rules that the next experiment lists; this lane's by default.
        """
        self.clear_caches()
        lane = replace(self, watch=StateWatch())
        lane._ways = self._ways  # noqa: SLF001  found once for all experiments
        lane._drawn, lane._answers = self._drawn, self._answers  # noqa: SLF001
        if listed is not None:
            lane.listed = frozenset(listed)
        return lane

    def again(self, listed: Iterable[str]) -> "LaneUnderTest":
        """Return the same lane with its rigs, for the next experiment, which lists other rules."""
        lane = copy.copy(self)
        lane.listed = frozenset(listed)
        lane._before = self._steps()  # noqa: SLF001  of its own class
        return lane

    def like(self, config: Config) -> "LaneUnderTest":
        """Return a lane of the same plugins in another configuration, without rigs; its steps count here."""
        lane = replace(self, config=config)
        lane._counted = self._counted  # noqa: SLF001  one list for all
        return lane

    def with_sinks(self) -> "LaneUnderTest":
        """Return the lane with sinks in its second layer, if its backend has any, otherwise itself."""
        config = replace(self.config, sinks=self.backend.capabilities.sinks)
        return self if config == self.config else self.like(config)

    def of_another_mode(self, *, capture: bool = False) -> tuple[Rig, Problem] | None:
        """Return a lane of another mode, as prefill beside decode, and its largest batch.

        It has nothing in common with this lane but the plugin's class and module. None for a plugin that does
        not declare another mode.
        """
        here, runner = self.config.case.lane_mode, self.runner
        mode = ForwardMode.DECODE if here.is_ragged else ForwardMode.EXTEND
        if self.kind == "attention_backend":
            modes, runner = self.backend.capabilities.modes & {mode}, ReferenceRunner
        else:
            modes = runner.modes - {here, ForwardMode.IDLE}
        if not modes:
            return None
        case = Case(min(modes, key=lambda mode: mode.value))
        config = replace(self.config, case=case, capture_shapes=(), room=0, counts=False)
        return replace(self, config=config, runner=runner).build(capture=capture), corner(config)

    def drawn(self, count: int, seed: int) -> list[Drawn]:
        """Return ``count`` sequences of batches for the lane; see `problems.draw`."""
        known = self._drawn.setdefault(seed, [])
        if len(known) < count:
            known[:] = draw(self.config, count, seed, self.declined)
        return known[:count]

    def clear_caches(self) -> None:
        """Clear the caches of tensors in the packages and classes of the plugin."""
        for clear in caches_of(self):
            clear()

    @property
    def _context(self) -> RunnerContext:
        """The context of the lane's runner."""
        return runner_context(self.config, self.backend.capabilities, self.device, self.runner)

    # -- batches that the runner leaves to eager steps -------------------------------------------

    def declined(self, problem: Problem) -> EagerReason | None:
        """Return the declared reason with which the runner leaves a batch to an eager step.

        None if it replays the batch, has another reason, or cannot be asked; experiments report the last two.
        """
        if not self.runner.declines:
            return None
        try:
            if self._asked is None:
                self._asked = self.runner(self._context)
            fields = fields_of(self._asked)
            asked = self._asked.fit(drawn_batch(problem, self.config, fields, self.device))
            return asked if asked in own_reasons(self._asked) else None
        except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
            return None

    def within_graphs(self) -> "LaneUnderTest":
        """Return the lane with the longest requests of which the runner replays the largest batch.

        The same lane if the runner declines nothing, or the batch at each of 32 lengths up to the context.
        """
        if not self.runner.declines or not self._declines_at(None):
            return self
        context = self.config.context
        step = -(-context // 32)
        replayed = next((n for n in reversed(range(0, context, step)) if not self._declines_at(n)), None)
        if replayed is None:
            return self
        longer = range(replayed + 1, min(replayed + step, context))
        most = replayed + bisect_left(longer, 1, key=self._declines_at)
        return self.like(replace(self.config, most_cached=most))

    def _declines_at(self, most_cached: int | None) -> bool:
        """Return whether the runner declines the largest batch of requests with so many cached keys."""
        return self.declined(corner(replace(self.config, most_cached=most_cached))) is not None

    @property
    def steps_by_reason(self) -> Counter[EagerReason | None]:
        """The number of the experiment's steps: replays under None, declined ones by their reason."""
        return self._steps() - self._before

    def _steps(self) -> Counter[EagerReason | None]:
        """Count the steps of its rigs, those of earlier experiments too."""
        counted: Counter[EagerReason | None] = Counter()
        for rig in self._counted:
            counted[None] += rig.lane.stats.replays
            for (_, reason), number in rig.lane.stats.eager.items():
                if reason in rig.declines:
                    counted[reason] += number
        return counted

    # -- what it captures ------------------------------------------------------------------------

    @property
    def eager_attention(self) -> bool:
        """Whether attention is an eager call between segments of a graph."""
        return self.runner.eager_attention

    @property
    def graph_support(self) -> GraphSupport:
        """The declared graph support of the backend."""
        return self.backend.capabilities.graph_support

    def default_shapes(self, most: int) -> tuple[GraphShape, ...]:
        """Return the shapes of a runner for steps of ``most`` requests that is given no sizes to capture."""
        return planned_shapes(self._default_runner(most))

    def fit_default(self, most: int, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the answer of ``fit`` of a runner with the shapes of `default_shapes`."""
        return self._default_runner(most).fit(batch)

    def _default_runner(self, most: int) -> GraphRunner:
        limits = replace(self.config.limits, max_bs=most, max_num_tokens=most * 8)
        ratio = RunnerContext(self.device, self.backend.capabilities, limits).max_padding_ratio
        context = replace(
            self._context, limits=limits, batch_sizes=None, token_counts=None, max_padding_ratio=ratio
        )
        return self.runner(context)

    @property
    def captures_nothing(self) -> bool:
        """Whether the runner has no shape to capture; False if it cannot be asked for its shapes."""
        try:
            return not self.runner(self._context).shapes()
        except (Exception, SystemExit):  # noqa: BLE001  the capture of the lane reports the error
            return False

    @property
    def no_graphs_declared(self) -> str | None:
        """The declaration that excludes graphs of this lane; None if graphs are declared."""
        support = self.backend.capabilities.graph_support
        needed = support_of(self.runner, self.config.case)
        if not declares_graphs(self.runner):
            return f"no graphs: {self.runner.__name__} declares that it captures nothing"
        if not support.covers(needed):
            return f"no graphs: needs graph support {needed.value!r}, declared {support.value!r}"
        return None

    @property
    def ways(self) -> tuple[Way, ...]:
        """The possible producers of metadata: the graph, and the replay hook if it writes any slot.

        A backend that records all metadata work may have a replay hook without work. Metadata of eager calls
        is made by neither: there is one way.
        """
        if self.eager_attention:
            return ("graph",)
        if not self._ways:
            both = self.rig().lane.backend.records_metadata and self._hook_writes()
            self._ways.append(("graph", "hook") if both else ("graph",))
        return self._ways[0]

    def _hook_writes(self) -> bool:
        """Return whether the replay hook writes any slot of the backend."""
        rig = self.rig("hook")
        del self._rigs["hook", False]  # experiments get one without poison
        rig.serve_declined(rig.config.shapes[0])
        batch = rig.dummy(rig.config.shapes[0])
        rig.step(Problem(self.config.case, [], 0), batch=batch, fill=poison_slot)
        return any(
            slot.buffer is not None and is_due(slot) and not bool(is_poison(slot.buffer).all())
            for slot in rig.slots
            if not slot.copy_from_fb and slot.post_fill is None and slot.buffer is not None
        )

    @torch.inference_mode()
    def answer(self, rig: Subject, problem: Problem) -> Answer:
        """Return the oracle's answer for a batch, computed once."""
        known = self._answers.get(id(problem))
        if known is None or known[0] is not problem:
            known = self._answers[id(problem)] = problem, rig.answer(problem)
        return known[1]

    def checked_classes(self) -> Iterator[type[Any]]:
        """Yield the classes of the checked plugins, with their bases."""
        yield from (self.runner if self.kind == "runner" else self.backend).__mro__
        if self.kind == "attention_backend" and self.runner not in _KITS:
            yield from self.runner.__mro__  # the runner of a pair

    def raised_at(self, error: BaseException) -> str | None:
        """Return the file, line and function of the checked plugin that raised an error or a cause of it.

        None if no frame of the plugin comes after the suite's last frame: something else raised it.
        """
        classes = {*self.checked_classes()} - {*_KITS, abc.ABC, object}
        files = {file for cls in classes for file in _files_of(cls)}
        packages = {cls.__module__.partition(".")[0] for cls in classes} - _OWN_PACKAGES
        for each in causes(error):
            last = None
            for frame, line in traceback.walk_tb(each.__traceback__):
                file, name = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
                if file in files or name.partition(".")[0] in packages:
                    last = f"{short_path(file)}:{line} in {frame.f_code.co_qualname}"
                elif _SUITE in Path(file).parents:
                    last = None
            if last is not None:
                return last
        return None


def _files_of(cls: type[Any]) -> Iterator[str]:
    """Yield the files of a class and of its methods, which need not be in a module that was imported."""
    with contextlib.suppress(TypeError, OSError):
        yield inspect.getsourcefile(cls) or inspect.getfile(cls)
    for value in vars(cls).values():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if inspect.isfunction(function):
            yield function.__code__.co_filename


def caches_of(lane: LaneUnderTest) -> Iterator[Callable[[], object]]:
    """Yield a function that clears it, for each cache of tensors in the plugin's packages and classes."""
    classes = [*lane.backend.__mro__, *lane.runner.__mro__, *lane.checked_classes()]
    packages = {c.__module__.partition(".")[0] for c in classes} - {
        "graphpact",
        "torch",
        "builtins",
        "abc",
    }
    spaces: list[Mapping[str, Any]] = [
        vars(module)
        for name, module in [*sys.modules.items()]
        if module is not None and name.partition(".")[0] in packages
    ]
    spaces += [vars(c) for c in classes]
    for function in [f for c in classes for f in vars(c).values() if inspect.isfunction(f)]:
        spaces.append(inspect.getclosurevars(function).nonlocals)
    cached = {id(v): v for space in spaces for v in [*space.values()] if hasattr(type(v), "cache_clear")}
    for function in cached.values():
        if _holds_tensors(function):
            yield function.cache_clear


def _holds_tensors(cached: Any) -> bool:
    """Return whether a `functools.lru_cache` holds tensors; other values use no device memory."""
    return any(tensors_of(each) for each in gc.get_referents(cached))
