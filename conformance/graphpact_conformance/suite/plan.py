"""The lanes of a run, the experiments in each, and the parts in which they run.

Does not: run anything; or define what lanes there can be (see `graphpact_conformance.draws.lanes`).
"""

import difflib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import distributed

from graphpact.attention import AttentionBackend, Capabilities
from graphpact.attention.providers import choose_provider
from graphpact.batch import ForwardMode
from graphpact.errors import UsageError
from graphpact.plugins import PluginCatalog
from graphpact.runners import GraphRunner
from graphpact_conformance.draws.cases import EMBEDS, SEGMENTS, cases_of, composes
from graphpact_conformance.draws.choice import configs_of, covering, plainest, scaled_up, valued
from graphpact_conformance.draws.chosen_batches import corner
from graphpact_conformance.draws.fields import MROPE
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.scenario import read
from graphpact_conformance.experiments import EXPERIMENTS, Experiment
from graphpact_conformance.experiments.experiment import LaneKind, PlannedLane
from graphpact_conformance.experiments.real_ranks import ClassSource, RankProcesses, RealRanks
from graphpact_conformance.experiments.real_ranks.messages import Classes
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import PaddedReferenceBackend, ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner, SegmentsRunner
from graphpact_conformance.lane.runners import planned_shapes, runner_context
from graphpact_conformance.lane.tested_code import KITS
from graphpact_conformance.records.raised import NeedsValueError
from graphpact_conformance.suite.adapter import adapter_of
from graphpact_conformance.suite.contract_kinds import CONTRACTS
from graphpact_conformance.target_kinds import TargetKind
from graphpact_conformance.targets import Options, Size, Target


def lanes_of(target: Target, options: Options, catalog: PluginCatalog) -> list[PlannedLane]:
    """Return the lanes in which a backend, a runner or other code by an adapter is checked."""
    device = torch.device(options.device)
    if target.kind == "adapter":
        adapter = adapter_of(target, catalog)
        named = (plan.of(target.names, adapter.experiments) for plan in adapter.lanes(options))
        return [plan for plan in named if is_asked(plan, options)]
    every = options if options.ranks is None else replace(options, lanes=())
    plans = _lanes_of_plugin(target, every, catalog, device)
    if options.ranks is not None:
        source = ClassSource(f"{__name__}:classes_of", (target,))
        plans += rank_lanes(plans, options.ranks, source, options.size)
    return [plan for plan in plans if is_asked(plan, options)]


def _lanes_of_plugin(
    target: Target, options: Options, catalog: PluginCatalog, device: torch.device
) -> list[PlannedLane]:
    """Return the lanes of a backend or a runner in one process."""
    if target.kind == "runner":
        return planned_lanes(
            ReferenceBackend,
            catalog.select("runner", target.name),
            options,
            device=device,
            kind="runner",
            drivers=catalog,
        )
    backend = catalog.select("attention_backend", target.name)
    runner: type[GraphRunner] = ReferenceRunner
    if target.partner is not None:
        runner = catalog.select("runner", target.partner)
    plans = planned_lanes(
        backend,
        runner,
        options,
        device=device,
        is_pair=target.partner is not None,
        drivers=catalog,
    )
    return [replace(p, lane=replace(p.lane, provider=options.kernels)) for p in plans]


@contextmanager
def classes_of(target: Target) -> Iterator[Classes]:
    """Yield the classes of a target in another process."""
    catalog = PluginCatalog.scan()
    if target.kind == "runner":
        yield ReferenceBackend, catalog.select("runner", target.name)
        return
    partner = None if target.partner is None else catalog.select("runner", target.partner)
    yield catalog.select("attention_backend", target.name), partner


