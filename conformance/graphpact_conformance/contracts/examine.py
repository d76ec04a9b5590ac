"""`examine_contract`: runs all requirements of one plugin, in this process; `Contract`, `ContractLane`.

A contract names the lanes of a plugin: its modes, or the configurations in which it is used. Each lane has
one result for each rule, as in `graphpact_conformance.suite`.

Does not: define requirements, or survive a crash of the plugin; `graphpact_conformance.isolation.supervise`
does the latter.
"""

import abc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Generic, NamedTuple

import torch

from graphpact.hookspecs import CONTRACT_VERSION
from graphpact.plugins import PluginCatalog
from graphpact_conformance.contracts.requirement import Requirement, Subject
from graphpact_conformance.records.global_state import seeded
from graphpact_conformance.results import Finding, Outcome, PluginResults, Result
from graphpact_conformance.rules import EVERY_RULE
from graphpact_conformance.targets import IsKnown, Listener, Options, Target, ended_early, reproduce_line


class Unchecked(NamedTuple):
    """Why a requirement is not checked in a lane.

    Args:
        outcome: `Outcome.NOT_RUN`, or `Outcome.UNSUPPORTED` for what the plugin does not offer.
        reason: The reason, in words.
    """

    outcome: Outcome
    reason: str


class ContractLane(abc.ABC, Generic[Subject]):
    """One lane of a plugin that is checked by requirements. Its name is its `str`.

    Attributes:
        device: The device of the lane.
        runs_on: The types of devices on which the suite can check it.
    """

    device: torch.device = torch.device("cpu")
    runs_on: ClassVar[frozenset[str]] = frozenset({"cpu"})

    @abc.abstractmethod
    def requirements(self) -> Sequence[Requirement[Subject]]:
        """Return the requirements of this lane, in order."""

    @abc.abstractmethod
    def subject(self, options: Options) -> Subject:
        """Return a new subject for one requirement."""

    def unavailable(self) -> Unchecked | None:
        """Return why the plugin cannot be checked in this lane; None if it can. It may run its code."""
        return None

    def leaves_out(self, check: Requirement[Subject]) -> Unchecked | None:
        """Return why a requirement is not checked in this lane; None if it is."""
        del check
        return None

    def recover(self) -> None:
        """Reset global state that the plugin may have left after a check."""

    def checks(self, options: Options) -> list[Requirement[Subject]]:
        """Return the requirements of this lane with the rules of a run, in order."""
        return [each for each in self.requirements() if not options.only or each.rule in options.only]


class Contract(NamedTuple):
    """The lanes of the plugins of one kind.

    Args:
        lanes: Returns all lanes of a plugin's class in a run.
        not_shown: Returns the parts that no lane exercises, each with the reason.
        drivers: Returns the graph drivers that a run exercises, given the name of the plugin.
    """

    lanes: Callable[[Any, Options], Sequence[ContractLane[Any]]]
    not_shown: Callable[[Any], list[str]]
    drivers: Callable[[str], list[str]] = lambda _: []

    def lanes_of(self, plugin: Any, options: Options) -> list[ContractLane[Any]]:
        """Return the lanes of a plugin's class that a run asks for."""
        globs = options.lanes
        found = self.lanes(plugin, options)
        return [lane for lane in found if not globs or any(fnmatchcase(str(lane), glob) for glob in globs)]


def examine_contract(
    contract: Contract,
    target: Target,
    options: Options,
    listener: Listener,
    *,
    skip: Collection[str] = (),
    part: tuple[int, int] = (0, 1),
    is_known: IsKnown = lambda _, __: False,
) -> PluginResults:
    """Run all requirements of a plugin, and pass each result to the listener.

    Args:
        contract: The contract of the plugin's kind.
        target: The plugin.
        options: Options of the run.
        listener: Receives the names of work and the results.
        skip: Names of work to leave out, as passed to `Listener.begins`.
        part: Index of a part of the lanes, and number of parts. `merged` of the suite joins the parts.
        is_known: See `IsKnown`.

    Returns:
        The results object, with an empty list of results: the listener has them.

    Raises:
        PluginError: The plugin cannot be loaded.
    """
    catalog = PluginCatalog.scan()
    info = target.infos(catalog)[0]
    plugin: Any = catalog.select(target.kind, target.name)
    first, parts = part
    has_run = has_failed = False
    for lane in contract.lanes_of(plugin, options)[first::parts]:
        for result in examine_contract_lane(
            lane,
            options,
            listener.begins,
            skip=skip,
            names=target.names,
            version=int(info.contract or CONTRACT_VERSION),
        ):
            has_run |= result.outcome.ran
            listener.found(result)
            named = result.outcome is Outcome.FAIL and result.rule
            has_failed |= bool(named) and not is_known(str(named), result.lane)
        if options.fail_fast and has_failed:
            listener.found(ended_early())
            break
    return target.results(
        info,
        options.device,
        drivers=contract.drivers(target.name) if has_run else [],
        not_shown=contract.not_shown(plugin),
    )


