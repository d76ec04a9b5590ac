"""`Swarm`: workers side by side, their results in a file, and a smaller scenario for each new finding.

Does not: run an engine; `graphpact_swarm.runs.worker` does, in processes of its own.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from graphpact.engines import LoadOffer
from graphpact.errors import EngineError
from graphpact_swarm.draws import SEEDS_PER_START, Space
from graphpact_swarm.report.results import Results, SeedResult
from graphpact_swarm.runs.worker import Setup
from graphpact_swarm.scenario import Scenario
from graphpact_swarm.shrink import TRIALS
from graphpact_swarm.verdicts.coverage import Coverage
from graphpact_swarm.verdicts.judging import RunFinding, Verdict

_HANGING_TRIALS = 4
_TAIL = 30  # lines of a worker's log
_SETTINGS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables of a worker: the same order of sets in each run, and no threads that a fork would lose."""


class WorkerProcess:
    """A worker, and what it answers. Leaving the context ends it.

    Args:
        setup: What it runs.
        offer: What the engine offers.
        log: The file of what it and the engine print.
    """

    def __init__(self, setup: Setup, offer: LoadOffer, log: Path) -> None:
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "graphpact_swarm.runs.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=os.environ | _SETTINGS | dict(offer.variables()),
                text=True,
                start_new_session=True,
            )
        self._tell(asdict(setup))
        self._hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_error: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill it, and the engines that it started."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask(self, task: Any) -> Iterator[tuple[str, Any]]:
        """Give it a task, and yield its answers, each with its kind.

        Raises:
            EngineError: It failed, or ended; the message has the end of its log.
        """
        self._tell(task)
        while (answer := self._hear())[0] != "done":
            yield answer

    def _tell(self, message: Any) -> None:
        assert self._process.stdin is not None  # noqa: S101  a pipe
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def _hear(self) -> tuple[str, Any]:
        assert self._process.stdout is not None  # noqa: S101  a pipe
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        ((kind, value),) = json.loads(line).items()
        if kind == "error":
            raise EngineError(value["message"], hint=value["hint"])
        return kind, value

    def _ended(self) -> EngineError:
        status = self._process.wait()
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL:])
        return EngineError(f"a worker ended with status {status}:\n{tail}", hint=f"its log is {self._log}")


@dataclass(frozen=True, kw_only=True)
class Events:
    """What a swarm says while it runs; all are called in the thread that runs it.

    Args:
        ran: After each seed, with the number of seeds that are left.
        shrinks: Before a finding is shrunk, with its seed.
        shrunk: After that, with the scenario's file and the finding there.
    """

    ran: Callable[[SeedResult, int], None] = lambda *_: None
    shrinks: Callable[[int, RunFinding], None] = lambda *_: None
    shrunk: Callable[[int, Path, RunFinding], None] = lambda *_: None


