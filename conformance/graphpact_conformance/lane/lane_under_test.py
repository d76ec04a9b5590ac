"""`LaneUnderTest`: the checked backend and runner in one configuration. It makes rigs and findings.

Each experiment gets a lane. Code of another engine is checked in a lane whose backend calls the code
(`ForeignCode`).

Does not: run a step (see `graphpact_conformance.lane.rig`), or judge one (see ``experiments``).
"""

import copy
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from graphpact.attention import AttentionBackend, GraphSupport, ProviderName
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import SharedBuffers
from graphpact.errors import GraphpactError
from graphpact.graphs import GraphDriver
from graphpact.lane import PactMode
from graphpact.runners import GraphRunner, RunnerContext
from graphpact.shapes import EagerReason, GraphShape
from graphpact_conformance.draws.batches import Drawn, draw
from graphpact_conformance.draws.cases import Case, declares_graphs, support_of
from graphpact_conformance.draws.chosen_batches import corner
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.draws.whole_requests import prompts_config
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.lane.rig import CPU, Rig
from graphpact_conformance.lane.runners import (
    drawn_batch,
    fields_of,
    own_reasons,
    planned_shapes,
    runner_context,
)
from graphpact_conformance.lane.snapshots import poison_slot
from graphpact_conformance.lane.tested_code import KITS, PLUGIN, ForeignCode, caches_of, raised_at
from graphpact_conformance.oracle import Answer
from graphpact_conformance.records.global_state import DRAWS, StateWatch
from graphpact_conformance.records.plans import PlanVerdict, PlanWatch
from graphpact_conformance.records.raised import CannotCaptureError, causes, message_of, need_of, rule_of
from graphpact_conformance.records.steps import StepRecord
from graphpact_conformance.results import INVARIANT, Finding
from graphpact_conformance.rules import RULES
from graphpact_tape.poison import is_poison, poison_of
from graphpact_tape.strict_observer import is_due
from graphpact_tape.tape import TapeDriver
from graphpact_tape.writes import write

Way = Literal["graph", "hook"]
"""The producer of metadata: the graph, where the backend supports it, or the replay hook."""

