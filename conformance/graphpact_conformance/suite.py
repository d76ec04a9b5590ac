"""The suite: the lanes of a backend or runner, and the experiments in each lane.

`examine` runs it for one plugin, in this process. `graphpact_conformance.supervise` runs each plugin in its
own process, so that a crash does not end the suite.

Does not: implement experiments, check graph drivers (see `graphpact_conformance.drivers`), or write reports.
"""

import difflib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from graphpact.attention import AttentionBackend, Capabilities
from graphpact.batch import ForwardMode
from graphpact.errors import EngineError, UnknownPluginError, UsageError, did_you_mean, place_of
from graphpact.hookspecs import CONTRACT_VERSION
from graphpact.plugins import KINDS, Kind, PluginCatalog, PluginInfo
from graphpact.runners import GraphRunner
from graphpact.shapes import EagerReason
from graphpact_conformance import coverage
from graphpact_conformance.claims import claims_of, undeclared
from graphpact_conformance.drivers.examine import examine_driver, lanes_of_driver
from graphpact_conformance.experiments import EXPERIMENTS, Experiment
from graphpact_conformance.fields import MROPE
from graphpact_conformance.global_state import seeded
from graphpact_conformance.lane_under_test import LaneUnderTest
from graphpact_conformance.merge import hints_of, of_claims
from graphpact_conformance.raised import causes, message_of
from graphpact_conformance.reference import (
    PaddedReferenceBackend,
    ReferenceBackend,
    ReferenceRunner,
    SegmentsRunner,
)
from graphpact_conformance.results import Claim, Finding, Outcome, PluginResults, Result
from graphpact_conformance.rig import planned_shapes, runner_context
from graphpact_conformance.rules import RULES, Evidence, Rule
from graphpact_conformance.scenario import RecordedLane, read
from graphpact_conformance.shrink import Steps, shrunk
from graphpact_conformance.targets import (
    TARGET_KINDS,
    Listener,
    Options,
    Size,
    Target,
    TargetKind,
    reproduce_line,
)
from graphpact_conformance.under_test import CannotCaptureError
from graphpact_conformance.world import (
    CASES,
    EMBEDS,
    SEGMENTS,
    Case,
    Config,
    cases_of,
    configs_of,
    covering,
    declares_graphs,
    plainest,
    scaled_up,
    valued,
)

LaneKind = Literal["attention_backend", "runner"]

# -- targets -----------------------------------------------------------------------------------------


def targets(names: Sequence[str], catalog: PluginCatalog) -> list[Target]:
    """Return the backends, runners and drivers with the given names, and every pair of backend and runner.

    Args:
        names: Names of plugins, ``name`` or ``kind:name``; ``driver`` is short for ``graph_driver``.
        catalog: The installed plugins.

    Raises:
        UnknownPluginError: No backend, no runner and no driver has that name.
        PluginError: The plugin is rejected, or two distributions offer it.
    """
    found: list[Target] = []
    for name in dict.fromkeys(names):
        kind, bare = _kind_of(name, catalog)
        catalog.select(kind, bare)
        if Target(kind, bare) not in found:
            found.append(Target(kind, bare))
    backends = [t for t in found if t.kind == "attention_backend"]
    runners = [t for t in found if t.kind == "runner"]
    pairs = [
        Target("attention_backend", b.name, r.name)
        for b in backends
        for r in runners
        if _can_pair(catalog, b.name, r.name)
    ]
    return [*backends, *runners, *pairs, *(t for t in found if t.kind == "graph_driver")]


def _kind_of(name: str, catalog: PluginCatalog) -> tuple[TargetKind, str]:
    asked, _, bare = name.rpartition(":")
    if asked:
        asked = "graph_driver" if asked == "driver" else asked
        for kind in TARGET_KINDS:
            if asked == kind:
                return kind, bare
        raise _cannot_check(name, asked)
    offers = [kind for kind in TARGET_KINDS if any(i.name == name for i in catalog.infos(kind))]
    if len(offers) == 1:
        return offers[0], name
    if offers:
        raise UsageError(
            f"{name!r} is the name of " + " and of ".join(_A_PLUGIN[kind] for kind in offers),
            hint="write " + " or ".join(f"{kind}:{name}" for kind in offers),
        )
    others = [kind for kind in KINDS if any(i.name == name for i in catalog.infos(kind))]
    if others:
        raise _cannot_check(name, others[0])
    there = [info for kind in TARGET_KINDS for info in catalog.infos(kind)]
    near = did_you_mean(name, [info.name for info in there])
    raise UnknownPluginError(
        f"no attention backend, runner or graph driver {name!r}; installed: "
        + (", ".join(str(info) for info in there) or "none"),
        hint=f"did you mean {near!r}?" if near else "`graphpact plugins` lists what is installed",
    )


_A_PLUGIN: dict[TargetKind, str] = {
    "attention_backend": "an attention backend",
    "runner": "a runner",
    "graph_driver": "a graph driver",
}


def _cannot_check(name: str, kind: str) -> UsageError:
    """Return the error for a plugin of a kind that the suite does not check."""
    hint = "only attention backends, runners and graph drivers are checked: give the name of one"
    if kind not in KINDS:
        hint = "write KIND:NAME, with the kind attention_backend, runner or driver"
    return UsageError(f"{name!r}: plugins of kind {kind!r} cannot be checked", hint=hint)


