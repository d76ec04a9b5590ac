"""``python -m graphpact_swarm.runs.worker``: a process that imported one engine, and runs it.

It is told what to do by lines of JSON on stdin, and answers by lines on the descriptor that was its stdout;
what the engine prints goes to stderr, which is a file.

    {"engine": ..., "models": {...}, ...}        the first line: `Setup`
    {"seeds": [...]}                             run the seeds of one configuration
    {"scenario": {...}}                          run a scenario
    {"shrink": {...}, "finding": {...}}          look for a smaller scenario with the same finding

Does not: choose seeds, or keep results; `graphpact_swarm.swarm` does.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from graphpact.engines import EngineStart, LoadOffer
from graphpact.errors import EngineError, GraphpactError
from graphpact.plugins import PluginCatalog
from graphpact_swarm.draws import Space, draw_scenario
from graphpact_swarm.models import ModelFacts
from graphpact_swarm.runs.engine_process import EngineProcess
from graphpact_swarm.runs.forks import ForkError, die_with_parent
from graphpact_swarm.scenario import Arrival, Scenario
from graphpact_swarm.shrink import TRIALS, shrunk_scenario
from graphpact_swarm.verdicts.judging import RunFinding, Verdict
from graphpact_swarm.verdicts.reference import Reference

_MOST_ERROR = 0.05
"""A larger error of the engine, alone and eagerly, means that the reference is another model."""
_LENGTHS = (1, 7, 33, 64)  # prompts by which the error is measured


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a worker runs.

    Args:
        engine: The name of the engine.
        models: The folders of models, by name, the plainest first.
        settings: The engine's own arguments.
        drafts: Folders of draft models.
        fixed: Features with one value.
        is_strict: Whether the tape is strict.
        has_faults: Whether faults are drawn.
        repeats: How often each seed is run, to see that its steps are the same.
    """

    engine: str
    models: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    drafts: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False
    has_faults: bool = False
    repeats: int = 1

    def space(self, offer: LoadOffer) -> Space:
        """Return the configurations and loads."""
        return Space(
            self.engine,
            offer,
            {name: Path(path) for name, path in self.models.items()},
            drafts=frozenset(self.drafts),
            has_faults=self.has_faults,
            fixed=self.fixed,
        )


