"""`examine_driver`: runs all checks of one graph driver, in this process.

A driver has the lane ``fast`` and, if it claims a strict mode, the lane ``strict``. The promises of the
driver contract are checked in both lanes, the acts only in ``strict``. As in `graphpact_conformance.suite`,
each lane has one result for each rule.

Does not: define checks, or survive a crash of the driver; `graphpact_conformance.isolation.supervise` does
the latter.
"""

import gc
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from graphpact.graphs import GraphDriver
from graphpact.hookspecs import CONTRACT_VERSION
from graphpact.plugins import PluginCatalog
from graphpact_conformance.drivers import promises, strictness
from graphpact_conformance.drivers.acts import ACTS
from graphpact_conformance.drivers.requirement import Requirement
from graphpact_conformance.records.global_state import seeded
from graphpact_conformance.results import Finding, Outcome, PluginResults, Result
from graphpact_conformance.rules import RULES
from graphpact_conformance.targets import Listener, Options, Target, reproduce_line

FAST, STRICT = "fast", "strict"
"""The lanes of a driver."""


@dataclass(frozen=True, slots=True)
class DriverLane:
    """One mode of one driver.

    Args:
        driver: The driver.
        is_strict: Whether the driver is created with ``strict=True``.
        device: The device on which it records.
    """

    driver: type[GraphDriver]
    is_strict: bool
    device: torch.device = torch.device("cpu")  # noqa: RUF009  a constant

    def __str__(self) -> str:
        return STRICT if self.is_strict else FAST

    def make(self) -> GraphDriver:
        """Return a new driver."""
        return self.driver(self.device, strict=True) if self.is_strict else self.driver(self.device)

    def checks(self, options: Options) -> list[Requirement]:
        """Return the checks of this lane, in order."""
        found = [*promises.CHECKS.values(), *(strictness.CHECKS.values() if self.is_strict else ())]
        return [check for check in found if not options.only or check.rule in options.only]

    def cannot_run(self, check: Requirement) -> str | None:
        """Return why a check cannot run on the device of this lane, or None."""
        if self.device.type != "cpu" and check.name in ACTS and not ACTS[check.name].gpu:
            return f"on {self.device.type} it is not safe, or its outcome is not defined"
        return None


def lanes_of_driver(driver: type[GraphDriver], options: Options) -> list[DriverLane]:
    """Return the lanes of a driver."""
    device = torch.device(options.device)
    modes = (False, True) if driver.has_strict_mode else (False,)
    lanes = [DriverLane(driver, is_strict, device) for is_strict in modes]
    return [x for x in lanes if not options.lanes or any(fnmatchcase(str(x), g) for g in options.lanes)]


def examine_driver(
    target: Target,
    options: Options,
    listener: Listener,
    *,
    skip: Collection[str] = (),
    part: tuple[int, int] = (0, 1),
) -> PluginResults:
    """Run all checks of a driver, and pass each result to the listener.

    Args:
        target: The driver.
        options: Options of the run. ``size`` and ``examples`` have no effect, because drivers get no batches.
        listener: Receives the names of work and the results.
        skip: Names of work to leave out, as passed to `Listener.begins`.
        part: Index of a part of the lanes, and number of parts. `merged` of the suite joins the parts.

    Returns:
        The results object, with an empty list of results: the listener has them.

    Raises:
        PluginError: The driver cannot be loaded.
    """
    catalog = PluginCatalog.scan()
    info = next(i for i in catalog.infos("graph_driver") if i.name == target.name)
    driver = catalog.select("graph_driver", target.name)
    first, parts = part
    has_run = False
    lanes = lanes_of_driver(driver, options)
    for lane in lanes[first::parts]:
        for result in examine_driver_lane(
            lane,
            options,
            listener.begins,
            skip=skip,
            names=target.names,
            contract=int(info.contract or CONTRACT_VERSION),
        ):
            has_run |= result.outcome.ran
            listener.found(result)
    return PluginResults(
        kind=target.kind,
        name=target.name,
        distribution=info.distribution,
        version=info.version,
        contract=info.contract,
        drivers=[target.name] if has_run else [],
        device=options.device,
        not_shown=_not_shown(driver),
    )