_HOOKS = frozenset(hook for rule in RULES.values() for hook in rule.hooks)
_POISON = str(poison_of(torch.int64))
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
"""Addresses, which differ from run to run."""


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
        watch: Charges changes of the process's state to the plugin's calls.
        plans: Notes broken invariants of the backend's plans after each preparation.
        foreign: Code of another engine that the backend calls.
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
    plans: PlanWatch = field(default_factory=PlanWatch, compare=False, repr=False)
    foreign: ForeignCode = PLUGIN
    _rigs: dict[tuple[Way, bool], Rig] = field(default_factory=dict, init=False)
    _answers: dict[int, tuple[Problem, Answer]] = field(default_factory=dict, init=False)
    _drawn: dict[int, list[Drawn]] = field(default_factory=dict, init=False)  # by seed
    _ways: list[tuple[Way, ...]] = field(default_factory=list, init=False)
    _runner: GraphRunner | None = field(default=None, init=False)
    _counted: list[Rig] = field(default_factory=list, init=False)  # of all lanes made by `like`
    _before: Counter[EagerReason | None] = field(default_factory=Counter, init=False)

    # -- rigs ------------------------------------------------------------------------------------

    def build(
        self,
        way: Way = "graph",
        *,
        strict: bool = False,
        pact: PactMode = "off",
        capture: bool = True,
        copies_attention: bool = False,
        share_pool: SharedBuffers | None = None,
        memory: Rig | None = None,
    ) -> Rig:
        """Return a new rig.

        Args:
            way: The producer of metadata.
            strict: See `Rig`; the tape is strict if set, otherwise fast and traced.
            pact: See `Rig`.
            capture: See `Rig`.
            copies_attention: See `Rig`.
            share_pool: See `Rig`.
            memory: See `Rig`.
        """
        driver: Callable[[torch.device], GraphDriver] = partial(TapeDriver, traced=True)
        if strict:
            driver = partial(TapeDriver, strict=True)
        elif self.driver is not None:
            driver = self.driver
        return Rig(
            self.config,
            backend=self.backend,
            runner=self.runner,
            driver=driver,
            strict=strict,
            in_graph=None if way == "graph" else False,
            provider=self.provider,
            device=self.device,
            pact=pact,
            capture=capture,
            copies_attention=copies_attention,
            watch=self.watch,
            plans=self.plans,
            share_pool=share_pool,
            kv_memory=self.foreign.kv_memory,
            oracle=self.foreign.oracle,
            memory=memory,
        )

    def build_sharing(self) -> tuple[Rig, Rig]:
        """Return two new rigs that share the memory of their inputs."""
        pool = SharedBuffers()
        return self.build(share_pool=pool), self.build(share_pool=pool)

    def rig(self, way: Way = "graph", *, strict: bool = False) -> Rig:
        """Return the experiment's rig, which is built once.

        Args:
            way: The producer of metadata.
            strict: Whether the tape is strict and the pact is checked at every replay. Otherwise the tape is
                fast and nothing is checked.

        Raises:
            CannotCaptureError: The lane cannot be captured.
        """
        key = way, strict
        if key not in self._rigs:
            try:
                with torch.inference_mode():
                    pact: PactMode = "always" if strict else "off"
                    self._rigs[key] = self.build(way, strict=strict, pact=pact)
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
        lane = replace(self, watch=StateWatch(), plans=PlanWatch())
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

        It shares only the plugin's class and module with this lane. Returns None if the plugin declares no
        other mode.
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
        config = replace(self.config, case=case, capture_shapes=(), extra_requests=0, counts=False)
        return replace(self, config=config, runner=runner).build(capture=capture), corner(config)

    def of_prompts(self, rig: Rig) -> Rig | None:
        """Return a rig that computes prompts eagerly in the memory of ``rig``; None without such a mode."""
        config = prompts_config(self.config)
        if config.case.mode not in self.backend.capabilities.modes:
            return None
        return replace(self, config=config, runner=ReferenceRunner).build(capture=False, memory=rig)

    def drawn(self, count: int, seed: int) -> list[Drawn]:
        """Return ``count`` sequences of batches for the lane; see `problems.draw`."""
        known = self._drawn.setdefault(seed, [])
        if len(known) < count:
            sequences = draw(self.config, count, seed, self.declined)
            known[:] = [Drawn(map(self.within, steps)) for steps in sequences]
        return known[:count]

    def within(self, problem: Problem) -> Problem:
        """Return a batch without the tokens of each request beyond those that foreign code may get."""
        most = self.foreign.most_tokens
        if most is None:
            return problem
        return replace(problem, requests=[replace(r, tokens=r.tokens[:most]) for r in problem.requests])

    def clear_caches(self) -> None:
        """Clear the caches of tensors in the packages and classes of the plugin."""
        for clear in caches_of([*self.backend.__mro__, *self.runner.__mro__, *self.checked_classes()]):
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
            if self._runner is None:
                self._runner = self.runner(self._context)
            fields = fields_of(self._runner)
            reason = self._runner.fit(drawn_batch(problem, self.config, fields, self.device))
            return reason if reason in own_reasons(self._runner) else None
        except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
            return None

    @property
    def steps_by_reason(self) -> Counter[EagerReason | None]:
        """The number of the experiment's steps: replays under None, declined ones by their reason."""
        return self._steps() - self._before

    def _steps(self) -> Counter[EagerReason | None]:
        """Count the steps of its rigs, including the steps of earlier experiments."""
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
            levels = f"needs graph support {needed.value!r}, declared {support.value!r}"
            return f"no graphs: {self.foreign.without_graphs or levels}"
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
        rig.serve_declined(rig.config.shapes[0])
        batch = rig.dummy(rig.config.shapes[0])
        broken = dict(self.plans.broken)
        before = [(slot.buffer, slot.buffer.clone()) for slot in rig.slots if slot.buffer is not None]
        rig.step(Problem(self.config.case, [], 0), batch=batch, fill=poison_slot)
        self.plans.broken = broken  # a hook that writes nothing makes no plan
        writes = any(
            slot.buffer is not None and is_due(slot) and not bool(is_poison(slot.buffer).all())
            for slot in rig.slots
            if not slot.copy_from_fb and slot.post_fill is None and slot.buffer is not None
        )
        for buffer, contents in before:  # experiments get a rig without poison
            write(buffer, contents)
        rig.serve_declined(None)
        return writes

    @torch.inference_mode()
    def answer(self, rig: Rig, problem: Problem) -> Answer:
        """Return the oracle's answer for a batch, computed once."""
        known = self._answers.get(id(problem))
        if known is None or known[0] is not problem:
            known = self._answers[id(problem)] = problem, rig.answer(problem)
        return known[1]

    def checked_classes(self) -> Iterator[type[Any]]:
        """Yield the classes of the checked plugins, with their bases."""
        yield from (self.runner if self.kind == "runner" else self.backend).__mro__
        if self.kind == "attention_backend" and self.runner not in KITS:
            yield from self.runner.__mro__  # the runner of a pair
        yield from self.foreign.classes(self.backend)

    # -- findings --------------------------------------------------------------------------------

    def raised_at(self, error: BaseException) -> str | None:
        """Return file, line and function of the tested code that raised an error; None for other code."""
        return raised_at(error, self.checked_classes(), self.foreign.whose)

    def hook_raised(self, step: StepRecord | None) -> bool:
        """Return whether a hook of the plugin raised in a step: then nothing else is known of the step.

        An error of a kernel in a replay is evidence of its inputs.
        """
        if step is None or step.error is None or step.stage not in ("prepare", "metadata"):
            return False
        return self.raised_at(step.error) is not None

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
        error: BaseException | None = None,
    ) -> Finding:
        """Return a finding, with the line of the plugin that raised ``error``.

        Where attention leaves the graphs, the hooks of metadata are `AttentionBackend.init_metadata_eager`.
        """
        if hook is not None:
            hook = self.foreign.hooks.get(hook, hook)
        if self.eager_attention and hook in ("init_metadata_capture", "init_metadata_replay"):
            hook = "init_metadata_eager"
        if step is not None:
            problem = step.problem
        place = None if error is None else self.raised_at(error)
        shape = None if step is None or step.shape is None else str(step.shape)
        return Finding(
            rule=rule,
            hook=hook,
            field=field,
            expected=_ADDRESS.sub("0x…", expected),
            actual=_ADDRESS.sub("0x…", actual),
            batch=None if problem is None else problem.brief,
            shape=shape,
            raised_at=place,
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

        A rule that the current experiment does not list is ignored; other experiments check it. The given
        rule is also ignored if a hook of the plugin raised the error. If a kernel refuses its inputs, its
        line is in the message.
        """
        own = next((e.hint for e in causes(error) if isinstance(e, GraphpactError)), None)
        named = rule_of(error)
        if self.listed is not None and named not in self.listed:
            named = None
        actual, place = message_of(error), self.raised_at(error)
        refuses = isinstance(error, GraphpactError) and not self.hook_raised(step)
        if refuses and place is not None:
            actual += f" ({place})"
        if _POISON in actual:
            actual += f"; {_POISON} is the suite's poison: memory that this step has not written"
        return self.finding(
            named or (None if self.hook_raised(step) else rule),
            expected=expected,
            actual=actual,
            step=step,
            problem=problem,
            hook=hook or self._hook_of(error, step),
            help=own
            or help
            or (named and f"`graphpact explain {named}` has the causes of such calls, and fixes"),
            error=None if refuses else error,
        )

    def _hook_of(self, error: BaseException, step: StepRecord | None) -> str | None:
        """Return the hook to which an error belongs: eager calls between segments are of the region."""
        hook = _hook_of(error, step)
        is_between = self.eager_attention and step is not None and step.stage == "replay"
        return "compose" if is_between and self.kind == "runner" else hook

    def of_invariant(
        self,
        verdict: PlanVerdict,
        hook: str,
        *,
        step: StepRecord | None = None,
        problem: Problem | None = None,
    ) -> Finding:
        """Return a finding about an invariant of the backend's plan that is false after a hook."""
        return self.finding(
            "GP09",
            hook=hook,
            field=verdict.name,
            expected=INVARIANT,
            actual=verdict.why,
            step=step,
            problem=problem,
            help="plan before every replay, from the lengths of this batch (plan_metadata); if the plan is"
            " right, correct the invariant in `plan_invariants`",
            error=verdict.error,
        )

    def of_plans(self) -> Iterator[Finding]:
        """Yield a finding for each invariant that was false after a preparation of this lane."""
        for each in self.plans.broken.values():
            step = None if each.problem is None else StepRecord(each.problem, shape=each.shape)
            yield self.of_invariant(each.verdict, each.hook, step=step)

    def of_changes(self) -> Iterator[Finding]:
        """Yield a finding for each change of the process's state in a call of the plugin."""
        for change in self.watch.changes.values():
            draws = DRAWS in change.names
            yield self.finding(
                "GP19",
                hook=change.call.hook,
                field=", ".join(change.names),
                expected=f"{change.before}, as before {change.call.where}",
                actual=change.after,
                help=_DRAW_HELP if draws else _SETTING_HELP,
            )


_SETTING_HELP = (
    "set it in the program, not in a plugin; where a call needs another value, restore it in a `finally`"
)
_DRAW_HELP = (
    "draw from a `torch.Generator` of the plugin: the engine samples from the default one, so draws of a"
    " plugin change its tokens"
)


def _hook_of(error: BaseException, step: StepRecord | None) -> str | None:
    """Return the hook that raised an error; else the last one of a step, None for an eager step."""
    frames = [frame for each in causes(error) for frame, _ in traceback.walk_tb(each.__traceback__)]
    called = [frame.f_code.co_name for frame in frames if frame.f_code.co_name in _HOOKS]
    if called:
        return called[-1]
    if step is None or step.shape is None:
        return None
    return {
        "prepare": "prepare_replay",
        "metadata": "init_metadata_replay",
        "replay": "init_metadata_replay",
    }.get(step.stage)
