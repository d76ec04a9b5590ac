"""``graphpact sglang``: SGLang's engine on a laptop, eagerly and on a tape, and what differs.

Does not: import SGLang; each run is a process of its own.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from graphpact.engines import EngineJob, EngineResult
from graphpact.errors import ContractError, UsageError
from graphpact.files import read_file, write_file
from graphpact_cli.console import data, note, print_table, talk
from graphpact_sglang.offer import SglangOffer
from graphpact_sglang.runs import GRAPHS, LAPTOP

sglang = typer.Typer(no_args_is_help=True, help="Run SGLang's engine on a laptop, on a tape.")

_COLUMNS = ("graph", "replays", "rows", "padding", "capture", "nodes", "")
_NUMBERS = ("replays", "rows", "padding", "capture", "nodes")
_OFFER = SglangOffer()


@sglang.command("run")
def run(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts to continue.", show_default=False)
    ] = None,
    *,
    model: Annotated[Path, typer.Option(help="The folder of a checkpoint.", show_default=False)],
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Read one prompt from each non-blank line of FILE."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Maximum number of tokens per prompt.")
    ] = 32,
    strict: Annotated[
        bool, typer.Option("--strict", help="Poison what no step may read, and refuse illegal work.")
    ] = False,
    words: Annotated[
        str, typer.Option(metavar="WORDS", help="Words of GRAPHPACT for the run on the tape, beside tape.")
    ] = "guard",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An argument of SGLang's Engine, with a value in JSON or a text; repeatable.",
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
    """Continue prompts greedily with SGLang, eagerly and then on a tape, and compare.

    The eager run is SGLang without graphpact, graphs and drafts. Texts are written to stdout; the table of
    replays and eager steps is written to stderr. The exit status is 1 if tokens differ, a replay is at fault,
    or nothing was replayed.
    """
    _require_sglang()
    if not (model / "config.json").is_file():
        raise UsageError(f"--model {model}: there is no config.json", hint="name the folder of a checkpoint")
    texts = [*(prompts or []), *_lines(file)]
    if not texts:
        raise UsageError("there is no prompt", hint="write prompts as arguments, or name a file with --file")
    asked = dict(map(_setting, sets or []))
    arguments = LAPTOP | {"model_path": str(model.resolve())}
    left_out = ("cuda_graph", "attention_backend", "speculative")
    plain = {key: value for key, value in asked.items() if not key.startswith(left_out)}
    note("running SGLang eagerly")
    eager_arguments = arguments | {"attention_backend": "torch_native"} | plain
    eager = _OFFER.run("", EngineJob(engine=eager_arguments, prompts=texts, max_new_tokens=max_new_tokens))
    if eager.stood_in:
        note(f"not installed, and stood in for: {', '.join(eager.stood_in)}")
    mode = "tape:strict" if strict else "tape"
    note(f"running SGLang on a tape: GRAPHPACT={mode},{words}")
    taped = _OFFER.run(
        f"{mode},{words}",
        EngineJob(engine=arguments | GRAPHS | asked, prompts=texts, max_new_tokens=max_new_tokens),
    )
    both = {"eager": asdict(eager), "tape": asdict(taped)}
    if report is not None:
        write_file(report, json.dumps(both, indent=1) + "\n")
    if as_json:
        data().print(json.dumps(both), soft_wrap=True)
    else:
        for text, answer in zip(texts, taped.answers, strict=True):
            data().print(f"{text}{answer.text}", soft_wrap=True)
    _judge(eager, taped)


def _require_sglang() -> None:
    reason = _OFFER.unavailable()
    if reason is not None:
        raise UsageError(reason, hint="`make sglang`, and then .venv-sglang/bin/graphpact sglang run ...")


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        text = read_file(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--file {file}: {error}", hint="name a text file in UTF-8") from error
    return [line for line in text.splitlines() if line.strip()]


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise UsageError(f"--set {text!r} is not KEY=VALUE", hint="for example --set page_size=16")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _judge(eager: EngineResult, taped: EngineResult) -> None:
    """Print what the run on the tape did.

    Raises:
        ContractError: Tokens differ, a replay is at fault, or nothing was replayed.
    """
    states = [state for state in taped.states if state is not None]
    print_table(talk(), _COLUMNS, [row for state in states for row in _rows(state)], numbers=_NUMBERS)
    replays = sum(c["replays"] for state in states for c in state["steps"]["graphs"].values())
    steps = sum(each["steps"] for state in states for each in state["steps"]["eager"])
    guarded = [state["guard"] for state in states if state["guard"] is not None]
    faults = [fault for guard in guarded for fault in guard["faults"]]
    differing = [
        at
        for at, (one, other) in enumerate(zip(eager.answers, taped.answers, strict=True))
        if one.token_ids != other.token_ids
    ]
    count = len(taped.answers)
    note(
        f"{replays:,} replays; {steps:,} eager steps; {len(faults)} faults;"
        f" {count - len(differing)} of {count} answers have the eager tokens,"
        f" largest difference of a logarithm of probability {_largest_difference(eager, taped):.2g}"
    )
    if differing:
        at = differing[0]
        raise ContractError(
            f"the answer to prompt {at} differs: eager {eager.answers[at].text!r},"
            f" tape {taped.answers[at].text!r}",
            hint="--strict names what the graph reads wrongly; --words guard,verify:1 compares every replay",
        )
    if faults:
        first = faults[0]
        where = f"{first['owner']}.{first['field']} in {first['graph']}"
        raise ContractError(
            f"{where}: {first['text']}", hint="the faults are listed above", rule=first["rule"]
        )
    if not replays:
        raise ContractError("nothing was replayed", hint="the table says why each step ran eagerly")


def _largest_difference(eager: EngineResult, taped: EngineResult) -> float:
    pairs = [
        (a, b)
        for one, other in zip(eager.answers, taped.answers, strict=True)
        for a, b in zip(one.logprobs, other.logprobs, strict=False)
    ]
    return max((abs(a - b) for a, b in pairs), default=0.0)


def _rows(state: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each graph, smallest first, and for each reason of eager steps."""
    for graph, counts in reversed(state["steps"]["graphs"].items()):
        waste = 1 - counts["raw"] / counts["padded"] if counts["padded"] else 0.0
        yield (
            graph,
            counts["replays"],
            counts["raw"],
            f"{waste:.1%}" if counts["replays"] else "",
            f"{counts['capture_seconds'] * 1000:,.0f} ms",
            counts["nodes"] if counts["nodes"] >= 0 else "",
            "",
        )
    for each in state["steps"]["eager"]:
        yield f"{each['mode']}, eager", each["steps"], "", "", "", "", each["reason"]
