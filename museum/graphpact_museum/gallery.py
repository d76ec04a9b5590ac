"""`visit`: runs the suite on exhibits and variants.

Does not: contain an exhibit.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch

from graphpact.attention import AttentionBackend
from graphpact.errors import GraphpactError
from graphpact.graphs import GraphDriver
from graphpact.plugins import Kind, PluginCatalog
from graphpact.runners import GraphRunner
from graphpact_cli import children
from graphpact_cli.child import Parent
from graphpact_cli.children import Ending, Task
from graphpact_conformance.contracts.examine import examine_contract_lane
from graphpact_conformance.drivers.driver_lanes import OF_DRIVERS
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.results import Finding, Outcome, Result
from graphpact_conformance.suite import (
    Classes,
    ClassSource,
    LaneKind,
    PlannedLane,
    examine_lane,
    planned_lanes,
    rank_lanes,
)
from graphpact_conformance.targets import Options
from graphpact_museum.exhibit import Exhibit, Variant

OPTIONS = Options(size="quick", examples=1, shrink=False)


@dataclass(frozen=True)
class Visit:
    """The results of the suite for one exhibit or variant.

    Args:
        piece: The exhibit or variant.
        findings: The finding with the best evidence of each rule; the key is None for those without a rule.
        lanes: The lanes that were checked.
        missing: Why its plugin is missing; None if it is installed.
        errors: The errors of the suite itself.
    """

    piece: Exhibit | Variant
    findings: dict[str | None, Finding] = field(default_factory=dict)
    lanes: tuple[str, ...] = ()
    missing: str | None = None
    errors: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether an exhibit was caught under its own rule, or a variant has no finding."""
        if self.missing is not None or self.errors or not self.lanes:
            return False
        if isinstance(self.piece, Exhibit):
            return self.piece.rule in self.findings
        return not self.findings


def visit(piece: Exhibit | Variant, options: Options = OPTIONS, *, quick: bool = False) -> Visit:
    """Check one exhibit or variant in its lanes.

    Args:
        piece: The exhibit or variant.
        options: Options of the run.
        quick: Whether to check an exhibit only for its own rule, until an experiment finds it.
    """
    wanted = piece.rule if quick and isinstance(piece, Exhibit) else None
    if wanted is not None:
        options = replace(options, only=frozenset({wanted}))
    try:
        base = right_class(piece.base)
    except GraphpactError as error:
        return Visit(piece, missing=error.message.splitlines()[0])
    if issubclass(base, GraphDriver):
        plans, results = _of_driver(piece, base, options)
    else:
        with planted(piece, base, options) as planned:
            plans = [str(plan) for plan in planned]
            results = _found_first(planned, options, wanted)
    findings: dict[str | None, Finding] = {}
    for finding in sorted((f for r in results for f in r.findings), key=lambda f: f.evidence):
        findings.setdefault(finding.rule, finding)
    errors = [r.reason or "" for r in results if r.outcome is Outcome.ERROR]
    return Visit(piece, findings, tuple(plans), errors=tuple(dict.fromkeys(errors)))


def _found_first(plans: Sequence[PlannedLane], options: Options, wanted: str | None) -> list[Result]:
    """Return the results of all lanes; with a ``wanted`` rule, those up to its first finding."""
    results: list[Result] = []
    for plan in plans:
        own = EXPERIMENTS if plan.experiments is None else plan.experiments
        one_by_one = wanted is not None and plan.has_all  # in light lanes some need a finding of another
        for experiments in [[e] for e in own] if one_by_one else [own]:
            results += examine_lane(plan, options, experiments=experiments)
            if any(wanted == finding.rule for result in results for finding in result.findings):
                return results
    return results


def _of_driver(
    piece: Exhibit | Variant, base: type[GraphDriver], options: Options
) -> tuple[list[str], list[Result]]:
    """Return the names of the lanes of an exhibit or variant of a driver, and their results."""
    lanes = [lane for lane in OF_DRIVERS.lanes_of(piece.make(base), options) if str(lane) in piece.lanes]
    return [str(lane) for lane in lanes], [r for lane in lanes for r in examine_contract_lane(lane, options)]


