"""`LaneUnderTest`: the checked backend and runner in one configuration, with the tools of experiments.

Does not: draw batches, or run all experiments (see `graphpact_conformance.suite`).
"""

import gc
import inspect
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from graphpact.attention import AttentionBackend, ProviderName
from graphpact.buffers import BoundSlot
from graphpact.errors import GraphpactError, place_of
from graphpact.graphs import GraphDriver
from graphpact.lane import PactMode
from graphpact.runners import GraphRunner
from graphpact.shapes import EagerReason, GraphShape
from graphpact_conformance.oracle import Answer
from graphpact_conformance.problems import CONTEXT, Config, Problem, corner, declares_graphs, support_of
from graphpact_conformance.reference import (
    PaddedReferenceBackend,
    ReferenceBackend,
    ReferenceRunner,
    SegmentsRunner,
)
from graphpact_conformance.results import Finding
from graphpact_conformance.rig import (
    CPU,
    Rig,
    StepRecord,
    drawn_batch,
    fields_of,
    own_reasons,
    runner_context,
)
from graphpact_conformance.rules import RULES
from graphpact_tape.guard import is_due
from graphpact_tape.host import tensors_of
from graphpact_tape.poison import is_poison, poison
from graphpact_tape.tape import TapeDriver

Way = Literal["graph", "hook"]
"""The producer of metadata: the graph, where the backend supports it, or the replay hook."""


_HERE = Path(__file__).parent
_KITS = {SegmentsRunner, *PaddedReferenceBackend.__mro__, *ReferenceRunner.__mro__}


_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
"""Addresses, which differ from run to run."""


