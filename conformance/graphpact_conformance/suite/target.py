"""`examine`: run the suite for one plugin, in this process.

`graphpact_conformance.isolation` runs each plugin in its own process, so that a crash does not end the suite.

Does not: check requirements of a contract (see `graphpact_conformance.contracts`), or write reports.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphpact.attention import AttentionBackend
from graphpact.attention.providers import choose_provider
from graphpact.batch import ForwardMode
from graphpact.buffers import GraphSlot
from graphpact.errors import ConfigError
from graphpact.hookspecs import CONTRACT_VERSION
from graphpact.plugins import PluginCatalog, PluginInfo
from graphpact_conformance.claims import OF_GRAPHS, claims_of, undeclared
from graphpact_conformance.contracts.examine import examine_contract
from graphpact_conformance.draws import coverage
from graphpact_conformance.draws.cases import CASES, EMBEDS, SEGMENTS, Case
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.scenario import read
from graphpact_conformance.experiments import EXPERIMENTS, OF_OUTPUTS
from graphpact_conformance.experiments.experiment import PlannedLane
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.uncalled import Uncalled, uncalled_methods, watched_calls
from graphpact_conformance.merge import CALLS, hints_of, of_claims
from graphpact_conformance.results import Claim, Finding, Outcome, PluginResults, Result
from graphpact_conformance.suite.adapter import Needs, adapter_of
from graphpact_conformance.suite.contract_kinds import CONTRACTS
from graphpact_conformance.suite.fail_fast import run_lanes
from graphpact_conformance.suite.plan import in_parts, lanes_of
from graphpact_conformance.suite.run import examine_lane
from graphpact_conformance.targets import FAIL_FAST, IsKnown, Listener, Options, Target
from graphpact_conformance.traits import traits_of
from graphpact_conformance.xfails import Xfails

_NEEDS = "missing values"
"""Name of the work that looks for values that code of another engine reads and its adapter lacks."""
_PROBES = "undeclared capabilities"
"""Name of the work that tries undeclared capabilities."""
_TRAITS = "traits"
"""Name of the work that asks a backend for its slots."""


def examine(
    target: Target,
    options: Options,
    listener: Listener,
    *,
    skip: Collection[str] = (),
    part: tuple[int, int] = (0, 1),
) -> PluginResults:
    """Check a plugin against every rule in every lane, and pass each result to the listener.

    Plugins with a contract of requirements are checked by `graphpact_conformance.contracts.examine`.

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
    catalog = PluginCatalog.scan()
    if target.kind in CONTRACTS:
        contract, known = CONTRACTS[target.kind], _known(target, catalog)
        return examine_contract(contract, target, options, listener, skip=skip, part=part, is_known=known)
    info = target.infos(catalog)[0]
    if target.kind == "adapter":
        return _examine_adapted(target, catalog, options, listener, skip=skip, part=part)
    version = contract_of(target, catalog)
    first, parts = part
    every = [
        replace(plan, names=target.names, contract=version) for plan in lanes_of(target, options, catalog)
    ]
    every.sort(key=lambda plan: not plan.has_all)
    plans = in_parts(every, parts, options)[first]
    shown: list[tuple[Config, bool]] = []
    ran: list[tuple[Config, set[str]]] = []
    reported: list[Result] = []
    classes = _classes_of(target, catalog)
    with watched_calls(classes) as called:
        for plan, results in run_lanes(
            plans, options, listener.begins, skip=skip, is_known=_known(target, catalog)
        ):
            for result in results:
                listener.found(result)
            reported += results
            shown.append((plan.lane.config, not any(r.outcome is Outcome.FAIL for r in results)))
            ran.append((plan.lane.config, _that_ran(results)))
    is_cut = any(result.check == FAIL_FAST for result in reported)
    for method in uncalled_methods(classes, called) if plans and not (skip or is_cut) else ():
        listener.found(never_called(method))
    is_whole = target.partner is None and not (options.only or options.lanes or options.scenario or is_cut)
    for result in _undeclared(target, catalog, every, options) if first == 0 else ():
        listener.found(result)
    claims: list[Claim] = []
    if target.kind == "attention_backend" and is_whole:
        cls = catalog.select("attention_backend", target.name)
        probed = []
        if options.size != "quick" and first == parts - 1 and _PROBES not in skip:
            listener.begins(_PROBES)
            probed = probe(cls, options)
        claims = claims_of(cls, shown, probed)
        if parts == 1:
            listener.found(of_claims(claims, reported))
    lanes = [plan.lane for plan in plans if not plan.lane.captures_nothing]
    drivers = ["tape", *(lane.driver.name for lane in lanes if lane.driver is not None)]
    return target.results(
        info,
        options.device,
        drivers=list(dict.fromkeys(drivers)) if lanes else [],
        provider=_provider(every, target),
        claims=claims,
        hints=hints_of(claims),
        not_shown=_not_shown(target, catalog, torch.device(options.device)),
        drawn=coverage.drawn(ran),
        traits=[] if first else _traits(target, catalog, every, None if _TRAITS in skip else listener),
    )