@contextmanager
def planted(
    piece: Exhibit | Variant, base: type[Any], options: Options = OPTIONS
) -> Iterator[list[PlannedLane]]:
    """Yield the lanes of an exhibit or variant; run them inside this context.

    An exhibit has the lanes that expose it, with all experiments. A variant has these, and all other lanes
    that a run has for its kinds of step. A piece with ranks has only lanes in which processes step together.

    Args:
        piece: The exhibit or variant.
        base: The correct class that it edits.
        options: Options of the run.
    """
    cls = piece.make(base)
    is_backend = issubclass(cls, AttentionBackend)
    backend: type[AttentionBackend] = cls if is_backend else ReferenceBackend
    runner: type[GraphRunner] = ReferenceRunner if is_backend else cls
    kind: LaneKind = "attention_backend" if is_backend else "runner"

    def plans(values: Sequence[str] | None) -> list[PlannedLane]:
        every = planned_lanes(backend, runner, options, kind=kind, values=values)
        return [plan for plan in every if str(plan.lane.config.case.plain) in piece.lanes]

    around = piece.around if isinstance(piece, Exhibit) else nullcontext
    with around(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an exhibit may warn
        own = plans(piece.values if isinstance(piece, Exhibit) else ())
        if piece.ranks is not None:
            source = ClassSource(f"{__name__}:classes_on_rank", (piece.name,))
            yield rank_lanes(own, piece.ranks, source, "thorough")
            return
        own = [replace(plan, is_full=True) for plan in own]
        names = {str(plan) for plan in own}
        others = plans(None) if isinstance(piece, Variant) else []
        yield [*own, *(plan for plan in others if str(plan) not in names)]


@contextmanager
def classes_on_rank(name: str) -> Iterator[Classes]:
    """Yield the classes of an exhibit or variant in the process of a rank."""
    from graphpact_museum.collection import EXHIBITS, VARIANTS  # noqa: PLC0415  imports this module

    pieces: list[Exhibit | Variant] = [*EXHIBITS, *VARIANTS]
    piece = next(p for p in pieces if p.name == name)
    cls = piece.make(right_class(piece.base))
    with piece.around() if isinstance(piece, Exhibit) else nullcontext():
        yield (cls, None) if issubclass(cls, AttentionBackend) else (ReferenceBackend, cls)


def visit_all(
    pieces: Sequence[Exhibit | Variant],
    on_visit: Callable[[Visit], None] | None = None,
    *,
    workers: int = 1,
    quick: bool = False,
) -> list[Visit]:
    """Visit exhibits and variants, in one or several processes; return the visits in their order.

    Args:
        pieces: Some of `graphpact_museum.collection.EXHIBITS` and ``VARIANTS``.
        on_visit: Called with each finished visit.
        workers: Number of processes; 1 uses this process.
        quick: See `visit`.
    """
    report = on_visit or (lambda _: None)
    if workers == 1:
        visits = []
        for piece in pieces:
            visits.append(visit(piece, quick=quick))
            report(visits[-1])
        return visits
    tasks = [_VisitTask(piece, report, quick=quick) for piece in pieces]
    bases = {piece.base for piece in pieces}
    plugins = [info.target.partition(":")[0] for info in PluginCatalog.scan().infos() if info.name in bases]
    children.prepare(["graphpact_museum.collection", *plugins])
    children.run(tasks, workers)
    return [task.visit for task in tasks]


class _VisitTask(Task):
    """The task that visits one piece.

    Attributes:
        visit: The visit.
    """

    work = f"{__name__}:send_visit"
    limit = 1800.0

    def __init__(self, piece: Exhibit | Variant, report: Callable[[Visit], None], *, quick: bool) -> None:
        self._report, self._quick = report, quick
        self.visit = Visit(piece)

    def arguments(self) -> tuple[str, bool]:
        """Return the arguments of `send_visit`."""
        return self.visit.piece.name, self._quick

    def hears(self, found: dict[str, Any]) -> None:
        """Keep the result that the child process sent."""
        self.visit = replace(self.visit, **found)

    def ends(self, ending: Ending) -> bool:
        """Report the visit; a process that ended with a fault is an error."""
        if ending.fault:
            said = "\n".join([ending.fault, *ending.frames, ending.stderr])
            self.visit = replace(self.visit, errors=(*self.visit.errors, said))
        self._report(self.visit)
        return False


def send_visit(parent: Parent, name: str, quick: bool) -> None:  # noqa: FBT001  arguments of a task
    """Visit a piece and send the result to the parent process. A child process runs this."""
    from graphpact_museum.collection import EXHIBITS, VARIANTS  # noqa: PLC0415  imports this module

    torch.set_num_threads(1)
    gc.freeze()
    pieces: list[Exhibit | Variant] = [*EXHIBITS, *VARIANTS]
    piece = next(p for p in pieces if p.name == name)
    parent.begins(name)
    seen = visit(piece, quick=quick)
    parent.send({at.name: getattr(seen, at.name) for at in fields(seen) if at.name != "piece"})


@cache
def right_class(name: str) -> type[Any]:
    """Return the correct class by its name.

    Raises:
        PluginError: The plugin is not installed.
    """
    if name == "reference":
        return ReferenceBackend
    if name == "reference_runner":
        return ReferenceRunner
    catalog = PluginCatalog.scan()
    kinds: tuple[Kind, ...] = ("runner", "graph_driver")
    for kind in kinds:
        if any(info.name == name for info in catalog.infos(kind)):
            return catalog.select(kind, name)
    return catalog.select("attention_backend", name)