class CannotCaptureError(Exception):
    """A lane could not be captured, so experiments that need its graphs cannot run."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(message_of(error))
        self.error = error


@dataclass
class LaneUnderTest:
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
    """

    config: Config
    backend: type[AttentionBackend] = ReferenceBackend
    runner: type[GraphRunner] = ReferenceRunner
    kind: Literal["attention_backend", "runner"] = "attention_backend"
    provider: ProviderName = "auto"
    device: torch.device = CPU
    driver: type[GraphDriver] | None = None
    listed: frozenset[str] | None = None
    _rigs: dict[tuple[Way, bool], Rig] = field(default_factory=dict, init=False)
    _answers: dict[int, tuple[Problem, Answer]] = field(default_factory=dict, init=False)
    _ways: tuple[Way, ...] | None = field(default=None, init=False)
    _asked: GraphRunner | None = field(default=None, init=False)

    # -- rigs ------------------------------------------------------------------------------------

    def build(
        self,
        way: Way = "graph",
        *,
        guarded: bool = False,
        pact: PactMode = "off",
        capture: bool = True,
    ) -> Rig:
        """Return a new rig.

        Args:
            way: The producer of metadata.
            guarded: See `Rig`; the tape is strict if set, otherwise fast and traced.
            pact: See `Rig`.
            capture: See `Rig`.
        """
        driver: Callable[[torch.device], GraphDriver] = partial(TapeDriver, traced=True)
        if guarded:
            driver = partial(TapeDriver, strict=True)
        elif self.driver is not None:
            driver = self.driver
        return Rig(
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
        )

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
            except (Exception, SystemExit) as error:
                raise CannotCaptureError(error) from error
        return self._rigs[key]

    def anew(self, listed: Iterable[str] | None = None) -> "LaneUnderTest":
        """Return the same lane without rigs, so that an experiment sees no state of another one.

        Caches of the plugin's functions are cleared too.

        Args:
            listed: The rules that the next experiment lists; this lane's by default.
        """
        for clear in caches_of(self):
            clear()
        lane = self.like(self.config)
        lane._ways = self._ways  # noqa: SLF001  found once for all trials of an experiment
        if listed is not None:
            lane.listed = frozenset(listed)
        return lane

    def like(self, config: Config) -> "LaneUnderTest":
        """Return a lane of the same plugins in another configuration, without rigs."""
        return replace(self, config=config)

    # -- batches that the runner leaves to eager steps -------------------------------------------

    def declined(self, problem: Problem) -> EagerReason | None:
        """Return the declared reason with which the runner leaves a batch to an eager step.

        None if it replays the batch, has another reason, or cannot be asked; experiments report the last two.
        """
        if not self.runner.declines:
            return None
        try:
            if self._asked is None:
                context = runner_context(self.config, self.backend.capabilities, self.device, self.runner)
                self._asked = self.runner(context)
            fields = fields_of(self._asked)
            asked = self._asked.fit(drawn_batch(problem, self.config, fields, self.device))
            return asked if asked in own_reasons(self._asked) else None
        except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
            return None

    def within_graphs(self) -> "LaneUnderTest":
        """Return the lane with the longest requests of which the runner replays the largest batch.

        The same lane if the runner declines nothing, or its reasons do not depend on lengths.
        """
        if not self.runner.declines or self.declined(corner(self.config)) is None:
            return self
        shorter = (replace(self.config, most_cached=most) for most in reversed(range(CONTEXT)))
        served = (config for config in shorter if self.declined(corner(config)) is None)
        return self.like(next(served, self.config))

    @property
    def steps_by_reason(self) -> Counter[EagerReason | None]:
        """The number of steps of the experiment's rigs: replays under None, declined ones by their reason."""
        counted: Counter[EagerReason | None] = Counter()
        for rig in self._rigs.values():
            counted[None] += rig.lane.stats.replays
            for (_, reason), number in rig.lane.stats.eager.items():
                if reason in rig.declines:
                    counted[reason] += number
        return counted

    # -- what it captures ------------------------------------------------------------------------

    @property
    def captures_nothing(self) -> bool:
        """Whether the runner has no shape to capture; False if it cannot be asked for its shapes."""
        context = runner_context(self.config, self.backend.capabilities, self.device, self.runner)
        try:
            return not self.runner(context).shapes()
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
        if self.runner.eager_attention:
            return ("graph",)
        if self._ways is None:
            both = self.rig().lane.backend.records_metadata and self._hook_writes()
            ways: tuple[Way, ...] = ("graph", "hook") if both else ("graph",)
            self._ways = ways
            return ways
        return self._ways

    def _hook_writes(self) -> bool:
        """Return whether the replay hook writes any slot of the backend."""
        self.rig("hook")  # raises where the lane cannot be captured
        rig = self.build("hook")
        rig.serve_declined(rig.config.shapes[0])
        batch = rig.runner.dummy(rig.config.shapes[0])
        rig.step(Problem(self.config.case, [], 0), batch=batch, fill=poison_slot)
        return any(
            slot.buffer is not None and is_due(slot) and not bool(is_poison(slot.buffer).all())
            for slot in rig.registry
            if not slot.copy_from_fb and slot.post_fill is None and slot.buffer is not None
        )

    def body_of(self, rig: Rig) -> str:
        """Return the name of the backend's method that writes the metadata of a replay, for texts."""
        if self.runner.eager_attention:
            return "`init_metadata_eager`"
        if not rig.lane.backend.records_metadata:  # otherwise the graph runs `fill_metadata`
            for name in ("init_metadata_replay", "refresh_metadata"):
                if getattr(self.backend, name) is not getattr(AttentionBackend, name):
                    return f"`{name}`"
        return "`fill_metadata`"

    @torch.inference_mode()
    def answer(self, rig: Rig, problem: Problem) -> Answer:
        """Return the oracle's answer for a batch, computed once."""
        known = self._answers.get(id(problem))
        if known is None or known[0] is not problem:
            known = self._answers[id(problem)] = problem, rig.answer(problem)
        return known[1]

    def raised(self, error: BaseException) -> bool:
        """Return whether the checked plugin raised an error: its frame comes after the suite's last one."""
        checked = self.runner if self.kind == "runner" else self.backend
        files = {
            inspect.getsourcefile(cls)
            for cls in checked.__mro__
            if cls not in _KITS and cls.__module__ not in ("abc", "builtins")
        }
        last = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            file = frame.f_code.co_filename
            if file in files or Path(file).parent == _HERE or _HERE in Path(file).parents:
                last = file
        return last in files

    # -- findings --------------------------------------------------------------------------------

    def finding(
        self,
        rule: str | None,
        *,
        expected: str,
        actual: str,
        field: str | None = None,
        hook: str | None = None,
        step: StepRecord | None = None,
        problem: Problem | None = None,
        help: str | None = None,  # noqa: A002  the field of reports
    ) -> Finding:
        """Return a finding about this lane.

        Where attention leaves the graphs, the hooks of metadata are `AttentionBackend.init_metadata_eager`.
        """
        if self.runner.eager_attention and hook in ("init_metadata_capture", "init_metadata_replay"):
            hook = "init_metadata_eager"
        if step is not None:
            problem = step.problem
        shape = None if step is None or step.shape is None else str(step.shape)
        return Finding(
            rule=rule,
            hook=hook,
            field=field,
            expected=_ADDRESS.sub("0x…", expected),
            actual=_ADDRESS.sub("0x…", actual),
            batch=None if problem is None else problem.words,
            shape=shape,
            help=help,
        )

    def of_error(
        self,
        error: BaseException,
        *,
        expected: str,
        rule: str | None = None,
        step: StepRecord | None = None,
        problem: Problem | None = None,
        hook: str | None = None,
        help: str | None = None,  # noqa: A002  the field of reports
    ) -> Finding:
        """Return a finding about an error, with the error's own rule and hint, otherwise with the given ones.

        A rule that the current experiment does not list is ignored; other experiments check it.
        """
        own = next((e.hint for e in causes(error) if isinstance(e, GraphpactError)), None)
        named = rule_of(error)
        if self.listed is not None and named not in self.listed:
            named = None
        return self.finding(
            named or rule,
            expected=expected,
            actual=message_of(error),
            step=step,
            problem=problem,
            hook=hook or _hook_of(step),
            help=own or help,
        )