def examine_contract_lane(
    lane: ContractLane[Subject],
    options: Options,
    begins: Callable[[str], object] = lambda _: None,
    *,
    skip: Collection[str] = (),
    names: str = "",
    version: int = CONTRACT_VERSION,
) -> Iterator[Result]:
    """Run the requirements of one lane, and yield a result for each rule.

    Args:
        lane: The lane.
        options: Options of the run.
        begins: Called with the name of each piece of work before it runs.
        skip: Names of work to leave out.
        names: Names of the plugin for the command line.
        version: The contract version for which the plugin was written. Later rules are not checked.
    """
    missing = _unavailable(lane, begins, skip)
    done: dict[str | None, list[_Done[Subject]]] = {}
    for check in lane.checks(options):
        work = f"{lane} :: {check.name}"
        if work in skip:
            continue
        why = _not_in_force(check, version) or missing or lane.leaves_out(check)
        if why is None:
            begins(work)
        done.setdefault(check.rule, []).append(_run(check, lane, options, why))
    for rule in (None, *EVERY_RULE):
        if rule in done:
            only = [] if rule is None else [rule]
            yield _result(rule, lane, done[rule], reproduce_line(names, only, str(lane), options))


def _not_in_force(check: Requirement[Any], version: int) -> Unchecked | None:
    why = EVERY_RULE[check.rule].not_in_force(version) if check.rule else None
    return None if why is None else Unchecked(Outcome.UNSUPPORTED, why)


@dataclass(frozen=True, slots=True)
class _Done(Generic[Subject]):
    check: Requirement[Subject]
    seconds: float
    breach: str | None
    unchecked: Unchecked | None


def _unavailable(
    lane: ContractLane[Any], begins: Callable[[str], object], skip: Collection[str]
) -> Unchecked | None:
    """Return why a lane is unavailable, or None. A plugin that does not return is not asked again."""
    if lane.device.type not in lane.runs_on:
        devices = ", ".join(sorted(lane.runs_on))
        return Unchecked(Outcome.NOT_RUN, f"the suite has these checks on {devices} alone")
    work = f"{lane} :: unavailable"
    if work in skip:
        return Unchecked(Outcome.NOT_RUN, "`unavailable` did not return")
    begins(work)
    return lane.unavailable()


def _run(
    check: Requirement[Subject], lane: ContractLane[Subject], options: Options, why: Unchecked | None
) -> _Done[Subject]:
    start = time.perf_counter()
    breach = None
    if why is None:
        with _isolated(options.seed, lane):
            breach = check.breach(lane.subject(options))
    return _Done(check, time.perf_counter() - start, breach, why)


@contextmanager
def _isolated(seed: int, lane: ContractLane[Any]) -> Iterator[None]:
    """Seed the random numbers of a check, and afterwards reset what the plugin may have left."""
    try:
        with seeded(seed, lane.device):
            yield
    finally:
        lane.recover()


def _result(rule: str | None, lane: ContractLane[Any], done: Sequence[_Done[Any]], reproduce: str) -> Result:
    """Return the result of one rule from its checks. A failure names only the failed checks."""
    broken = [each for each in done if each.breach is not None]
    findings = [
        Finding(
            rule=rule,
            hook=None,
            field=f"{each.check.at}: {each.check.name}",
            expected=each.check.sentence,
            actual=str(each.breach),
            help=each.check.fix,
            reproduce=reproduce,
        )
        for each in broken
    ]
    unchecked = [each.unchecked for each in done if each.unchecked is not None]
    reason = f"not run: {len(unchecked)} of {len(done)}: {unchecked[0].reason}" if unchecked else None
    outcome = Outcome.PASS
    if findings:
        outcome, reason = Outcome.FAIL, None
    elif len(unchecked) == len(done):
        outcome, reason = unchecked[0]
    return Result(
        rule=rule,
        check=", ".join(each.check.name for each in broken or done),
        lane=str(lane),
        outcome=outcome,
        level=EVERY_RULE[rule].level if rule else "MUST",
        reason=reason,
        findings=findings,
        examples=len(done) - len(unchecked),
        seconds=sum(each.seconds for each in done),
    )
