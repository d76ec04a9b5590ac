"""``python planted_worker.py '{"llama": "DIR", ...}'``: runs seeds of our engine with a plant of `plants`.

It is a process of its own, as workers of the swarm are: it forks, and a process of tests has threads. A line
of stdin is a task, ``{"plant": NAME or null, "seeds": [FIRST, LAST], "trials": N}``. The line that answers it
has the first finding, the smaller scenario, and the findings of that scenario without the plant.

Does not: judge what was found; `test_planted` does.
"""

import copy
import json
import os
import sys
from dataclasses import asdict, replace
from typing import Any

from plants import PLANTS, Plant

from graphpact_engine.load.offer import GraphpactLoad
from graphpact_swarm.draws import SEEDS_PER_START
from graphpact_swarm.runs.worker import Setup, Worker
from graphpact_swarm.scenario import Scenario
from graphpact_swarm.verdicts.judging import Verdict


def planted(worker: Worker, plant: Plant | None) -> Worker:
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


def first_finding(worker: Worker, first: int, last: int) -> dict[str, Any] | None:
    """Return the result of the first seed with a finding; None if all are clean."""
    for block in range(first, last, SEEDS_PER_START):
        for result in worker.run_seeds(range(block, min(block + SEEDS_PER_START, last))):
            if result["verdict"]["findings"]:
                return result
    return None


def answer(base: Worker, task: dict[str, Any]) -> dict[str, Any]:
    """Do a task."""
    plant = PLANTS[task["plant"]] if task["plant"] else None
    worker = planted(base, plant)
    found = first_finding(worker, *task["seeds"])
    if found is None:
        return {"seed": None}
    finding = Verdict.from_json(found["verdict"]).findings[0]
    told: dict[str, Any] = {
        "seed": found["seed"],
        "finding": asdict(finding),
        "trace": found["verdict"]["trace"],
    }
    if plant is None or not found["scenario"].get("arrivals"):
        return told
    smaller, _ = worker.shrink(Scenario.from_json(found["scenario"]), finding, task["trials"])
    worker._before = None
    right = worker.run_scenario(smaller)
    return {**told, "smaller": smaller.to_json(), "without": [str(each) for each in right.findings]}


if __name__ == "__main__":
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print
    base = Worker(Setup(engine="graphpact", models=json.loads(sys.argv[1])), GraphpactLoad())
    for line in sys.stdin:
        protocol.write(json.dumps(answer(base, json.loads(line))) + "\n")
        protocol.flush()
