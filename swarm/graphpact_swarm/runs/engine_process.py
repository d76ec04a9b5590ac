"""`EngineProcess`: an engine that is started once, and forked for each run.

A fork has the whole state of the started engine: pools, caches, counters. So no run sees another one, and
nothing has to be reset. An engine of several ranks cannot be forked, because its ranks hold connections: it
starts for each run.

    this process        imported the engine and the reference
      started engine    one for each configuration
        run             one for each scenario; it judges itself

Does not: choose scenarios.
"""

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from graphpact.engines import EngineStart, Landmarks, LoadedEngine, LoadOffer
from graphpact_swarm.outcome import RunError, RunOutcome
from graphpact_swarm.runs.forks import Fork, ForkError, ParentPipe
from graphpact_swarm.runs.in_process import run_scenario
from graphpact_swarm.scenario import Scenario
from graphpact_swarm.verdicts.coverage import coverage_of
from graphpact_swarm.verdicts.judging import RunFinding, Verdict, judge
from graphpact_swarm.verdicts.reference import Reference

START_SECONDS = 300.0
"""The most time of a start."""
RUN_SECONDS = 300.0
"""The most time of a run."""
_AFTER_KILL = 60.0  # seconds in which the other ranks end after one was killed


class EngineProcess:
    """An engine of one configuration; leaving the context ends it.

    Args:
        offer: The engine, which this process has imported.
        how: How it is started.
        reference: The model; None if no run is judged.
        measured_error: The error of the engine; see `judge`.
        before: Is called in the engine's process before the start; tests plant faults by it.

    Raises:
        ForkError: The engine did not start.
    """

    def __init__(
        self,
        offer: LoadOffer,
        how: EngineStart,
        reference: Reference | None = None,
        measured_error: float = 0.0,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._offer, self._how, self._reference = offer, how, reference
        self._measured_error, self._before = measured_error, before
        self.ranks = offer.ranks(how.choice) if not how.is_eager else 1
        self._stack = ExitStack()
        self._started: Fork | None = None
        with self._stack:
            started = self._stack.enter_context(Fork(_serve, self))
            self.landmarks: Landmarks = started.hear(START_SECONDS)
            self._started = started
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, scenario: Scenario, seconds: float = RUN_SECONDS) -> Verdict:
        """Run a scenario in a fork of the engine, and judge it."""
        if self.ranks > 1:
            return self._run_ranks(scenario, seconds)
        assert self._started is not None  # noqa: S101  since the constructor
        self._started.tell((scenario, seconds))
        return _verdict_of(self._started.hear(seconds + START_SECONDS))

    def outcome(self, scenario: Scenario, seconds: float = RUN_SECONDS) -> RunOutcome:
        """Run a scenario in a fork of the engine, and return what came, unjudged."""
        assert self._started is not None  # noqa: S101  since the constructor
        self._started.tell((scenario, -seconds))
        found = self._started.hear(seconds + START_SECONDS)
        if isinstance(found, Verdict):
            raise ForkError(str(found.findings[0]))
        outcome: RunOutcome = found
        return outcome

    # -- in the child ----------------------------------------------------------------------------

    def start(self, rank: int = 0, port: int = 0) -> LoadedEngine:
        """Start the engine in this process."""
        if self._before is not None:
            self._before()
        return self._offer.start(replace(self._how, rank=rank, port=port))

    def judged(self, scenario: Scenario, outcome: RunOutcome) -> Verdict:
        """Return the verdict about an outcome."""
        assert self._reference is not None  # noqa: S101  the callers judge
        verdict = judge(scenario, outcome, self._reference, self._measured_error)
        return replace(verdict, coverage=coverage_of(outcome))

    # -- ranks -----------------------------------------------------------------------------------

    def _run_ranks(self, scenario: Scenario, seconds: float) -> Verdict:
        """Start a process for each rank, run, and judge all of them."""
        shared = self._offer.shares_requests(scenario.choice)
        places = range(len(scenario.arrivals))
        port = _free_port()
        killed = {each.rank for each in scenario.process_faults if each.kind == "kill"}
        verdicts: list[Verdict] = []
        with ExitStack() as stack:
            forks = [
                stack.enter_context(
                    Fork(
                        _rank,
                        self,
                        scenario,
                        rank,
                        port,
                        list(places) if shared else [at for at in places if at % self.ranks == rank],
                    )
                )
                for rank in range(self.ranks)
            ]
            # A killed rank ends first; the others must end in time, with an error or without.
            for rank in sorted(range(self.ranks), key=lambda rank: rank not in killed):
                limit = _AFTER_KILL if killed and rank not in killed else seconds + START_SECONDS
                try:
                    verdicts.append(_verdict_of(forks[rank].hear(limit)))
                except ForkError as error:
                    if rank not in killed:
                        verdicts.append(_process_verdict(f"rank {rank}: {error.message}"))
        return _merged(verdicts, shared=shared, killed=bool(killed))