def _can_pair(catalog: PluginCatalog, backend: str, runner: str) -> bool:
    """Return whether an engine gives this runner and this backend to one lane, for graphs."""
    served = catalog.select("runner", runner)
    can = catalog.select("attention_backend", backend).capabilities
    captures = declares_graphs(served) and can.graph_support.covers(served.needs)
    return bool(served.modes & can.modes) and captures


# -- lanes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedLane:
    """One lane of a run.

    Args:
        lane: The lane to build.
        is_full: Whether all experiments may run in it, or only those of outputs; see `has_all`.
        suffix: Suffix of its name, after the configuration.
        names: Names of the plugins for the command line.
        contract: The contract version of the plugin.
        recorded: The recorded lane whose steps run in it; None for drawn steps.
    """

    lane: LaneUnderTest
    is_full: bool
    suffix: str = ""
    names: str = ""
    contract: int = CONTRACT_VERSION
    recorded: RecordedLane | None = None

    def __str__(self) -> str:
        return f"{self.lane.config}{self.suffix}"

    @property
    def has_all(self) -> bool:
        """Whether all experiments run in it. A strict driver would copy a high cache: too much memory."""
        return self.is_full and not self.lane.config.high

    @property
    def is_pair(self) -> bool:
        """Whether a backend is checked with a runner that is not the suite's own, on drawn steps."""
        lane = self.lane
        has_partner = lane.kind == "attention_backend" and lane.runner is not ReferenceRunner
        return has_partner and self.recorded is None


_PROBES = "undeclared capabilities"
"""Name of the work that tries undeclared capabilities."""


def lanes_of(target: Target, options: Options, catalog: PluginCatalog) -> list[PlannedLane]:
    """Return the lanes in which a backend or a runner is checked, from its declared capabilities."""
    device = torch.device(options.device)
    if target.kind == "attention_backend":
        backend = catalog.select("attention_backend", target.name)
        runner: type[GraphRunner] = ReferenceRunner
        if target.partner is not None:
            runner = catalog.select("runner", target.partner)
        return plan_lanes(
            backend,
            runner,
            options,
            device=device,
            is_pair=target.partner is not None,
            drivers=catalog,
        )
    return plan_lanes(
        ReferenceBackend,
        catalog.select("runner", target.name),
        options,
        device=device,
        kind="runner",
        drivers=catalog,
    )


def recorded_lanes(
    backend: type[AttentionBackend],
    runner: type[GraphRunner],
    options: Options,
    *,
    device: torch.device = torch.device("cpu"),  # noqa: B008  a constant
    kind: LaneKind = "attention_backend",
) -> list[PlannedLane]:
    """Return one lane for each lane of the recorded scenario that the plugins' declarations allow.

    Args:
        backend: The backend.
        runner: The runner; the suite's own takes the recorded shapes.
        options: Options of the run, with a scenario.
        device: Device of the lanes.
        kind: The kind that is checked.

    Raises:
        UsageError: The file is no recording.
    """
    plans = []
    for recorded in read(Path(options.scenario or "")):
        config = recorded.config(backend.capabilities, device)
        if config is None or config.case.mode not in runner.modes & backend.capabilities.modes:
            continue
        if config.case.frozen != runner.frozen_kv:
            continue
        own: type[GraphRunner] = ReferenceRunner.of(config)
        sized: Config = config
        if runner is not ReferenceRunner:
            own, sized = runner, _with_shapes_of(runner, config, backend, device)
        lane = LaneUnderTest(sized, backend, own, kind, device=device)
        plans.append(PlannedLane(lane, is_full=True, recorded=recorded))
    return [plan for plan in plans if _is_asked(plan, options)]


def _is_asked(plan: PlannedLane, options: Options) -> bool:
    return not options.lanes or any(fnmatchcase(str(plan), glob) for glob in options.lanes)


def checks_by_lane(target: Target, options: Options, catalog: PluginCatalog) -> dict[str, list[str]]:
    """Return the names of the experiments of each lane of a plugin; of a driver, those of its checks."""
    if target.kind == "graph_driver":
        driver = catalog.select("graph_driver", target.name)
        return {
            str(lane): [check.name for check in lane.checks(options)]
            for lane in lanes_of_driver(driver, options)
        }
    return {
        str(plan): [e.name for e in experiments_of(plan, options) if captures or not e.needs_graphs]
        for plan in lanes_of(target, options, catalog)
        for captures in [not plan.lane.captures_nothing]
    }


def require_lanes(found: Iterable[Target], options: Options, catalog: PluginCatalog) -> None:
    """Check that each pattern of ``options.lanes`` matches a lane of at least one target.

    Raises:
        UsageError: A pattern matches none; the hint has the nearest names.
    """
    if not options.lanes:
        return
    every = replace(options, lanes=())
    targets = [*found]
    names = list(dict.fromkeys(lane for t in targets for lane in checks_by_lane(t, every, catalog)))
    for pattern in options.lanes:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        bare = pattern.strip("*")
        near = [name for name in names if bare and bare.lower() in name.lower()]
        kinds = [name.partition("-")[0] for name in names]
        near = near or difflib.get_close_matches(bare, [*names, *dict.fromkeys(kinds)], cutoff=0.5)
        raise UsageError(
            f"no lane of {', '.join(map(str, targets))} matches {pattern!r}; there are {len(names)}",
            hint=f"the nearest: {', '.join(_as_patterns(near or names)[:_MOST_NEAR])}"
            "; `graphpact check NAME --list` lists the lanes of a size",
        )


