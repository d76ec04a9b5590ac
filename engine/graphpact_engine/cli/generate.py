"""``graphpact generate``: prompts in, their continuations out, every step through a lane.

Does not: choose or run anything itself; it makes a configuration of options; the engine runs it.
"""

import time
from pathlib import Path
from typing import Annotated

import typer

from graphpact.cli.console import data, talk, warning
from graphpact.errors import ContractError
from graphpact_engine.cli.options import (
    ConfigOption,
    ModelOption,
    SetOption,
    build_engine,
    load_settings,
)
from graphpact_engine.cli.prompts import read_prompts

_DEFAULT_NEW_TOKENS = 128


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to continue.", show_default=False),
    ] = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Take one prompt from each line of FILE that is not blank; - is stdin.",
        ),
    ] = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Tokens to generate at most, each prompt.")
    ] = _DEFAULT_NEW_TOKENS,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; above 0, tokens are drawn.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens of this probability together.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Draw from this many likeliest tokens; 0 for all.")
    ] = 0,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the run: engine.seed. Equal prompts still differ."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end tokens.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Write one object a line for each prompt, in order:"
            " prompt, text, token_ids, finish_reason.",
        ),
    ] = False,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Write tokens as they come, or each answer when it is whole. On a terminal they"
            " are streamed by default. Answers come in the order of the prompts either way: the"
            " first that is not finished is streamed, the others wait for their turn.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Run every replay again without a graph and compare. For a share of them:"
            " --set verify.replay_against_eager=0.1.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, and no table after the run.")
    ] = False,
) -> None:
    """Continue prompts: those given, those of a file, or one from each line of stdin.

    Texts go to stdout. Progress and, after the run, a table of what was replayed, what ran eagerly
    and why go to stderr.
    """
    from graphpact_engine.cli.report import print_report  # noqa: PLC0415  pydantic and the engine behind it
    from graphpact_engine.cli.writers import JsonWriter, TextWriter, Writer  # noqa: PLC0415
    from graphpact_engine.request import SamplingParams  # noqa: PLC0415

    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        ignore_eos=ignore_eos,
    )
    settings = load_settings(config, model, sets, _options(seed=seed, verify=verify))
    texts = read_prompts(prompts or [], file)
    if temperature == 0 and (top_p != 1 or top_k != 0):
        warning("--top-p and --top-k change nothing at --temperature 0")

    engine = build_engine(settings, quiet=quiet)
    writer: Writer
    if as_json:
        writer = JsonWriter(texts)
    else:
        writer = TextWriter(texts, live=data().is_terminal if stream is None else stream)
    start = time.perf_counter()

    def report() -> None:
        seconds = time.perf_counter() - start
        tokens = sum(len(answer.token_ids) for answer in writer.answers)
        print_report(talk(), engine, tokens=tokens, seconds=seconds, quiet=quiet)

    try:
        for delta in engine.stream(texts, sampling):
            writer.push(delta)
    except ContractError:  # what the run did until then tells where it went wrong
        writer.close()
        report()
        raise
    finally:
        writer.close()
    report()


def _options(*, seed: int | None, verify: bool) -> dict[str, str]:
    """Return the options that are keys of the configuration as ``key=value`` texts, by option."""
    options = {}
    if seed is not None:
        options["--seed"] = f"engine.seed={seed}"
    if verify:
        options["--verify"] = "verify.replay_against_eager=1.0"
    return options
