"""Running the suite against exhibits and variants, and what came of it: `visit`.

Does not: hold any exhibit.
"""

import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from graphpact.attention import AttentionBackend
from graphpact.errors import GraphpactError
from graphpact.plugins import PluginCatalog
from graphpact.runners import GraphRunner
from graphpact_conformance.museum.exhibit import Exhibit, Variant
from graphpact_conformance.reference import ReferenceBackend, ReferenceRunner
from graphpact_conformance.results import Finding, Outcome
from graphpact_conformance.suite import Options, PlannedLane, TargetKind, examine_lane, plan_lanes

OPTIONS = Options(size="quick", examples=1, shrink=False)


@dataclass(frozen=True)
class Visit:
    """What the suite says of one exhibit or variant.

    Args:
        piece: Which.
        findings: What it found, the first for each rule; None for what is no rule's.
        lanes: The lanes that were looked at.
        missing: Why it could not be shown: its plugin is not installed.
        errors: Faults of the suite itself.
    """

    piece: Exhibit | Variant
    findings: dict[str | None, Finding] = field(default_factory=dict)
    lanes: tuple[str, ...] = ()
    missing: str | None = None
    errors: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether an exhibit was caught under its own rule, and a variant not at all."""
        if self.missing is not None or self.errors or not self.lanes:
            return False
        if isinstance(self.piece, Exhibit):
            return self.piece.rule in self.findings
        return not self.findings


def visit(piece: Exhibit | Variant, options: Options = OPTIONS) -> Visit:
    """Hold one exhibit or variant to all rules, in the lanes that it names."""
    try:
        base = right_class(piece.base)
    except GraphpactError as error:
        return Visit(piece, missing=error.message.splitlines()[0])
    with planted(piece, base, options) as plans:
        results = [result for plan in plans for result in examine_lane(plan, options)]
    findings: dict[str | None, Finding] = {}
    for result in results:
        for finding in result.findings:
            findings.setdefault(result.rule, finding)
    errors = [r.reason or "" for r in results if r.outcome is Outcome.ERROR]
    return Visit(piece, findings, tuple(map(str, plans)), errors=tuple(dict.fromkeys(errors)))


@contextmanager
def planted(
    piece: Exhibit | Variant, base: type[Any], options: Options = OPTIONS
) -> Iterator[list[PlannedLane]]:
    """Return the lanes of an exhibit or variant, each looked at in full; they run inside the context.

    Args:
        piece: Which.
        base: The right class that it is made of.
        options: How many lanes.
    """
    cls = piece.make(base)
    is_backend = issubclass(cls, AttentionBackend)
    backend: type[AttentionBackend] = cls if is_backend else ReferenceBackend
    runner: type[GraphRunner] = ReferenceRunner if is_backend else cls
    kind: TargetKind = "attention_backend" if is_backend else "runner"
    around = piece.around if isinstance(piece, Exhibit) else nullcontext
    with around(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is planted may warn, too
        yield [
            replace(plan, is_full=True)
            for plan in plan_lanes(backend, runner, options, kind=kind)
            if str(plan.lane.config.case) in piece.lanes
        ]


def visit_all(
    pieces: Sequence[Exhibit | Variant],
    on_visit: Callable[[Visit], None] | None = None,
    *,
    workers: int = 1,
    quick: bool = False,
) -> list[Visit]:
    """Visit one after another, or in as many processes as are given; in the order of ``pieces``.

    Args:
        pieces: Of `graphpact_conformance.museum.EXHIBITS` and ``VARIANTS``.
        on_visit: Called with each visit as it ends.
        workers: Processes; 1 stays in this one.
        quick: Hold exhibits to their own rule alone, which leaves out what else fires.
    """
    told = on_visit or (lambda _: None)
    if workers == 1:
        visits = []
        for piece in pieces:
            visits.append(visit(piece, _options(piece, quick=quick)))
            told(visits[-1])
        return visits
    context = multiprocessing.get_context("spawn")
    done: dict[str, Visit] = {}
    by_name = {piece.name: piece for piece in pieces}
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        futures = [pool.submit(_visit_named, piece.name, quick) for piece in pieces]
        for future in as_completed(futures):
            name, findings, lanes, missing, errors = future.result()
            done[name] = Visit(by_name[name], findings, lanes, missing, errors)
            told(done[name])
    return [done[piece.name] for piece in pieces]


def _options(piece: Exhibit | Variant, *, quick: bool) -> Options:
    if quick and isinstance(piece, Exhibit):
        return replace(OPTIONS, only=frozenset({piece.rule}))
    return OPTIONS


def _one_thread() -> None:
    torch.set_num_threads(1)


def _visit_named(
    name: str,
    quick: bool,  # noqa: FBT001  a pool calls by position
) -> tuple[str, dict[str | None, Finding], tuple[str, ...], str | None, tuple[str, ...]]:
    """Visit a piece by its name, and return what of the visit goes from process to process."""
    from graphpact_conformance.museum import EXHIBITS, VARIANTS  # noqa: PLC0415  they import us

    pieces: list[Exhibit | Variant] = [*EXHIBITS, *VARIANTS]
    piece = next(p for p in pieces if p.name == name)
    seen = visit(piece, _options(piece, quick=quick))
    return name, seen.findings, seen.lanes, seen.missing, seen.errors


@cache
def right_class(name: str) -> type[Any]:
    """Return the right class of that name.

    Raises:
        PluginError: It is not installed.
    """
    if name == "reference":
        return ReferenceBackend
    if name == "reference_runner":
        return ReferenceRunner
    catalog = PluginCatalog.scan()
    if any(info.name == name for info in catalog.infos("runner")):
        return catalog.select("runner", name)
    return catalog.select("attention_backend", name)