def rank_lanes(
    plans: Sequence[PlannedLane], ranks: int, source: ClassSource, size: Size
) -> list[PlannedLane]:
    """Return lanes like the plain ones among ``plans``, each with several processes that step together.

    A quick run has one of a mode with requests of equal widths, and one of a ragged mode. Others have one of
    each kind of step without trees, thorough ones with trees too. Runners that call the model several times
    have none: the results of ranks are not defined for their later passes.

    Args:
        plans: Lanes of one process.
        ranks: Number of processes.
        source: The classes, for the processes.
        size: Size of the run.
    """
    together = RealRanks(RankProcesses(ranks), source).experiment
    can = [plan for plan in plans if _can_be_of_ranks(plan)]
    kept = plainest(plan.lane.config for plan in can)
    if size == "quick":
        kept = _of_two_kinds(kept)
    elif size == "normal":
        kept = [config for config in kept if _is_of_its_own(config)]
    plain = [plan for plan in can if plan.lane.config in kept]
    found = []
    for plan in plain:
        lane = plan.lane
        config = replace(lane.config, counts=True, capture_shapes=(), extra_requests=1).divided(ranks)
        if lane.runner not in KITS:
            config = _with_shapes_of(lane.runner, config, lane.backend, lane.device)
        suffix = f"-ranks{ranks}"
        found.append(
            PlannedLane(lane.like(config), is_full=False, suffix=suffix, experiments=[together], ranks=ranks)
        )
    return found


def _can_be_of_ranks(plan: PlannedLane) -> bool:
    """Return whether a lane is an ordinary one, whose runner calls the model once."""
    case, runner = plan.lane.config.case, plan.lane.runner
    if case.mode in (ForwardMode.IDLE, ForwardMode.MIXED) or case.embeds or case.frozen:
        return False
    several_passes = composes(runner) and case.has_drafts
    return not (several_passes or plan.suffix or plan.lane.config.unusual)


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
    return [plan for plan in plans if is_asked(plan, options)]


def is_asked(plan: PlannedLane, options: Options) -> bool:
    """Return whether a lane's name matches the patterns of a run."""
    return not options.lanes or any(fnmatchcase(str(plan), glob) for glob in options.lanes)


def checks_by_lane(target: Target, options: Options, catalog: PluginCatalog) -> dict[str, list[str]]:
    """Return the names of the experiments of each lane of a plugin, or of its requirements."""
    if target.kind in CONTRACTS:
        plugin = catalog.select(target.kind, target.name)
        return {
            str(lane): [check.name for check in lane.checks(options)]
            for lane in CONTRACTS[target.kind].lanes_of(plugin, options)
        }
    return {
        str(plan): [e.name for e in experiments_of(plan, options) if captures or not e.needs_graphs]
        for plan in lanes_of(target, options, catalog)
        for captures in [not plan.lane.captures_nothing]
    }


def require_lanes(found: Iterable[Target], options: Options, catalog: PluginCatalog) -> None:
    """Check the kernels, the ranks, and that each pattern of ``options.lanes`` matches a lane of a target.

    Raises:
        UsageError: A pattern matches none; the hint has the nearest names. Or a backend has no kernels of
            the asked provider that can be used on the device. Or a target has no lanes with real ranks, or
            torch cannot connect them.
    """
    targets = [*found]
    if options.ranks is not None:
        _require_ranks(targets)
    if options.kernels != "auto":
        for name in {target.name for target in targets if target.kind == "attention_backend"}:
            providers = catalog.select("attention_backend", name).providers
            choose_provider(name, providers, options.kernels, torch.device(options.device))
    if not options.lanes:
        return
    every = replace(options, lanes=())
    try:
        names = list(dict.fromkeys(lane for t in targets for lane in checks_by_lane(t, every, catalog)))
    except NeedsValueError:
        return  # a target has no lanes yet: its examination says what it lacks
    for pattern in options.lanes:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        bare = pattern.strip("*")
        near = [name for name in names if bare and bare.lower() in name.lower()]
        kinds = [name.partition("-")[0] for name in names]
        near = near or difflib.get_close_matches(bare, [*names, *dict.fromkeys(kinds)], cutoff=0.5)
        fewer = " in a quick run" if options.size == "quick" else ""
        raise UsageError(
            f"no lane of {', '.join(map(str, targets))} matches {pattern!r}; there are {len(names)}{fewer}",
            hint=f"the nearest: {', '.join(_as_patterns(near or names)[:_MOST_NEAR])}"
            f"; {'a run without --quick has more; ' if fewer else ''}"
            "`graphpact check NAME --list` lists the lanes of a size",
        )