def _not_shown(driver: type[GraphDriver]) -> list[str]:
    """Return one line with the number of acts that only the CUDA runtime can perform."""
    rows = strictness.ROWS.keys() - strictness.CHECKS.keys()
    return [f"{len(rows)} acts: they need the CUDA runtime"] if driver.has_strict_mode else []


def examine_driver_lane(
    lane: DriverLane,
    options: Options,
    begins: Callable[[str], object] = lambda _: None,
    *,
    skip: Collection[str] = (),
    names: str = "",
    contract: int = CONTRACT_VERSION,
) -> Iterator[Result]:
    """Run the checks of one lane, and yield a result for each rule.

    Args:
        lane: The lane.
        options: Options of the run.
        begins: Called with the name of each piece of work before it runs.
        skip: Names of work to leave out.
        names: Names of the driver for the command line.
        contract: The contract version for which the driver was written. Later rules are not checked.
    """
    missing = _unavailable(lane, begins, skip)
    done: dict[str | None, list[_Done]] = {}
    for check in lane.checks(options):
        work = f"{lane} :: {check.name}"
        if work in skip:
            continue
        later = RULES[check.rule].not_in_force(contract) if check.rule else None
        reason = later or missing or lane.cannot_run(check)
        if reason is None:
            begins(work)
        done.setdefault(check.rule, []).append(_run(check, lane, options, reason))
    for rule in (None, *RULES):
        if rule in done:
            only = [] if rule is None else [rule]
            result = _result(rule, lane, done[rule], reproduce_line(names, only, str(lane), options))
            if rule is not None and (why := RULES[rule].not_in_force(contract)):
                result = result.model_copy(update={"outcome": Outcome.UNSUPPORTED, "reason": why})
            yield result


@dataclass(frozen=True, slots=True)
class _Done:
    check: Requirement
    seconds: float
    breach: str | None
    not_run: str | None


def _unavailable(lane: DriverLane, begins: Callable[[str], object], skip: Collection[str]) -> str | None:
    """Return why the driver is unavailable on the device, or None if it is available.

    Also returns None if ``unavailable`` raises, because a promise checks that.
    """
    work = f"{lane} :: unavailable"
    if work in skip:
        return "`unavailable` did not return"
    begins(work)
    try:
        return lane.driver.unavailable(lane.device)
    except Exception:  # noqa: BLE001  the promise reports it
        return None


def _run(check: Requirement, lane: DriverLane, options: Options, not_run: str | None) -> _Done:
    start = time.perf_counter()
    breach = None
    if not_run is None:
        with _isolated(options.seed, lane.device):
            breach = check.breach(lane.make)
    return _Done(check, time.perf_counter() - start, breach, not_run)


@contextmanager
def _isolated(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers of a check, and afterwards reset global state that a driver may have set."""
    try:
        with seeded(seed, device):
            yield
    finally:
        gc.enable()
        GraphDriver._capturing, GraphDriver._calling = None, False  # noqa: SLF001  if a capture did not end


def _result(rule: str | None, lane: DriverLane, done: list[_Done], reproduce: str) -> Result:
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
    not_run = [each.not_run for each in done if each.not_run is not None]
    outcome, reason = (
        Outcome.PASS,
        f"not run: {len(not_run)} of {len(done)}: {not_run[0]}" if not_run else None,
    )
    if findings:
        outcome, reason = Outcome.FAIL, None
    elif len(not_run) == len(done):
        outcome, reason = Outcome.NOT_RUN, not_run[0]
    return Result(
        rule=rule,
        check=", ".join(each.check.name for each in broken or done),
        lane=str(lane),
        outcome=outcome,
        level=RULES[rule].level if rule else "MUST",
        reason=reason,
        findings=findings,
        examples=len(done) - len(not_run),
        seconds=sum(each.seconds for each in done),
    )