_MOST_NEAR = 6
"""Names of lanes in the answer to a pattern without a match."""


def _as_patterns(names: Iterable[str]) -> list[str]:
    """Return each name once, quoted; a kind of step, which begins several names, as a pattern."""
    return [repr(name if "-" in name else f"{name}-*") for name in dict.fromkeys(names)]


def plan_lanes(
    backend: type[AttentionBackend],
    runner: type[GraphRunner],
    options: Options,
    *,
    device: torch.device = torch.device("cpu"),  # noqa: B008  a constant
    kind: LaneKind = "attention_backend",
    is_pair: bool = False,
    drivers: PluginCatalog | None = None,
    values: Sequence[str] | None = None,
) -> list[PlannedLane]:
    """Return the lanes of a backend and a runner, one of which may be the suite's own.

    Args:
        backend: The backend.
        runner: The runner.
        options: Options of the run.
        device: Device of the lanes.
        kind: The kind that is checked.
        is_pair: Whether both are checked.
        drivers: Catalog of drivers, for the default driver of a checked runner and for CUDA graphs on a GPU;
            None for the tape only.
        values: None for the lanes of a run. Otherwise unusual values of scale: the lanes are the plain ones
            of each kind of step with these values; see `graphpact_conformance.world.valued`.
    """
    if options.scenario is not None:
        return recorded_lanes(backend, runner, options, device=device, kind=kind)
    can = backend.capabilities
    modes = runner.modes & can.modes
    cases = cases_of(runner)
    if kind == "runner":
        cases = (*cases, EMBEDS)
    elif runner is ReferenceRunner:
        cases = (*cases, SEGMENTS)
    configs = [
        config
        for config in configs_of(backend.capabilities, device, cases)
        if config.case.mode in modes or config.case.lane_mode in modes
    ]
    if runner is not ReferenceRunner:
        configs = [c for c in configs if not c.case.embeds or takes(_EMBEDS, runner, c, can, device)]
    plans = []
    for drawn, is_full in _choose(configs, can, options.size, values, kind=kind, is_pair=is_pair):
        chosen = _with_fields_of(runner, drawn, can, device)
        config = chosen if runner is ReferenceRunner else _with_shapes_of(runner, chosen, backend, device)
        own = SegmentsRunner if config.case.segments else runner
        partner = backend
        if kind == "runner" and runner.eager_attention and config.case.mode is ForwardMode.MIXED:
            partner = PaddedReferenceBackend  # other lanes have the live tokens alone
        lane = LaneUnderTest(config, partner, own, kind, device=device)
        plans.append(PlannedLane(lane.within_graphs(), is_full))
    plans = _different(plans)  # without its fields a lane may be another one
    has_own = kind == "runner" and runner.driver is not None and options.size != "quick"
    if drivers is not None and runner.driver is not None and has_own and plans:
        driver = drivers.select("graph_driver", runner.driver)
        if driver.unavailable(device) is None:
            lane = replace(plans[0].lane, driver=driver)
            plans.append(PlannedLane(lane, is_full=False, suffix=f"-{runner.driver}"))
    if drivers is not None and device.type == "cuda":
        cuda = drivers.select("graph_driver", "cuda")
        plans += [
            PlannedLane(replace(plan.lane, driver=cuda), is_full=False, suffix="-cuda")
            for plan in plans
            if plan.lane.driver is None
        ]
    return [plan for plan in plans if _is_asked(plan, options)]


_EMBEDS = {"input_embeds", MROPE}


def takes(
    names: Collection[str],
    runner: type[GraphRunner],
    config: Config,
    can: Capabilities,
    device: torch.device,
) -> bool:
    """Return whether a runner declares slots for optional fields where its context asks for them.

    A lane refuses batches with a field for which its runner declares none. True if it cannot be asked.
    """
    try:
        slots = runner(runner_context(config, can, device, runner)).slots()
        return {*names} <= {slot.name for slot in slots}
    except Exception:  # noqa: BLE001  the capture of the lane reports the error
        return True


def _different(plans: Iterable[PlannedLane]) -> list[PlannedLane]:
    """Return the first lane of each name."""
    found: dict[str, PlannedLane] = {}
    for plan in plans:
        found.setdefault(str(plan), plan)
    return [*found.values()]


def _with_fields_of(
    runner: type[GraphRunner], config: Config, can: Capabilities, device: torch.device
) -> Config:
    """Return a configuration without optional fields if the runner declares no slots where it is asked."""
    if not config.fields or takes({MROPE}, runner, config, can, device):
        return config
    return replace(config, fields=False)


