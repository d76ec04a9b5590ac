"""`Plant`, `serve_plants` and `PlantedRuns`: runs of the swarm whose engine has a planted fault.

A worker process of its own imports the engine and forks, as workers of the swarm do; a process of tests has
threads. A script of an engine's tests is the worker:

    serve_plants(PLANTS, VllmLoad())                            # in the script
    with PlantedRuns(script, VllmLoad(), folder) as runs:       # in the test
        runs.ask(plant="late_copy", seeds=[0, 50], trials=30)

A task is a line of JSON, ``{"plant": NAME or null, "seeds": [FIRST, LAST], "trials": N}``. Its answer has the
first finding, the smaller scenario, and the findings of that scenario without the plant.

Does not: judge what was found; the tests do.
"""

import copy
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graphpact.engines import LoadOffer
from graphpact_swarm.draws import SEEDS_PER_START
from graphpact_swarm.models import MADE, make_model
from graphpact_swarm.runs.worker import Setup, Worker
from graphpact_swarm.scenario import Scenario
from graphpact_swarm.verdicts.judging import Verdict

ANSWERS = ("tokens", "logprobs")
"""The kinds of a wrong answer: a logarithm of probability may be wrong before a token is."""


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A fault, and what is found of it.

    Args:
        apply: Plants it in this process.
        kinds: The kinds of finding that it is seen by.
        rule: The rule that its finding names; empty for none.
        names: Words of its finding.
        settings: The engine's own arguments.
        fixed: Features with one value, for a fault that is in the code of this value only.
        models: The models that are drawn.
        is_strict: Whether the tape is strict.
    """

    apply: Callable[[], None]
    kinds: frozenset[str]
    rule: str = ""
    names: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = MADE
    is_strict: bool = False


def plants_in(
    plants: dict[str, Plant], **usual: Any
) -> Callable[..., Callable[[Callable[[], None]], Callable[[], None]]]:
    """Return a decorator with arguments of `Plant`, which adds a function to ``plants``.

    Args:
        plants: Where plants are added, by the names of their functions.
        usual: Arguments that a plant has unless it says others.
    """

    def plant(*kinds: str, **more: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
        def add(apply: Callable[[], None]) -> Callable[[], None]:
            plants[apply.__name__] = Plant(apply=apply, kinds=frozenset(kinds), **usual | more)
            return apply

        return add

    return plant


def patch(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator that replaces ``owner.name`` by a function that gets the original first."""

    def put(function: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, patched)

    return put


# -- the worker process ------------------------------------------------------------------------------


def serve_plants(plants: Mapping[str, Plant], engine: str, offer: LoadOffer) -> None:
    """Do the tasks of stdin, and answer on what was stdout. The models are the only argument of the process.

    Args:
        plants: The plants by name.
        engine: The name of the engine.
        offer: What it offers. Its variables are set, and it is not imported yet.
    """
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print
    base = Worker(Setup(engine=engine, models=json.loads(sys.argv[1])), offer)
    for line in sys.stdin:
        task = json.loads(line)
        plant = plants[task["plant"]] if task["plant"] else None
        protocol.write(json.dumps(_answer(base, plant, task)) + "\n")
        protocol.flush()


def _planted(worker: Worker, plant: Plant | None) -> Worker:
    """Return a worker with the imports and references of ``worker``, whose engines have a plant."""
    other = copy.copy(worker)
    if plant is not None:
        other.setup = replace(
            worker.setup,
            models={name: worker.setup.models[name] for name in plant.models},
            settings=dict(plant.settings),
            fixed=dict(plant.fixed),
            is_strict=plant.is_strict,
        )
        other._before = plant.apply
    other.space = other.setup.space(worker.offer)
    return other


def _first_finding(worker: Worker, first: int, last: int) -> dict[str, Any] | None:
    """Return the result of the first seed with a finding that is not known; None if there is none."""
    at = first
    while at < last:
        end = min(last, (at // SEEDS_PER_START + 1) * SEEDS_PER_START)  # seeds of one configuration
        for result in worker.run_seeds(range(at, end)):
            if not all(each["known"] for each in result["verdict"]["findings"]):
                return result
        at = end
    return None


def _answer(base: Worker, plant: Plant | None, task: Mapping[str, Any]) -> dict[str, Any]:
    worker = _planted(base, plant)
    found = _first_finding(worker, *task["seeds"])
    if found is None:
        return {"seed": None}
    finding = Verdict.from_json(found["verdict"]).first
    assert finding is not None
    told: dict[str, Any] = {
        "seed": found["seed"],
        "finding": asdict(finding),
        "trace": found["verdict"]["trace"],
    }
    if plant is None or not found["scenario"].get("arrivals"):
        return told
    smaller, _ = worker.shrink(Scenario.from_json(found["scenario"]), finding, task["trials"])
    worker._before = None
    right = Verdict.from_json(worker.run_file(smaller)["verdict"])
    without = [str(each) for each in right.findings if not each.known]
    return {**told, "smaller": smaller.to_json(), "without": without}


# -- in the tests ------------------------------------------------------------------------------------


class PlantedRuns:
    """One worker process; a context that ends it.

    Args:
        script: The script of the worker, which calls `serve_plants`.
        offer: The engine.
        folder: Where the made models are written, and what the worker prints.
    """

    def __init__(self, script: Path, offer: LoadOffer, folder: Path) -> None:
        models = {name: str(make_model(name, folder)) for name in MADE}
        self._log = log = folder / "log"
        variables = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **offer.variables()}
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(script), json.dumps(models)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | variables | {"PYTHONPATH": path.rstrip(os.pathsep)},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, traceback)

    def ask(self, **task: Any) -> dict[str, Any]:
        """Give a task to the worker, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._log.read_text()[-3000:]
        answer: dict[str, Any] = json.loads(line)
        return answer
