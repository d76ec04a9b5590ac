"""``graphpact swarm``: whole engines under generated load.

Does not: import an engine, or torch before a model is made.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from graphpact.engines import EngineOffer, Feature, LoadOffer
from graphpact.errors import ContractError, UsageError
from graphpact.plugins import PluginCatalog
from graphpact_cli.console import clean, data, note, print_table, talk
from graphpact_cli.pairs import pair_of, setting_of
from graphpact_cli.signals import stopped_by_sigterm

_SEEDS_HINT = "for example --seeds 0:200, or --seeds 17"


def swarm(
    engine: Annotated[str, typer.Argument(help="The engine: sglang, vllm or graphpact.")],
    *,
    seeds: Annotated[
        str, typer.Option(metavar="FIRST:LAST", help="The seeds to run, without the last one; or one seed.")
    ] = "0:20",
    model: Annotated[
        Path | None,
        typer.Option(
            help="The folder of a checkpoint. Default: small models with random weights.", show_default=False
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DRAFTS=DIR", help="A draft model, such as eagle=DIR; repeatable.", show_default=False
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="engine.NAME=VALUE: an argument of the engine; FEATURE=VALUE: the only value of a feature;"
            " repeatable.",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Run on the strict tape, and poison memory that no request owns.")
    ] = False,
    faults: Annotated[
        bool,
        typer.Option(
            "--faults", help="Inject faults: a step that raises, a full cache, a killed rank, a slow rank."
        ),
    ] = False,
    scenario: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run the scenario of a file instead of seeds.", show_default=False),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Run each seed so many times, and compare the steps.")
    ] = 1,
    only_new: Annotated[
        bool,
        typer.Option(
            "--only-new", help="Skip seeds that add no new pair of features; it costs nothing to know."
        ),
    ] = False,
    trials: Annotated[
        int, typer.Option(min=0, help="Smaller scenarios that are tried for each finding; 0 for none.")
    ] = 60,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes side by side. Default: one for each core.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where results, scenarios and the page go; a run there is continued. Default: swarm-ENGINE.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write a summary as one JSON object to stdout.")
    ] = False,
) -> None:
    """Run an engine on a tape under generated load, one seed a run, and judge each run.

    Each seed draws a configuration and requests. Tokens must be those of each request alone, every replay
    must keep its pact, and no request or page may be lost. The exit status is 1 if anything is wrong.
    """
    from graphpact_swarm.draws import Space  # noqa: PLC0415  it imports torch
    from graphpact_swarm.models import GIVEN, MADE  # noqa: PLC0415  the same
    from graphpact_swarm.runs.worker import Setup  # noqa: PLC0415  the same
    from graphpact_swarm.scenario import Scenario  # noqa: PLC0415  the same

    offer, load = _offer_of(engine)
    drafts = dict(_folder(text) for text in draft or [])
    unknown = sorted(drafts.keys() - set(load.draft_models))
    if unknown:
        raise UsageError(
            f"--draft {unknown[0]}: {offer.name} has no such drafts",
            hint=f"it has {', '.join(load.draft_models) or 'none that need a model'}",
        )
    space = Space(
        engine,
        load,
        {name: Path() for name in ([GIVEN] if model is not None else MADE)},
        drafts=frozenset(drafts),
        has_faults=faults,
    )
    settings, fixed = _settings(sets or [], [*space.engine_features(), *space.load_features()])
    given = None if scenario is None else Scenario.load(scenario)
    if given is not None and given.engine != engine:
        raise UsageError(
            f"{scenario} is a scenario of {given.engine}", hint=f"graphpact swarm {given.engine}"
        )
    if given is not None and fixed:
        raise UsageError(
            f"--set {next(iter(fixed))}: a scenario has a value of each feature",
            hint=f"change it in {scenario}, or run seeds",
        )
    with stopped_by_sigterm(), _models(model, given) as models:
        setup = Setup(
            engine=engine,
            models={name: str(path) for name, path in models.items()},
            settings=settings if given is None else {**given.settings, **settings},
            drafts=drafts,
            fixed=fixed,
            is_strict=strict or (given is not None and given.is_strict),
            has_faults=faults,
            repeats=repeat,
        )
        if given is not None:
            _run_one(setup, load, given, as_json=as_json)
        else:
            _run_many(
                setup,
                offer,
                load,
                _range_of(seeds),
                folder=out or Path(f"swarm-{engine}"),
                workers=workers or os.cpu_count() or 1,
                trials=trials,
                only_new=only_new,
                as_json=as_json,
            )


def _run_one(setup: Any, load: LoadOffer, scenario: Any, *, as_json: bool) -> None:
    """Run one scenario, and print what is wrong with it."""
    from graphpact_swarm.swarm import run_one  # noqa: PLC0415  seconds

    result = run_one(setup, load, scenario)
    verdict = result.verdict
    if as_json:
        data().print(json.dumps(verdict.to_json()), soft_wrap=True)
    note(f"{verdict.steps} steps in {verdict.passes} passes; digest {verdict.digest}")
    for finding in verdict.findings:
        note(f"{finding}{f'; known: {finding.known}' if finding.known else ''}")
    if verdict.trace and verdict.findings:
        note(verdict.trace)
    if verdict.name == "finding" and (first := verdict.first) is not None:
        raise ContractError(str(first), rule=first.rule or None, hint="the findings are listed above")
    note(verdict.name)


def _run_many(
    setup: Any,
    offer: EngineOffer,
    load: LoadOffer,
    seeds: Sequence[int],
    *,
    folder: Path,
    workers: int,
    trials: int,
    only_new: bool,
    as_json: bool,
) -> None:
    from graphpact_swarm.report.page import write_page  # noqa: PLC0415  seconds
    from graphpact_swarm.report.results import Results  # noqa: PLC0415
    from graphpact_swarm.swarm import Swarm  # noqa: PLC0415

    head = {
        "engine": setup.engine,
        "release": offer.release(),
        "setup": asdict(setup) | {"models": [*setup.models]},
    }
    results = Results.open(folder, head)
    with closing(results), _progress(len(seeds), results, setup) as events:
        running = Swarm(setup, load, results, workers, trials, only_new, events)
        try:
            running.run(seeds)
        finally:
            page = write_page(folder, results)
    _summarize(results, setup, page, as_json=as_json)


def _summarize(results: Any, setup: Any, page: Path, *, as_json: bool) -> None:
    """Print what was found, and the coverage."""
    runs = list(results.results.values())
    found = results.found()
    coverage = results.coverage
    if as_json:
        summary = {
            "engine": setup.engine,
            "seeds": len(runs),
            "skipped": len(results.skipped),
            "clean": results.count("clean"),
            "known": {reason: [each.seed for each in each_of] for reason, each_of in results.known().items()},
            "findings": [
                {"kind": kind, "rule": rule, "field": field, "seeds": [each.seed for each in each_of]}
                for (kind, rule, field), each_of in found.items()
            ],
            "near_ties": sum(each.verdict.near_ties for each in runs),
            "pairs": len(coverage.pairs),
            "coverage": dict(sorted(coverage.seen.items())),
        }
        data().print(json.dumps(summary), soft_wrap=True)
    print_table(
        talk(),
        ("seen", "times"),
        [(name, count) for name, count in sorted(coverage.seen.items())],
        numbers=("times",),
    )
    seconds = sum(each.verdict.seconds + each.start_seconds for each in runs)
    wrong = results.count("finding")
    note(
        f"{len(runs)} seeds: {results.count('clean')} clean, {results.count('known')} with known findings,"
        f" {wrong} with findings, of {len(found)} kinds;"
        f" {len(results.skipped)} skipped; {sum(each.verdict.near_ties for each in runs)} near-ties;"
        f" {len(coverage.pairs):,} pairs of features; {seconds:,.0f} s of runs and starts"
    )
    for reason, each_of in results.known().items():
        note(f"\nseeds {_some(each_of)}: known: {reason}")
    for signature, each_of in found.items():
        note(f"\nseeds {_some(each_of)}: {each_of[0].verdict.first}")
        if signature in results.smaller:
            file, finding = results.smaller[signature]
            note(
                f"  smallest: {finding}\n  graphpact swarm {setup.engine} {_options(setup)}--scenario {file}"
            )
    note(f"the page is {page}")
    if found:
        raise ContractError(f"{wrong} of {len(runs)} runs are wrong", hint="the findings are listed above")


def _some(runs: Sequence[Any]) -> str:
    """Return the first seeds of some runs."""
    return ", ".join([*(str(each.seed) for each in runs[:8]), *(["..."] if len(runs) > 8 else [])])


def _options(setup: Any) -> str:
    """Return the options without which a scenario means something else."""
    model = setup.models.get("given")
    drafts = "".join(f"--draft {name}={path} " for name, path in setup.drafts.items())
    return f"{f'--model {model} ' if model else ''}{drafts}"


def _offer_of(engine: str) -> tuple[EngineOffer, LoadOffer]:
    """Return an engine and what it offers for generated load.

    Raises:
        UsageError: There is none, or it cannot run here.
    """
    offer: EngineOffer = PluginCatalog.scan().select("engine", engine)()
    reason = offer.unavailable()
    if reason is not None:
        raise UsageError(reason, hint=f"run this command in an environment with {offer.name}")
    load = offer.under_load()
    if load is None:
        raise UsageError(
            f"the integration of {offer.name} does not offer generated load",
            hint="it lacks `EngineOffer.under_load`",
        )
    return offer, load


def _range_of(text: str) -> range:
    first, colon, last = text.partition(":")
    try:
        found = range(int(first), int(last) if colon else int(first) + 1)
    except ValueError:
        raise UsageError(f"--seeds {text!r} is no range of numbers", hint=_SEEDS_HINT) from None
    if not found or found[0] < 0:
        raise UsageError(f"--seeds {text!r} has no seed", hint=_SEEDS_HINT)
    return found


def _folder(text: str) -> tuple[str, str]:
    name, path = pair_of("--draft", text, "DRAFTS=DIR", "eagle=DIR")
    if not Path(path, "config.json").is_file():
        raise UsageError(f"--draft {text!r}: there is no config.json", hint="name the folder of a checkpoint")
    return name, str(Path(path).resolve())


def _settings(texts: Sequence[str], features: Sequence[Feature]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the engine's own arguments and the features with one value.

    Raises:
        UsageError: A text is neither.
    """
    values = {each.name: each.values for each in features}
    settings: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for text in texts:
        key, value = setting_of(text)
        if key.startswith("engine."):
            settings[key.removeprefix("engine.")] = value
            continue
        if key not in values:
            raise UsageError(
                f"--set {text}: there is no feature {key!r}",
                hint=f"features are {', '.join(values)}; arguments of the engine begin with engine.",
            )
        if json.dumps(value) not in map(json.dumps, values[key]):
            raise UsageError(
                f"--set {text}: the feature has no such value",
                hint=f"it has {', '.join(json.dumps(each) for each in values[key])}",
            )
        fixed[key] = value
    return settings, fixed