def _with_shapes_of(
    runner: type[GraphRunner],
    config: Config,
    backend: type[AttentionBackend],
    device: torch.device,
) -> Config:
    """Return a configuration with the shapes that a runner captures by default."""
    context = runner_context(config, backend.capabilities, device, runner)
    try:
        shapes = planned_shapes(runner(context))
    except Exception:  # noqa: BLE001  the capture of the lane reports the error
        return config
    return config if list(shapes) == list(config.shapes) else replace(config, capture_shapes=shapes)


def _choose(
    configs: Sequence[Config],
    capabilities: Capabilities,
    size: Size,
    values: Sequence[str] | None,
    *,
    kind: TargetKind,
    is_pair: bool,
) -> list[tuple[Config, bool]]:
    """Return the configurations of a run, each with whether all experiments run in it.

    Each kind of step has one plain lane with all experiments; in a quick run mixed and idle batches and trees
    have only those of outputs. Further lanes have every value of every dimension, and in longer runs every
    pair of values of two. The unusual lanes of a normal run, of which all experiments run in two, have the
    unusual value of every dimension of scale; that of a runner, which does not see layers, has equal ones. A
    runner, which declares the slots of optional fields, has a lane with them of each kind of step.

    Args:
        configs: All lanes with plain values of scale.
        capabilities: Of the backend.
        size: Size of the run.
        values: See `plan_lanes`.
        kind: The kind of the checked plugin.
        is_pair: Whether it is checked with a partner.
    """
    plain = plainest(configs)
    if values is not None:
        return [(valued(config, capabilities, values), True) for config in plain]
    if is_pair:
        return [(config, size != "quick" or _is_of_its_own(config)) for config in plain]
    scaled = [] if size == "quick" else [scaled_up(c, capabilities) for c in _of_two_kinds(plain)]
    if kind == "runner":  # a ragged one would take as long as all other lanes of a runner
        scaled = [replace(config, mixed_dim=None) for config in scaled if config.case.width is not None]
    strength = 1 if kind == "runner" or size == "quick" else 2
    more = covering(configs, capabilities, [*plain, *scaled], strength=strength)
    if kind == "runner":
        have = {config.case.plain for config in (*scaled, *more) if config.fields}
        more += [replace(config, fields=True) for config in plain if config.case not in have]
    if size == "quick":
        return [*((config, _is_of_its_own(config)) for config in plain), *((c, False) for c in more)]
    full = configs if size == "thorough" else plain
    return [*((config, True) for config in [*full, *scaled]), *((config, False) for config in more)]


def _of_two_kinds(configs: Sequence[Config]) -> list[Config]:
    """Return the first lane with requests of equal widths, and the first of a ragged mode."""
    kinds = (False, True)
    firsts = [next((c for c in configs if (c.case.width is None) is ragged), None) for ragged in kinds]
    return [config for config in firsts if config is not None]


def _is_of_its_own(config: Config) -> bool:
    """Return whether no other kind of step has the same shapes or metadata layout."""
    case = config.case
    return case.branches == case.topk == 1 and case.mode not in (ForwardMode.MIXED, ForwardMode.IDLE)


# -- running -----------------------------------------------------------------------------------------


def examine(
    target: Target,
    options: Options,
    listener: Listener,
    *,
    skip: Collection[str] = (),
    part: tuple[int, int] = (0, 1),
) -> PluginResults:
    """Check a plugin against every rule in every lane, and pass each result to the listener.

    A graph driver is checked by `graphpact_conformance.drivers.examine`.

    Args:
        target: The plugin.
        options: Options of the run.
        listener: Receives work and results.
        skip: Names of work, as in `Listener.begins`, that are left out.
        part: Index of a part of the lanes, and number of parts. `merge.merged` joins their results.

    Returns:
        The results object without its list of results.

    Raises:
        PluginError: The plugin cannot be loaded.
    """
    if target.kind == "graph_driver":
        return examine_driver(target, options, listener, skip=skip, part=part)
    catalog = PluginCatalog.scan()
    info = _info(catalog, target)
    contract = _contract_of(target, catalog)
    first, parts = part
    every = [
        replace(plan, names=target.names, contract=contract) for plan in lanes_of(target, options, catalog)
    ]
    every.sort(key=lambda plan: not plan.has_all)
    is_blind = target.partner is None and not (options.only or options.lanes)
    before_last = _BLIND_RUN[target.kind] if is_blind else 0
    plans = _in_parts(every, parts, options, before_last)[first]
    shown: list[tuple[Config, bool]] = []
    ran: list[tuple[Config, set[str]]] = []
    told: list[Result] = []
    for plan in plans:
        results = list(examine_lane(plan, options, listener.begins, skip=skip))
        for result in results:
            listener.found(result)
        told += results
        shown.append((plan.lane.config, not any(r.outcome is Outcome.FAIL for r in results)))
        ran.append((plan.lane.config, _that_ran(results)))
    is_whole = target.partner is None and not (options.only or options.lanes or options.scenario)
    for result in _undeclared(target, catalog, every, options) if first == 0 else ():
        listener.found(result)
    claims: list[Claim] = []
    if target.kind == "attention_backend" and is_whole:
        cls = catalog.select("attention_backend", target.name)
        probed = []
        if options.size != "quick" and first == parts - 1 and _PROBES not in skip:
            listener.begins(_PROBES)
            probed = _probe(cls, options)
        claims = claims_of(cls, shown, probed)
        if parts == 1:
            listener.found(of_claims(claims, told))
    lanes = [plan.lane for plan in plans if not plan.lane.captures_nothing]
    drivers = ["tape", *(lane.driver.name for lane in lanes if lane.driver is not None)]
    return PluginResults(
        kind=target.kind,
        name=target.name,
        distribution=info.distribution,
        version=info.version,
        contract=info.contract,
        partner=target.partner,
        drivers=list(dict.fromkeys(drivers)) if lanes else [],
        provider=_provider(every, target),
        device=options.device,
        claims=claims,
        hints=hints_of(claims),
        not_shown=_not_shown(target, catalog, torch.device(options.device)),
        drawn=coverage.drawn(ran),
    )