def _serve(pipe: ParentPipe, process: EngineProcess) -> None:
    """Start an engine, and fork it for each scenario."""
    if process.ranks > 1:
        pipe.tell(_landmarks_of_ranks(process))
        return
    engine = process.start()
    pipe.tell(engine.landmarks)
    while (asked := pipe.hear()) is not None:
        scenario, seconds = asked
        try:
            with Fork(_run, process, engine, scenario, seconds > 0) as fork:
                pipe.tell(fork.hear(abs(seconds)))
        except ForkError as error:
            pipe.tell(_process_verdict(error.message))


def _run(
    pipe: ParentPipe,
    process: EngineProcess,
    engine: LoadedEngine,
    scenario: Scenario,
    judged: bool,  # noqa: FBT001
) -> Verdict | RunOutcome:
    del pipe
    outcome = run_scenario(engine, scenario, range(len(scenario.arrivals)))
    return process.judged(scenario, outcome) if judged else outcome


def _rank(
    pipe: ParentPipe, process: EngineProcess, scenario: Scenario, rank: int, port: int, own: Sequence[int]
) -> Verdict:
    """Start one rank, run its requests, and judge them."""
    del pipe
    engine = process.start(rank, port)
    outcome = run_scenario(engine, scenario, own, rank=rank)
    if outcome.error is not None and scenario.process_faults and outcome.error.kind == "raised":
        outcome = replace(outcome, error=RunError(kind="injected", text=outcome.error.text))
    return process.judged(scenario, outcome)


def _landmarks_of_ranks(process: EngineProcess) -> Landmarks:
    """Start all ranks, and return the landmarks of the first one."""
    port = _free_port()

    def start(pipe: ParentPipe, rank: int) -> Landmarks:
        del pipe
        return process.start(rank, port).landmarks

    with ExitStack() as stack:
        forks = [stack.enter_context(Fork(start, rank)) for rank in range(process.ranks)]
        found: list[Landmarks] = [fork.hear(START_SECONDS) for fork in forks]
    return found[0]


def _merged(verdicts: Sequence[Verdict], *, shared: bool, killed: bool) -> Verdict:
    """Return the verdict of all ranks: findings of any; ranks that share requests take the same steps."""
    findings = [finding for verdict in verdicts for finding in verdict.findings]
    digests = [verdict.digest for verdict in verdicts if verdict.digest]
    if shared and not killed and not findings and len(set(digests)) > 1:
        findings.append(RunFinding(kind="ranks", text="ranks that share requests took other steps"))
    findings.sort(key=lambda each: (each.step < 0, each.step))
    coverage: dict[str, int] = {}
    for verdict in verdicts:
        for name, count in verdict.coverage.items():
            coverage[name] = coverage.get(name, 0) + count
    return Verdict(
        findings=tuple(findings),
        near_ties=sum(verdict.near_ties for verdict in verdicts),
        worst_error=max((verdict.worst_error for verdict in verdicts), default=0.0),
        ended_by="kill" if killed else next((each.ended_by for each in verdicts if each.ended_by), ""),
        digest="-".join(digests),
        coverage=coverage,
        passes=max((verdict.passes for verdict in verdicts), default=0),
        steps=sum(verdict.steps for verdict in verdicts),
        seconds=max((verdict.seconds for verdict in verdicts), default=0.0),
        trace=next((verdict.trace for verdict in verdicts if verdict.trace), ""),
    )


def _process_verdict(text: str) -> Verdict:
    return Verdict(findings=(RunFinding(kind="process", text=text),))


def _verdict_of(value: Any) -> Verdict:
    verdict: Verdict = value
    return verdict


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