def _examine_adapted(
    target: Target,
    catalog: PluginCatalog,
    options: Options,
    listener: Listener,
    *,
    skip: Collection[str],
    part: tuple[int, int],
) -> PluginResults:
    """Check another engine's code in every lane of its adapter; see `examine`."""
    first, parts = part
    info = target.infos(catalog)[0]
    adapter = adapter_of(target, catalog)
    needs: Sequence[Needs] = ()
    if _NEEDS not in skip:
        listener.begins(_NEEDS)
        needs = [*adapter.needs(options)]
    for each in needs:
        lane, check = each.kind or "every lane", "every requirement"
        listener.found(Result(rule=None, check=check, lane=lane, outcome=Outcome.NOT_RUN, reason=str(each)))
    ready: Sequence[PlannedLane] = ()
    lacking = {each.kind for each in needs}
    if not options.probe and None not in lacking:
        every = lanes_of(target, options, catalog)
        ready = [plan for plan in every if str(plan.lane.config.case) not in lacking]
    for method in adapter.uncalled(ready) if ready else ():
        listener.found(never_called(method))
    plans = in_parts(ready, parts, options)[first]
    is_cut = False
    for _, results in run_lanes(plans, options, listener.begins, skip=skip, is_known=_known(target, catalog)):
        for result in results:
            is_cut |= result.check == FAIL_FAST
            listener.found(result)
    hints = []
    is_whole = not is_cut and options.size != "quick" and not (options.only or options.lanes or options.probe)
    if is_whole and not needs and first == parts - 1 and _PROBES not in skip:
        listener.begins(_PROBES)
        few = replace(options, examples=1, shrink=False)
        for declaration, plan in adapter.probes(options):
            probed = examine_lane(plan.of(target.names, adapter.experiments), few)
            if all(result.outcome is Outcome.PASS for result in probed):
                hints.append(f"{declaration} works in {plan} and is not declared")
    return target.results(
        info,
        options.device,
        drivers=["tape"] if plans else [],
        hints=hints,
        not_shown=list(adapter.not_shown),
    )


def never_called(method: Uncalled) -> Result:
    """Return the result about a method that no lane called."""
    return Result(rule=None, check=CALLS, lane=method.name, outcome=Outcome.UNSUPPORTED, reason=str(method))


def _classes_of(target: Target, catalog: PluginCatalog) -> list[type[Any]]:
    """Return the classes of a backend or a runner, and of the runner of a pair."""
    found = [catalog.select(target.kind, target.name)]
    if target.partner is not None:
        found.append(catalog.select("runner", target.partner))
    return found


def _known(target: Target, catalog: PluginCatalog) -> IsKnown:
    """Return whether the failure of a rule in a lane is listed in the ``xfails.toml`` of the plugin."""
    return partial(Xfails.read([target], catalog).lists, target)


def _traits(
    target: Target, catalog: PluginCatalog, plans: Sequence[PlannedLane], listener: Listener | None
) -> list[str]:
    """Return the traits of a backend that is checked alone; without a listener not those of its slots."""
    if target.kind != "attention_backend" or target.partner is not None:
        return []
    slots: Sequence[GraphSlot] = ()
    if plans and listener is not None:
        listener.begins(_TRAITS)
        slots = _slots_in(plans[0])
    return traits_of(catalog.select("attention_backend", target.name), slots)


def _slots_in(plan: PlannedLane) -> Sequence[GraphSlot]:
    """Return the slots that a backend declares in a lane; none if it raises, which experiments report."""
    try:
        backend = plan.lane.anew().build(capture=False).backend
        return [*backend.declare_slots(backend.context.limits)]
    except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
        return ()


def _that_ran(results: Sequence[Result]) -> set[str]:
    """Return the names of the experiments of which a lane has a verdict."""
    judged = [r for r in results if r.outcome in (Outcome.PASS, Outcome.FAIL)]
    return {name for result in judged for name in result.check.split(", ")}


def _modes_of(target: Target, catalog: PluginCatalog) -> Collection[ForwardMode]:
    if target.kind == "runner":
        return catalog.select("runner", target.name).modes
    return catalog.select("attention_backend", target.name).capabilities.modes


def unsupported(
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
        yield _declares_nothing(target.infos(catalog)[0])
    if options.only or options.lanes:
        return
    if options.scenario is not None:
        yield from _not_allowed(options, plans)
    elif target.partner is None:
        yield from unsupported(target, catalog, plans, options.device)


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


def contract_of(target: Target, catalog: PluginCatalog) -> int:
    """Return the contract version of a target; for a pair the earlier one."""
    return min(int(info.contract or CONTRACT_VERSION) for info in target.infos(catalog))


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


def probe(cls: type[AttentionBackend], options: Options) -> list[tuple[str, bool]]:
    """Return undeclared capabilities, and whether they work; a graph has to keep every rule for that."""
    found = []
    few = replace(options, examples=1, shrink=False, only=frozenset())
    works = (Outcome.PASS, Outcome.UNSUPPORTED)
    for capability, wider, config in undeclared(cls):
        plan = PlannedLane(LaneUnderTest(config, wider, provider=options.kernels), is_full=True)
        experiments = EXPERIMENTS if capability.startswith(OF_GRAPHS) else OF_OUTPUTS
        results = list(examine_lane(plan, few, experiments=experiments))
        found.append((capability, all(r.outcome in works for r in results)))
    return found


def _provider(plans: Sequence[PlannedLane], target: Target) -> str | None:
    if target.kind != "attention_backend" or not plans:
        return None
    lane = plans[0].lane
    try:
        provider, _ = choose_provider(target.name, lane.backend.providers, lane.provider, lane.device)
    except ConfigError:  # no lane was built
        return None
    return None if provider is None else provider.name


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