@contextmanager
def _models(model: Path | None, scenario: Any) -> Iterator[Mapping[str, Path]]:
    """Yield the folders of models by name: the given one, or made ones, which are removed afterwards."""
    from graphpact_swarm.models import GIVEN, MADE, ModelFacts, make_model  # noqa: PLC0415  torch

    if model is not None:
        ModelFacts.of(model)
        yield {GIVEN: model.resolve()}
        return
    names = MADE if scenario is None else (scenario.choice.get("model"),)
    if not set(names) <= set(MADE):
        raise UsageError("the scenario was run with a model of --model", hint="give it again")
    with tempfile.TemporaryDirectory(prefix="graphpact-swarm-models-") as folder:
        yield {name: make_model(name, Path(folder)) for name in names}


@contextmanager
def _progress(total: int, results: Any, setup: Any) -> Iterator[Any]:
    """Yield what a swarm says: a progress line on a terminal, and findings as they come."""
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from graphpact_swarm.swarm import Events  # noqa: PLC0415

    console = talk()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_interactive)
    task = progress.add_task(f"{setup.engine}: starting", total=total, completed=len(results.results))

    def ran(result: Any, left: int) -> None:
        wrong = results.count("finding")
        progress.update(
            task,
            completed=total - left,
            description=f"{setup.engine}: seed {result.seed}, {wrong} with findings",
        )
        if result.verdict.name == "finding":
            note(f"seed {result.seed}: {result.verdict.first}")

    def shrinks(seed: int, finding: Any) -> None:
        note(f"seed {seed}: looking for a smaller scenario with the finding {clean(finding.kind)}")

    def shrunk(seed: int, file: Path, finding: Any) -> None:
        note(f"seed {seed}: {file}: {finding}")

    with progress:
        yield Events(ran=ran, shrinks=shrinks, shrunk=shrunk)
