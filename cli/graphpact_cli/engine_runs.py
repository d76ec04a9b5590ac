"""`engine_app`: the command of an integration that runs its engine eagerly and on a tape, and compares.

Does not: import an engine, since each run is a process of its own; or judge the runs, see
`graphpact_cli.engine_verdict`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from graphpact.engines import EngineJob, EngineResult, ProcessOffer
from graphpact.errors import UsageError
from graphpact.files import write_file
from graphpact_cli.console import data, note
from graphpact_cli.engine_verdict import judge_runs
from graphpact_cli.pairs import setting_of
from graphpact_cli.prompt_lines import prompt_lines

_HINT = "write prompts as arguments, or name a file with --file"


@dataclass(frozen=True, kw_only=True)
class LaptopEngine:
    """An engine, and its own arguments on a laptop.

    Args:
        offer: The engine.
        checkpoint: The name of the argument for the folder of a checkpoint.
        laptop: The arguments of both runs.
        graphs: Arguments of the run on the tape, by which the engine captures its steps.
        eager: Arguments of the eager run.
        left_out: Prefixes of the arguments of ``--set`` that the eager run does not get, such as those of
            graphs and drafts.
    """

    offer: ProcessOffer
    checkpoint: str
    laptop: Mapping[str, Any]
    graphs: Mapping[str, Any]
    eager: Mapping[str, Any]
    left_out: tuple[str, ...]


def engine_app(engine: LaptopEngine) -> typer.Typer:
    """Return a command group with the command ``run``. The integration may add other commands."""
    name = engine.offer.name
    app = typer.Typer(no_args_is_help=True, help=f"Run {name}'s engine on a laptop, on a tape.")

    @app.command(
        "run",
        help=f"Continue prompts greedily with {name}, eagerly and then on a tape, and compare.\n\n"
        f"The eager run is {name} without graphpact, graphs and drafts. Texts are written to stdout; the"
        " table of replays and eager steps is written to stderr. The exit status is 1 if tokens differ, a"
        " replay is at fault, or nothing was replayed.",
    )
    def run(
        prompts: Annotated[
            list[str] | None, typer.Argument(help="Prompts to continue.", show_default=False)
        ] = None,
        *,
        model: Annotated[Path, typer.Option(help="The folder of a checkpoint.", show_default=False)],
        file: Annotated[
            Path | None,
            typer.Option(
                "--file",
                "-f",
                metavar="FILE",
                help="Read one prompt from each non-blank line of FILE.",
            ),
        ] = None,
        max_new_tokens: Annotated[
            int, typer.Option("--max-new-tokens", "-n", min=1, help="Maximum number of tokens per prompt.")
        ] = 32,
        strict: Annotated[
            bool,
            typer.Option("--strict", help="Poison what no step may read, and refuse illegal work."),
        ] = False,
        words: Annotated[
            str,
            typer.Option(metavar="WORDS", help="Words of GRAPHPACT for the run on the tape, beside tape."),
        ] = "guard",
        sets: Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                metavar="KEY=VALUE",
                help=f"An argument of {name}'s engine, with a value in JSON or a text; repeatable.",
                show_default=False,
            ),
        ] = None,
        as_json: Annotated[
            bool, typer.Option("--json", help="Write both runs as one JSON object to stdout.")
        ] = False,
        report: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help="Write both runs as JSON to FILE.", show_default=False),
        ] = None,
    ) -> None:
        require_ready(engine.offer, model)
        texts = [*(prompts or []), *(() if file is None else prompt_lines(file, hint=_HINT))]
        if not texts:
            raise UsageError("there is no prompt", hint=_HINT)
        arguments = {**engine.laptop, engine.checkpoint: str(model.resolve())}
        mode = "tape:strict" if strict else "tape"
        eager, taped = _both_runs(
            engine, arguments, dict(map(parse_setting, sets or [])), texts, max_new_tokens, f"{mode},{words}"
        )
        both = {"eager": asdict(eager), "tape": asdict(taped)}
        if report is not None:
            write_file(report, json.dumps(both, indent=1) + "\n")
        if as_json:
            data().print(json.dumps(both), soft_wrap=True)
        else:
            for text, answer in zip(texts, taped.answers, strict=True):
                data().print(f"{text}{answer.text}", soft_wrap=True)
        judge_runs(eager, taped)

    return app


def require_ready(offer: ProcessOffer, model: Path) -> None:
    """Raise `UsageError` if the engine cannot run in this environment, or if ``model`` is no checkpoint."""
    reason = offer.unavailable()
    if reason is not None:
        target = offer.make_target
        raise UsageError(
            reason, hint=f"`make {target}`, and then .venv-{target}/bin/graphpact {target} run ..."
        )
    if not (model / "config.json").is_file():
        raise UsageError(f"--model {model}: there is no config.json", hint="name the folder of a checkpoint")


def parse_setting(text: str) -> tuple[str, Any]:
    """Return the name and the value of an argument of an engine; raise `UsageError` if it is none."""
    key, value = setting_of(text)
    if not key.isidentifier():
        raise UsageError(f"--set {text!r}: {key!r} is no name of an argument", hint="for example page_size")
    return key, value


def _both_runs(
    engine: LaptopEngine,
    arguments: Mapping[str, Any],
    asked: Mapping[str, Any],
    prompts: list[str],
    max_new_tokens: int,
    words: str,
) -> tuple[EngineResult, EngineResult]:
    """Return the results of the eager run and of the run on the tape, for which ``words`` asks."""
    name = engine.offer.name
    plain = {key: value for key, value in asked.items() if not key.startswith(engine.left_out)}
    note(f"running {name} eagerly")
    eager = engine.offer.run(
        "",
        EngineJob(
            engine={**arguments, **engine.eager, **plain}, prompts=prompts, max_new_tokens=max_new_tokens
        ),
    )
    if eager.stood_in:
        note(f"not installed, and stood in for: {', '.join(eager.stood_in)}")
    note(f"running {name} on a tape: GRAPHPACT={words}")
    taped = engine.offer.run(
        words,
        EngineJob(
            engine={**arguments, **engine.graphs, **asked}, prompts=prompts, max_new_tokens=max_new_tokens
        ),
    )
    return eager, taped