class Worker:
    """An imported engine, with the references of its models.

    Args:
        setup: What it runs.
        offer: What the engine offers.
        before: Is called in each process of an engine before its start; tests plant faults by it.
    """

    def __init__(self, setup: Setup, offer: LoadOffer, before: Callable[[], None] | None = None) -> None:
        self.setup, self.offer = setup, offer
        self.space = setup.space(offer)
        offer.prepare()
        self._before = before
        self._references = {name: Reference(Path(path)) for name, path in setup.models.items()}
        self._facts = {name: ModelFacts.of(Path(path)) for name, path in setup.models.items()}
        self._errors: dict[str, float] = {}
        gc.collect()
        gc.freeze()  # forks would copy what a collection touches

    def error_of(self, model: str) -> float:
        """Return the measured error of the engine, which runs each request alone and eagerly.

        Raises:
            EngineError: It is so large that the reference must be another model.
        """
        if model not in self._errors:
            facts = self._facts[model]
            arrivals = [
                Arrival(
                    prompt=tuple(facts.tokens[(7 * at + size) % len(facts.tokens)] for at in range(size)),
                    max_new_tokens=8,
                    arrives_in=60 * place,
                    with_logprobs=True,
                )
                for place, size in enumerate(_LENGTHS)
            ]
            choice = self._of_one_rank(self.space.plain() | {"model": model})
            alone = Scenario(engine=self.setup.engine, choice=choice, arrivals=tuple(arrivals))
            reference = self._references[model]
            with EngineProcess(self.offer, self._start(choice, is_eager=True)) as process:
                outcome = process.outcome(alone)
            if outcome.error is not None:
                raise EngineError(
                    f"{self.setup.engine} cannot run a request alone and eagerly: {outcome.error.text}"
                )
            worst = 0.0
            for place, answer in outcome.answers.items():
                scores = reference.scores(arrivals[place].prompt, answer.tokens)
                worst = max([worst, *(each.behind for each in scores)])
                worst = max(
                    [worst, *(abs(a - b.logprob) for a, b in zip(answer.logprobs, scores, strict=False))]
                )
            if not worst <= _MOST_ERROR:
                raise EngineError(
                    f"{self.setup.engine}, eagerly and with one request at a time, differs from the model of"
                    f" transformers by {worst:.3g} in the logarithm of a probability",
                    hint="give a checkpoint that both compute alike, in float32",
                )
            self._errors[model] = worst
        return self._errors[model]

    def _of_one_rank(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a configuration of one process: without the feature that asks for more."""
        for feature in self.offer.features():
            if self.offer.ranks(choice) == 1:
                break
            choice = choice | {feature.name: feature.values[0]}
        return choice

    def run_seeds(self, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Run the seeds of one configuration, and yield a result for each."""
        choice = self.space.configuration(seeds[0])
        begun = time.monotonic()
        with ExitStack() as stack:
            try:
                process = stack.enter_context(self._process(choice))
            except ForkError as error:
                verdict = Verdict(findings=(RunFinding(kind="start", text=error.message),))
                for seed in seeds:
                    scenario = Scenario(
                        engine=self.setup.engine,
                        choice=choice,
                        arrivals=(),
                        seed=seed,
                        is_strict=self.setup.is_strict,
                    )
                    yield self._result(scenario, verdict)
                return
            start_seconds = time.monotonic() - begun
            for seed in seeds:
                scenario = draw_scenario(
                    self.setup.engine,
                    seed,
                    choice,
                    self.space.load(seed),
                    process.landmarks,
                    self._facts[choice["model"]],
                    ranks=process.ranks,
                    settings=self.setup.settings,
                    is_strict=self.setup.is_strict,
                )
                verdict = self._repeated(process, scenario)
                yield self._result(scenario, verdict, start_seconds=start_seconds)
                start_seconds = 0.0

    def _repeated(self, process: EngineProcess, scenario: Scenario) -> Verdict:
        """Run a scenario as often as is asked for; another digest is a finding."""
        verdicts = [_run(process, scenario) for _ in range(self.setup.repeats)]
        digests = sorted({verdict.digest for verdict in verdicts})
        if len(digests) > 1:
            text = f"{len(verdicts)} runs took {len(digests)} courses: {', '.join(digests)}"
            differs = RunFinding(kind="repeat", text=text)
            return replace(verdicts[0], findings=(*verdicts[0].findings, differs))
        return verdicts[0]

    def run_scenario(self, scenario: Scenario) -> Verdict:
        """Start an engine for one scenario, and run it."""
        try:
            with self._process(scenario.choice) as process:
                return self._repeated(process, scenario)
        except ForkError as error:
            return Verdict(findings=(RunFinding(kind="start", text=error.message),))

    def run_file(self, scenario: Scenario) -> dict[str, Any]:
        """Run one scenario, and return its result as `run_seeds` yields it."""
        return self._result(scenario, self.run_scenario(scenario))

    def _result(self, scenario: Scenario, verdict: Verdict, *, start_seconds: float = 0.0) -> dict[str, Any]:
        known = self.offer.known()
        findings = [
            replace(
                each,
                known=next(
                    (
                        f"{what.reason} ({what.thread or 'not reported'})"
                        for what in known
                        if what.covers(each.kind, each.text, scenario.choice)
                    ),
                    "",
                ),
            )
            for each in verdict.findings
        ]
        values = scenario.to_json()
        if not findings:
            values.pop("arrivals")  # the seed says them
        return {
            "seed": scenario.seed,
            "scenario": values,
            "verdict": replace(verdict, findings=tuple(findings)).to_json(),
            "start_seconds": round(start_seconds, 3),
        }

    def shrink(self, scenario: Scenario, finding: RunFinding, trials: int) -> tuple[Scenario, Verdict | None]:
        """Return a smaller scenario with the same finding, and its verdict."""
        engines = {each.name for each in self.space.engine_features()}
        now: tuple[str, EngineProcess] | None = None
        with ExitStack() as stack:

            def run(candidate: Scenario) -> Verdict | None:
                nonlocal now
                choice = {name: value for name, value in candidate.choice.items() if name in engines}
                if self.space.refused(choice) is not None:
                    return None
                key = json.dumps(choice, sort_keys=True)
                if now is None or now[0] != key:
                    stack.close()
                    now = None
                    try:
                        now = key, stack.enter_context(self._process(choice))
                    except ForkError as error:
                        return Verdict(findings=(RunFinding(kind="start", text=error.message),))
                return _run(now[1], candidate)

            return shrunk_scenario(scenario, finding, run, self.space.plain(), trials)

    def _process(self, choice: Mapping[str, Any]) -> EngineProcess:
        model = choice["model"]
        return EngineProcess(
            self.offer,
            self._start(choice),
            self._references[model],
            self.error_of(model),
            self._before,
        )

    def _start(self, choice: Mapping[str, Any], *, is_eager: bool = False) -> EngineStart:
        return EngineStart(
            choice=choice,
            model=Path(self.setup.models[choice["model"]]),
            settings=self.setup.settings,
            drafts={name: Path(path) for name, path in self.setup.drafts.items()},
            is_strict=self.setup.is_strict,
            is_eager=is_eager,
        )


def _run(process: EngineProcess, scenario: Scenario) -> Verdict:
    try:
        return process.run(scenario)
    except ForkError as error:
        return Verdict(findings=(RunFinding(kind="process", text=error.message),))


def _serve(lines: TextIO, answers: TextIO) -> None:
    def answer(kind: str, value: Any) -> None:
        answers.write(json.dumps({kind: value}) + "\n")
        answers.flush()

    setup = Setup(**json.loads(next(lines)))
    offer = PluginCatalog.scan().select("engine", setup.engine)().under_load()
    assert offer is not None  # noqa: S101  the command asked before
    os.environ.update(offer.variables())
    worker = Worker(setup, offer)
    answer("ready", None)
    for line in lines:
        task = json.loads(line)
        try:
            if "seeds" in task:
                for result in worker.run_seeds(task["seeds"]):
                    answer("result", result)
            elif "scenario" in task:
                scenario = Scenario.from_json(task["scenario"])
                answer("result", worker.run_file(scenario))
            else:
                smaller, verdict = worker.shrink(
                    Scenario.from_json(task["shrink"]),
                    RunFinding(**task["finding"]),
                    task.get("trials", TRIALS),
                )
                answer("shrunk", {"scenario": smaller.to_json(), "verdict": verdict and verdict.to_json()})
            answer("done", None)
        except GraphpactError as error:
            answer("error", {"message": error.message, "hint": error.hint})


if __name__ == "__main__":
    die_with_parent()
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(sys.stdin, protocol)