@dataclass
class Swarm:
    """Runs of many seeds.

    Args:
        setup: What is run.
        offer: What the engine offers.
        results: The results so far.
        workers: Processes side by side.
        trials: Smaller scenarios that are tried for each finding; 0 for none.
        only_new: Whether seeds that add no pair of features are skipped.
        events: What is said.
    """

    setup: Setup
    offer: LoadOffer
    results: Results
    workers: int = 1
    trials: int = TRIALS
    only_new: bool = False
    events: Events = field(default_factory=Events)

    def run(self, seeds: Sequence[int]) -> None:
        """Run the seeds that have no result yet.

        Raises:
            EngineError: A worker failed, as it does where the engine cannot run at all.
        """
        blocks = list(self._blocks(seeds))
        if not blocks:
            return
        tasks: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        answers: queue.SimpleQueue[tuple[dict[str, Any], str, Any]] = queue.SimpleQueue()
        for block in blocks:
            tasks.put({"seeds": block})
        count = min(self.workers, len(blocks))
        threads = [
            threading.Thread(target=self._work, args=(at, tasks, answers), daemon=True) for at in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            self._hear(tasks, answers, blocks)
        finally:
            for _ in threads:
                tasks.put(None)
            for worker in self._started:
                worker.end()

    def _hear(self, tasks: Any, answers: Any, blocks: Sequence[Sequence[int]]) -> None:
        """Keep the answers of workers until all tasks are done; a new finding adds the task to shrink it."""
        open_tasks, left = len(blocks), sum(map(len, blocks))
        while open_tasks:
            task, kind, value = answers.get()
            match kind:
                case "failed":
                    raise value
                case "result":
                    left -= 1
                    result = self.results.add(value)
                    self.events.ran(result, left)
                    if (shrink := self._shrink_task(result)) is not None:
                        open_tasks += 1
                        tasks.put(shrink)
                case "shrunk":
                    self._keep(task, value)
                case "end":
                    open_tasks -= 1

    def __post_init__(self) -> None:
        self._started: list[WorkerProcess] = []
        self._shrinking: set[tuple[str, str, str]] = set()

    def _work(self, number: int, tasks: Any, answers: Any) -> None:
        """Run tasks in a worker, until there is none."""
        task: dict[str, Any] | None = {}
        try:
            worker = WorkerProcess(self.setup, self.offer, self.results.folder / f"worker-{number}.log")
            self._started.append(worker)
            while (task := tasks.get()) is not None:
                for kind, value in worker.ask(task):
                    answers.put((task, kind, value))
                answers.put((task, "end", None))
        except Exception as error:  # noqa: BLE001  the thread that waits raises it
            answers.put((task or {}, "failed", error))

    def _blocks(self, seeds: Sequence[int]) -> Iterator[list[int]]:
        """Yield the seeds to run, those of one configuration together."""
        blocks: dict[int, list[int]] = {}
        space, coverage = self.setup.space(self.offer), self.results.coverage
        for seed in seeds:
            if seed in self.results.results:
                continue
            if self.only_new and not _adds(space, coverage, seed):
                self.results.skipped.add(seed)
                continue
            blocks.setdefault(seed // SEEDS_PER_START, []).append(seed)
        yield from blocks.values()

    def _shrink_task(self, result: SeedResult) -> dict[str, Any] | None:
        """Return the task to shrink the first finding of a run; None if there is none, or a like one."""
        finding, scenario = result.verdict.first, result.scenario
        if finding is None or finding.known or not self.trials:
            return None
        shrunk = self._shrinking | set(self.results.smaller)
        if finding.signature in shrunk or scenario is None or not scenario.arrivals:
            return None
        self._shrinking.add(finding.signature)
        self.events.shrinks(result.seed, finding)
        # A process that hangs takes the whole time of a run in each trial.
        trials = min(self.trials, _HANGING_TRIALS) if finding.kind == "process" else self.trials
        return {"shrink": scenario.to_json(), "finding": asdict(finding), "trials": trials}

    def _keep(self, task: dict[str, Any], value: dict[str, Any]) -> None:
        """Write a shrunk scenario to a file."""
        scenario, finding = Scenario.from_json(value["scenario"]), RunFinding(**task["finding"])
        there = finding
        if value["verdict"] is not None:
            verdict = Verdict.from_json(value["verdict"])
            there = next(each for each in verdict.findings if each.signature == finding.signature)
        file = self.results.folder / f"seed-{scenario.seed}-{finding.kind}.json"
        scenario.save(file)
        self.results.add_smaller(finding, file, there)
        self.events.shrunk(scenario.seed, file, there)


def _adds(space: Space, coverage: Coverage, seed: int) -> bool:
    """Return whether a seed has a pair of features that no earlier one has; then it counts as seen."""
    choice = {**space.configuration(seed), **space.load(seed)}
    if not coverage.is_new(choice):
        return False
    coverage.add(choice, {})
    return True


def run_one(setup: Setup, offer: LoadOffer, scenario: Scenario) -> SeedResult:
    """Run one scenario in a worker, and return its result.

    Raises:
        EngineError: The worker failed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="graphpact-swarm-") as folder,
        WorkerProcess(setup, offer, Path(folder, "worker.log")) as worker,
    ):
        ((_, value),) = worker.ask({"scenario": scenario.to_json()})
        return SeedResult.from_json(value)