def _in_parts(
    plans: Sequence[PlannedLane], parts: int, options: Options, before_last: int = 0
) -> list[list[PlannedLane]]:
    """Return the lanes in parts that end about together: the longest first, to the shortest part.

    Args:
        plans: The lanes.
        parts: Number of parts.
        options: Options of the run.
        before_last: What comes before the last part, in captured steps.
    """
    costs = [_cost(plan, options) for plan in plans]
    shared: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * (parts - 1) + [before_last]
    for at in sorted(range(len(plans)), key=costs.__getitem__, reverse=True):
        shortest = sums.index(min(sums))
        shared[shortest].append(at)
        sums[shortest] += costs[at]
    return [[plans[at] for at in sorted(part)] for part in shared]


_BLIND_RUN = {"attention_backend": 120, "runner": 40}
"""A run where the suite is not imported, in captured steps: a backend has more kinds of steps."""
_KEYS = 10_000
"""So many keys of tokens and layers take as long as one captured step, in each experiment."""


def _cost(plan: PlannedLane, options: Options) -> int:
    """Return the time of a lane in captured steps: captures take most, and attention to many keys."""
    config, experiments = plan.lane.config, experiments_of(plan, options)
    captures = sum(map(_captures, experiments))
    tokens = sum(shape.num_tokens for shape in config.shapes)
    keys = tokens * config.context * len(config.layers) * len(experiments)
    return config.case.num_steps * (captures * len(config.shapes) + keys // _KEYS)


def _captures(experiment: Experiment) -> int:
    """Return how often it captures all shapes, about: those of full depth compare two captures."""
    if experiment.depth == "full":
        return 2
    return 0 if experiment.reuses else 1


def _that_ran(results: Sequence[Result]) -> set[str]:
    """Return the names of the experiments of which a lane has a verdict."""
    judged = [r for r in results if r.outcome in (Outcome.PASS, Outcome.FAIL)]
    return {name for result in judged for name in result.check.split(", ")}


def _modes_of(target: Target, catalog: PluginCatalog) -> Collection[ForwardMode]:
    if target.kind == "runner":
        return catalog.select("runner", target.name).modes
    return catalog.select("attention_backend", target.name).capabilities.modes


def _unsupported(
    target: Target, catalog: PluginCatalog, plans: Sequence[PlannedLane], device: str
) -> Iterator[Result]:
    """Yield a result for each kind of step without a lane, with the undeclared capability."""
    there = {plan.lane.config.case for plan in plans}
    modes, can = _modes_of(target, catalog), ReferenceBackend.capabilities
    cases: tuple[Case, ...] = (*CASES, EMBEDS)
    if target.kind == "attention_backend":
        can = catalog.select("attention_backend", target.name).capabilities
        cases = (*CASES, SEGMENTS)
    for case in cases:
        if case in there:
            continue
        if case.mode not in modes:
            reason = "the mode is not declared"
        elif case.embeds:
            reason = "the runner declares no slots input_embeds and mrope_positions"
        elif case.branches > 1 and not can.trees:
            reason = "draft trees are not declared"
        elif device not in can.devices:
            reason = f"device {device} is not declared"
        else:
            reason = "no lane has the declared page sizes, dtypes, head layouts and head_dims"
        yield Result(
            rule=None,
            check="declares",
            lane=str(case),
            outcome=Outcome.UNSUPPORTED,
            reason=reason,
        )


def _undeclared(
    target: Target, catalog: PluginCatalog, plans: Sequence[PlannedLane], options: Options
) -> Iterator[Result]:
    """Yield a result for each lane that is missing because the plugin does not declare what it needs."""
    if not _modes_of(target, catalog):
        yield _declares_nothing(_info(catalog, target))
    if options.only or options.lanes:
        return
    if options.scenario is not None:
        yield from _not_allowed(options, plans)
    elif target.partner is None:
        yield from _unsupported(target, catalog, plans, options.device)


def _not_allowed(options: Options, plans: Sequence[PlannedLane]) -> Iterator[Result]:
    """Yield a result for each recorded lane that the declarations do not allow."""
    there = {plan.recorded.line.lane for plan in plans if plan.recorded is not None}
    for recorded in read(Path(options.scenario or "")):
        line = recorded.line
        if line.lane not in there:
            kind = f"{recorded.case} with pages of {line.page_size}"
            yield Result(
                rule=None,
                check="declares",
                lane=f"recorded_{line.lane}",
                outcome=Outcome.UNSUPPORTED,
                reason=f"the plugin declares no support for {kind}",
            )


def _info(catalog: PluginCatalog, target: Target) -> PluginInfo:
    kind: Kind = target.kind
    return next(info for info in catalog.infos(kind) if info.name == target.name)


def _contract_of(target: Target, catalog: PluginCatalog) -> int:
    """Return the contract version of a target; for a pair the earlier one."""
    infos = [_info(catalog, target)]
    if target.partner is not None:
        infos.append(_info(catalog, Target("runner", target.partner)))
    return min(int(info.contract or CONTRACT_VERSION) for info in infos)


def _declares_nothing(info: PluginInfo) -> Result:
    return Result(
        rule=None,
        check="declares",
        lane="capabilities",
        outcome=Outcome.FAIL,
        reason="no mode is declared",
        findings=[
            Finding(
                rule=None,
                hook=None,
                field="modes",
                expected="the forward modes that the plugin serves",
                actual="none",
                help=f"set them on the class {info.target}: only declared modes are checked",
            )
        ],
    )


def examine_lane(
    plan: PlannedLane,
    options: Options,
    begins: Any = None,
    *,
    skip: Collection[str] = (),
    experiments: Sequence[Experiment] = EXPERIMENTS,
) -> Iterator[Result]:
    """Run all experiments in one lane, and yield a result for each rule.

    Args:
        plan: The lane.
        options: Options of the run.
        begins: Called with the name of each piece of work before it runs; may be None.
        skip: Names of work that are left out.
        experiments: The experiments.
    """
    done: list[_Done] = []
    chosen = experiments_of(plan, options, experiments)
    captures_nothing = plan.lane.captures_nothing
    following = (e for e in experiments if e not in chosen and _follows(e, plan, options, done))
    used: LaneUnderTest | None = None
    for experiment in chain(chosen, following):
        if captures_nothing and experiment.needs_graphs:
            continue
        work = f"{plan} :: {experiment.name}"
        if work in skip:
            continue
        if begins is not None:
            begins(work)
        tried = f"{work} :: smaller batches"
        on_trial = None if tried in skip else partial(begins or _ignore_work, tried)
        each, used = _run_beside(used, experiment, plan, options, on_trial)
        done.append(each)
    results = list(_by_rule(plan, options, done))
    if captures_nothing:
        results = list(_without_graphs(plan, options, chosen, results))
    yield from results


def experiments_of(
    plan: PlannedLane, options: Options, experiments: Sequence[Experiment] = EXPERIMENTS
) -> list[Experiment]:
    """Return the experiments that run in a lane."""
    depths = {"lightest"} if options.size == "quick" else {"lightest", "light"}

    def is_due(experiment: Experiment) -> bool:
        of_fields = experiment.of_fields and plan.lane.config.fields and plan.lane.kind == "runner"
        return plan.has_all or of_fields or experiment.depth in depths

    return [e for e in experiments if is_due(e) and _concerns(e, plan, options)]


def _follows(experiment: Experiment, plan: PlannedLane, options: Options, done: Sequence["_Done"]) -> bool:
    """Return whether an experiment that is too deep for a lane runs there after others, to name a fault.

    After a finding those run that name the field and the rule; where the lane cannot be captured, `captures`.
    """
    if experiment.explains_captures and any(each.not_run for each in done):
        return plan.lane.kind in experiment.scopes
    has_findings = any(each.findings for each in done)
    return experiment.names_rules and has_findings and _concerns(experiment, plan, options)


def _concerns(experiment: Experiment, plan: PlannedLane, options: Options) -> bool:
    """Return whether an experiment is for the kind of lane and checks a wanted rule."""
    lane = plan.lane
    return (
        lane.kind in experiment.scopes
        and (experiment.in_pairs or not plan.is_pair)
        and (experiment.of_fields or not lane.config.case.embeds)
        and (plan.recorded is not None or not experiment.of_recordings)
        and bool(not options.only or options.only & {*experiment.examines})
    )


@dataclass
class _Done:
    experiment: Experiment
    findings: list[Finding]
    examples: int = 0
    seconds: float = 0.0
    not_run: str | None = None
    declined: str | None = None
    steps: Counter[EagerReason | None] = field(default_factory=Counter)
    error: str | None = None

    @property
    def is_clean(self) -> bool:
        """Whether its lane can be used again."""
        return not (self.findings or self.error or self.not_run or self.declined)


def _run_beside(
    used: LaneUnderTest | None,
    experiment: Experiment,
    plan: PlannedLane,
    options: Options,
    on_trial: Callable[[], object] | None,
) -> tuple[_Done, LaneUnderTest | None]:
    """Run one experiment, and return its lane too if the next one may use it.

    Captures take much of the time of a run. An experiment that finds something on used ones is repeated on
    new ones, and only that counts: no finding depends on the experiments before it.
    """
    if experiment.reuses and used is not None:
        lane = used.again(experiment.examines)
        done = _run(experiment, plan, options, None, lane)
        if done.is_clean:
            return done, lane
    lane = plan.lane.anew(experiment.examines)
    done = _run(experiment, plan, options, on_trial, lane)
    return done, lane if done.is_clean else None


def _run(
    experiment: Experiment,
    plan: PlannedLane,
    options: Options,
    on_trial: Callable[[], object] | None,
    lane: LaneUnderTest,
) -> _Done:
    """Run one experiment, with the requested number of sequences, until one has findings.

    Args:
        experiment: The experiment.
        plan: The planned lane.
        options: Options of the run.
        on_trial: Called before each trial of smaller batches; None for no trials.
        lane: The lane for the experiment.
    """
    start = time.perf_counter()
    done = _Done(experiment, [])
    count = _examples(plan, options) if experiment.repeats else 1
    try:
        with torch.inference_mode(), seeded(options.seed, lane.device):
            for steps in _sequences(experiment, plan, lane, count, options.seed):
                done.examples += 1
                found = experiment.findings(lane, steps)
                done.declined = done.declined or found.declined
                done.findings = experiment.listed(found.findings)
                if unlisted := {str(f.rule) for f in found.findings if f not in done.findings}:
                    done.error = f"{experiment.name} reports {', '.join(unlisted)}, which it does not list"
                if found.error is not None:
                    raise found.error  # noqa: TRY301  judged below, like one of the runner's fit()
                if found.findings:
                    break
            if done.findings and options.shrink and on_trial is not None:
                smaller = shrunk(lane, experiment, steps, done.findings, on_trial)
                done.findings = experiment.listed(smaller)
    except CannotCaptureError as error:
        done.declined, done.not_run = _why_not(plan, error)
    except Exception as error:  # noqa: BLE001  of the plugin or of the suite
        if lane.raised_at(error) is not None:
            expected = "the plugin's methods return without an error"
            done.findings.append(lane.of_error(error, expected=expected))
        else:
            done.error = f"{experiment.name}: {message_of(error)}"
            if (place := place_of(error)) not in done.error:
                done.error += f", at {place}"
    done.findings += lane.of_changes()
    done.findings = [f.model_copy(update={"experiment": experiment.name}) for f in done.findings]
    done.steps = lane.steps_by_reason
    done.seconds = time.perf_counter() - start
    return done


def _why_not(plan: PlannedLane, error: CannotCaptureError) -> tuple[str | None, str | None]:
    """Return why the plugin declines a lane that cannot be captured, or why the lane does not run.

    It declines a high cache by an `EngineError`, if it is captured with a low one.
    """
    not_run = f"the lane cannot be captured: {error}"
    if not plan.lane.config.high or not any(isinstance(each, EngineError) for each in causes(error.error)):
        return None, not_run
    try:
        plan.lane.like(replace(plan.lane.config, high=False)).anew().rig()
    except CannotCaptureError:
        return None, not_run
    return f"the plugin refuses a KV cache of so many pages: {error}", None


def _examples(plan: PlannedLane, options: Options) -> int:
    """Return the sequences of batches of a lane: one in quick runs; fewer where a plain lane has most.

    In normal runs pairs, whose plugins have lanes of their own, and lanes with unusual values have half.
    """
    if options.size == "quick":
        return 1
    has_most = options.size == "thorough" or (plan.has_all and not plan.lane.config.unusual)
    return options.examples if has_most and not plan.is_pair else (options.examples + 1) // 2


def _sequences(
    experiment: Experiment, plan: PlannedLane, lane: LaneUnderTest, count: int, seed: int
) -> Sequence[Steps]:
    """Return the sequences of batches that an experiment gets, drawn or recorded."""
    if plan.recorded is None:
        return lane.drawn(count, seed)
    if experiment.of_recordings:
        return [plan.recorded.steps]
    return plan.recorded.sequences(lane.config, count, seed, lane.declined)


def _ignore_work(_: str) -> None:
    """Ignore the name of the work."""


def _by_rule(plan: PlannedLane, options: Options, done: Sequence[_Done]) -> Iterator[Result]:
    """Yield one result for each checked rule, and one for findings without a rule."""
    ids: list[str | None] = [rule for rule in RULES if not options.only or rule in options.only]
    if not options.only:
        ids = [None, *ids]
    for rule in ids:
        mine = [
            d
            for d in done
            if (not d.experiment.examines if rule is None else rule in d.experiment.examines)
            or any(f.rule == rule for f in d.findings)
        ]
        if not mine:
            continue
        if rule is not None and RULES[rule].since > plan.contract:
            yield _not_in_force(RULES[rule], plan, mine)
            continue
        findings = [f for d in mine for f in d.findings if f.rule == rule]
        findings = sorted({f.model_dump_json(): f for f in findings}.values(), key=by_evidence)
        chosen = findings if options.all_findings else _distinct(findings)
        outcome, reason = Outcome.PASS, _say_declined(done) if rule == "GP12" else None
        errors = [d.error for d in mine if d.error]
        if findings:
            outcome, reason = Outcome.FAIL, f"incomplete: {errors[0]}" if errors else None
        elif errors:
            outcome, reason = Outcome.ERROR, errors[0]
        elif stopped := [d.not_run for d in mine if d.not_run]:
            outcome, reason = Outcome.NOT_RUN, stopped[0]
        elif declined := [d.declined for d in mine if d.declined]:
            outcome, reason = Outcome.UNSUPPORTED, declined[0]
        yield Result(
            rule=rule,
            check=", ".join(d.experiment.name for d in mine),
            lane=str(plan),
            outcome=outcome,
            level=RULES[rule].level if rule else "MUST",
            reason=reason,
            findings=[_with_line(f, plan, options) for f in chosen],
            examples=sum(d.examples for d in mine),
            seconds=sum(d.seconds / (len(d.experiment.examines) or 1) for d in mine),
        )


def _say_declined(done: Sequence[_Done]) -> str | None:
    """Return how many steps of a lane the runner declined, by reason; None if it declined none."""
    counted = sum((each.steps for each in done), Counter[EagerReason | None]())
    total = counted.total()
    said = [f"{n} of {total} steps declined: {reason}" for reason, n in counted.items() if reason is not None]
    return ", ".join(said) or None


def _without_graphs(
    plan: PlannedLane, options: Options, chosen: Sequence[Experiment], results: Sequence[Result]
) -> Iterator[Result]:
    """Yield the results of a lane that captures nothing, with one for each rule that needs graphs.

    A rule without a finding is unsupported if the declarations exclude graphs, otherwise not run.
    """
    reason = plan.lane.no_graphs_declared
    outcome = Outcome.UNSUPPORTED if reason else Outcome.NOT_RUN
    reason = reason or "no graphs: the runner has no shape to capture"
    found = {r.rule: r for r in results if r.rule is None or r.outcome is not Outcome.PASS}
    if None in found:
        yield found[None]
        if found[None].outcome in (Outcome.PASS, Outcome.FAIL):
            reason += "; eager steps were checked"
    for rule in RULES.values():
        names = [e.name for e in chosen if rule.id in e.examines]
        if not names or (options.only and rule.id not in options.only):
            continue
        yield found.get(rule.id) or Result(
            rule=rule.id,
            check=", ".join(names),
            lane=str(plan),
            outcome=outcome,
            level=rule.level,
            reason=reason,
        )


def _not_in_force(rule: Rule, plan: PlannedLane, done: Sequence[_Done]) -> Result:
    return Result(
        rule=rule.id,
        check=", ".join(d.experiment.name for d in done),
        lane=str(plan),
        outcome=Outcome.UNSUPPORTED,
        level=rule.level,
        reason=f"the plugin has contract version {plan.contract}; the rule is in force since {rule.since}",
    )


_MOST_FINDINGS = 8
"""Findings of one rule in one lane that a report keeps, unless all are asked for."""


def by_evidence(finding: Finding) -> tuple[bool, Evidence, bool, bool]:
    """Return the sort key of findings: errors that the plugin raised, then those with the best evidence."""
    return finding.raised_at is None, finding.evidence, finding.field is None, finding.help is None


def _distinct(findings: Sequence[Finding]) -> list[Finding]:
    """Return the first finding of each rule, hook, field and raising line, in the order of `by_evidence`."""
    first: dict[tuple[str | None, ...], Finding] = {}
    for finding in findings:
        key = (finding.rule, finding.hook, (finding.field or "").partition("[")[0], finding.raised_at)
        first.setdefault(key, finding)
    return [*first.values()][:_MOST_FINDINGS]


def _with_line(finding: Finding, plan: PlannedLane, options: Options) -> Finding:
    only = [] if finding.rule is None else [finding.rule]
    line = reproduce_line(plan.names, only, str(plan), options)
    return finding.model_copy(update={"reproduce": line})


# -- claims ------------------------------------------------------------------------------------------


def _probe(cls: type[AttentionBackend], options: Options) -> list[tuple[str, bool]]:
    """Return undeclared capabilities, and whether they work; a graph has to keep every rule for that."""
    found = []
    outputs = [e for e in EXPERIMENTS if e.depth == "lightest"]
    few = replace(options, examples=1, shrink=False, only=frozenset())
    works = (Outcome.PASS, Outcome.UNSUPPORTED)
    for capability, wider, config in undeclared(cls):
        plan = PlannedLane(LaneUnderTest(config, wider), is_full=True)
        experiments = EXPERIMENTS if capability.startswith("graphs ") else outputs
        results = list(examine_lane(plan, few, experiments=experiments))
        found.append((capability, all(r.outcome in works for r in results)))
    return found


def _provider(plans: Sequence[PlannedLane], target: Target) -> str | None:
    if target.kind != "attention_backend" or not plans:
        return None
    cls = plans[0].lane.backend
    for provider in cls.providers:
        if provider.unavailable(plans[0].lane.device) is None:
            return provider.name
    return None


def _not_shown(target: Target, catalog: PluginCatalog, device: torch.device) -> list[str]:
    """Return the parts that a run on this device cannot exercise, each with the reason."""
    found = []
    if target.kind == "attention_backend":
        for provider in catalog.select("attention_backend", target.name).providers:
            reason = provider.unavailable(device)
            if reason is not None:
                found.append(f"{provider.name} kernels, all rules: {reason}")
    if device.type != "cuda":
        found.append("graph driver cuda, all rules: it needs a CUDA device")
    return found