def _require_ranks(targets: Sequence[Target]) -> None:
    """Raise `UsageError` unless ranks can step together, and every target has lanes for them."""
    others = [target for target in targets if target.kind not in ("attention_backend", "runner")]
    if others:
        raise UsageError(
            f"--ranks: {others[0].names} has no lanes with ranks",
            hint="only backends and runners have: check the others in a run without --ranks",
        )
    if not distributed.is_available() or not distributed.is_gloo_available():
        missing = "gloo" if distributed.is_available() else "torch.distributed"
        raise UsageError(
            f"--ranks needs {missing}, which this build of torch {torch.__version__} lacks",
            hint="leave --ranks out: other lanes simulate ranks in one process",
        )


_MOST_NEAR = 6
"""Names of lanes in the answer to a pattern without a match."""


def _as_patterns(names: Iterable[str]) -> list[str]:
    """Return each name once, quoted; a kind of step, which begins several names, as a pattern."""
    return [repr(name if "-" in name else f"{name}-*") for name in dict.fromkeys(names)]


def planned_lanes(
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
            of each kind of step with these values; see `graphpact_conformance.draws.choice.valued`.
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
    for drawn, is_full in _choose(configs, can, device, options.size, values, kind=kind, is_pair=is_pair):
        chosen = _with_fields_of(runner, drawn, can, device)
        config = chosen if runner is ReferenceRunner else _with_shapes_of(runner, chosen, backend, device)
        own = SegmentsRunner if config.case.segments else runner
        partner = backend
        if kind == "runner" and runner.eager_attention and config.case.mode is ForwardMode.MIXED:
            partner = PaddedReferenceBackend  # other lanes have only the live tokens
        lane = LaneUnderTest(config, partner, own, kind, device=device)
        plans.append(PlannedLane(_within_graphs(lane), is_full))
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
    return [plan for plan in plans if is_asked(plan, options)]


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


def _within_graphs(lane: LaneUnderTest) -> LaneUnderTest:
    """Return the lane with the longest requests of which the runner replays the largest batch.

    The same lane if the runner declines nothing, or the batch at each of 32 lengths up to the context.
    """

    def declines_at(most_cached: int | None) -> bool:
        """Return whether the runner declines the largest batch of requests with so many cached keys."""
        return lane.declined(corner(replace(lane.config, most_cached=most_cached))) is not None

    if not lane.runner.declines or not declines_at(None):
        return lane
    context = lane.config.context
    step = -(-context // 32)
    replayed = next((n for n in reversed(range(0, context, step)) if not declines_at(n)), None)
    if replayed is None:
        return lane
    longer = range(replayed + 1, min(replayed + step, context))
    most = replayed + bisect_left(longer, 1, key=declines_at)
    return lane.like(replace(lane.config, most_cached=most))


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
    device: torch.device,
    size: Size,
    values: Sequence[str] | None,
    *,
    kind: TargetKind,
    is_pair: bool,
) -> list[tuple[Config, bool]]:
    """Return the configurations of a run, each with whether all experiments run in it.

    Each kind of step has one plain lane with all experiments; in a quick run mixed and idle batches and trees
    have only those of outputs. Further lanes have every value of every dimension, and in longer runs every
    pair of values of two. In a quick run plain decode and prefill have a lane with a tall ladder, and decode
    has one with a long context. The unusual lanes of a normal run, of which all experiments run in two, have
    the unusual value of every dimension of scale; that of a runner, which does not see layers, has equal
    ones. A runner, which declares the slots of optional fields, has a lane with them of each kind of step.

    Args:
        configs: All lanes with plain values of scale.
        capabilities: Of the backend.
        device: Of the lanes.
        size: Size of the run.
        values: See `planned_lanes`.
        kind: The kind of the checked plugin.
        is_pair: Whether it is checked with a partner.
    """
    plain = plainest(configs)
    if values is not None:
        return [(valued(config, capabilities, device, values), True) for config in plain]
    if is_pair:
        return [(config, size != "quick" or _is_of_its_own(config)) for config in plain]
    scaled = [] if size == "quick" else [scaled_up(c, capabilities, device) for c in _of_two_kinds(plain)]
    if kind == "runner":  # a ragged one would take as long as all other lanes of a runner
        scaled = [
            replace(config, mixed_dim=None) for config in scaled if config.case.tokens_per_request is not None
        ]
    strength = 1 if kind == "runner" or size == "quick" else 2
    more = []
    if size == "quick":  # otherwise they would be in lanes of wide drafts, which take longer
        kinds = _of_two_kinds(plain)
        more = [valued(config, capabilities, device, ["tall"]) for config in kinds]
        more += [valued(config, capabilities, device, ["long"]) for config in kinds[:1]]
    more += covering(configs, capabilities, device, [*plain, *scaled, *more], strength=strength)
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
    firsts = [
        next((c for c in configs if (c.case.tokens_per_request is None) is ragged), None) for ragged in kinds
    ]
    return [config for config in firsts if config is not None]


def _is_of_its_own(config: Config) -> bool:
    """Return whether no other kind of step has the same shapes or metadata layout."""
    case = config.case
    return case.branches == case.topk == 1 and case.mode not in (ForwardMode.MIXED, ForwardMode.IDLE)


# -- experiments ---------------------------------------------------------------------------------------


def experiments_of(
    plan: PlannedLane, options: Options, experiments: Sequence[Experiment] | None = None
) -> list[Experiment]:
    """Return the experiments that run in a lane, of its own or of given ones."""
    return [
        each
        for each in choices_of(plan, experiments)
        if each.runs_in(plan, options.size) and is_wanted(each, options)
    ]


def choices_of(plan: PlannedLane, experiments: Sequence[Experiment] | None = None) -> Sequence[Experiment]:
    """Return the experiments to choose from: given ones, those of the lane, or all of the suite."""
    given = plan.experiments if experiments is None else experiments
    return EXPERIMENTS if given is None else given


def is_wanted(experiment: Experiment, options: Options) -> bool:
    """Return whether an experiment checks a rule that the run asks for."""
    return bool(not options.only or options.only & {*experiment.examines})


# -- parts ---------------------------------------------------------------------------------------------


def in_parts(plans: Sequence[PlannedLane], parts: int, options: Options) -> list[list[PlannedLane]]:
    """Return the lanes in parts that end about together: the longest first, to the shortest part.

    Args:
        plans: The lanes.
        parts: Number of parts.
        options: Options of the run.
    """
    blocks = [[at] for at, plan in enumerate(plans) if plan.ranks is None]
    of_ranks = [at for at, plan in enumerate(plans) if plan.ranks is not None]
    blocks += [of_ranks] if of_ranks else []  # they use the same processes
    costs = [sum(cost_of(plans[at], options) for at in block) for block in blocks]
    shared: list[list[int]] = [[] for _ in range(parts)]
    sums = [0.0] * parts
    for number in sorted(range(len(blocks)), key=costs.__getitem__, reverse=True):
        shortest = sums.index(min(sums))
        shared[shortest] += blocks[number]
        sums[shortest] += costs[number]
    return [[plans[at] for at in sorted(part)] for part in shared]


_LANE = 2
"""The time of a lane with no work, in captured steps."""
_KEYS = 25_000
"""Number of keys, over tokens and layers, that take as long as one captured step in an experiment."""


def cost_of(plan: PlannedLane, options: Options) -> float:
    """Return the time of a lane in captured steps: captures take most, and attention to many keys.

    A further draft step takes a third of the time of the first. The numbers fit measured times.
    """
    config, experiments = plan.lane.config, experiments_of(plan, options)
    captures = sum(experiment.num_captures for experiment in experiments) * len(config.shapes)
    tokens = sum(shape.num_tokens for shape in config.shapes)
    keys = tokens * config.context * len(config.layers) * len(experiments)
    return _LANE + captures * (2 + config.case.num_steps) / 3 + keys / _KEYS