def caches_of(lane: LaneUnderTest) -> Iterator[Callable[[], object]]:
    """Yield a function that clears it, for each cache of tensors in the plugin's packages and classes."""
    classes = [c for cls in (lane.backend, lane.runner) for c in cls.__mro__]
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
    cached = {id(v): v for space in spaces for v in [*space.values()] if hasattr(v, "cache_clear")}
    for function in cached.values():
        if _holds_tensors(function):
            yield function.cache_clear


def _holds_tensors(cached: Any) -> bool:
    """Return whether a `functools.lru_cache` holds tensors; other values use no device memory."""
    return any(tensors_of(each) for each in gc.get_referents(cached))


def planned_shapes(runner: GraphRunner) -> tuple[GraphShape, ...]:
    """Return the shapes that a runner captures, the smallest first; empty if it captures nothing."""
    return tuple(sorted(runner.shapes(), key=lambda s: (s.num_tokens, s.batch_size, s.variant)))


def poison_slot(slot: BoundSlot) -> None:
    """Fill a slot with poison."""
    if slot.buffer is not None:
        poison(slot.buffer)


def reset_slot(slot: BoundSlot) -> None:
    """Reset a slot to its initial value, so that it holds nothing of earlier steps."""
    if slot.buffer is not None:
        slot.buffer.fill_(slot.initial_value)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and its chain of causes, the last first."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def rule_of(error: BaseException) -> str | None:
    """Return the rule that an error or one of its causes names; None if there is none."""
    for each in causes(error):
        rule = getattr(each, "rule", None)
        if rule in RULES:
            return str(rule)
    return None


def message_of(error: BaseException) -> str:
    """Return the first line of an error's message, with the type for errors outside graphpact.

    An error without a message is told with its place instead.
    """
    if isinstance(error, GraphpactError):
        return error.message.strip().splitlines()[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else f'no message, at {place_of(error)}'}"


def _hook_of(step: StepRecord | None) -> str | None:
    if step is None:
        return None
    return {
        "prepare": "prepare_replay",
        "metadata": "init_metadata_replay",
        "replay": "init_metadata_replay",
    }.get(step.stage)
