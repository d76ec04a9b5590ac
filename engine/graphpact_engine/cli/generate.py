"""``graphpact generate``: continues prompts with an engine.

Does not: select plugins or run steps; it turns options into a configuration, which the engine runs.
"""

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer

from graphpact.errors import ContractError
from graphpact_cli.console import data, note, talk, warning
from graphpact_engine.cli.observing import Observation
from graphpact_engine.cli.options import (
    ConfigOption,
    ModelOption,
    SetOption,
    build_engine,
    load_settings,
)
from graphpact_engine.cli.prompts import read_prompts
from graphpact_engine.cli.ranks import deltas_of_all, file_of_rank, rank_of_process

_DEFAULT_NEW_TOKENS = 128


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts to continue.", show_default=False),
    ] = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Read one prompt from each non-blank line of FILE; - is stdin.",
        ),
    ] = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", "-n", help="Maximum number of tokens to generate per prompt."),
    ] = _DEFAULT_NEW_TOKENS,
    min_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens before which no answer ends. Default: the checkpoint's.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0, the default: greedy. Above 0: tokens are sampled at this temperature.",
            show_default=False,
        ),
    ] = None,
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the smallest set of likeliest tokens with at least this probability."),
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0 for all.")] = 0,
    min_p: Annotated[
        float,
        typer.Option(
            help="Sample from tokens with at least this share of the likeliest token's probability."
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Divide positive logits of earlier tokens by this number, multiply negative ones."
            " Default: the checkpoint's.",
            show_default=False,
        ),
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtract this from the logits of generated tokens.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option(
            help="Subtract this from the logit of a token for each time that the token was generated."
        ),
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the run; sets engine.seed. Equal prompts still get different outputs."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="CPU threads of a step; sets engine.num_threads. Default: 1 for a small model.",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="End an answer before this text; repeatable. Default: the checkpoint's.",
            show_default=False,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at the model's end tokens.")
    ] = False,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Each prompt is a message of a user, put into the tokenizer's chat template.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Write one JSON object per line and prompt, in order:"
            " prompt, text, token_ids, finish_reason.",
        ),
    ] = False,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Write each token at once, or each answer when it is complete. Default: stream on a"
            " terminal. Answers are in the order of the prompts: the first unfinished answer is"
            " streamed, later answers are written after it.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Run every replay again eagerly and compare. For a share of the replays:"
            " --set verify.replay_against_eager=0.1.",
        ),
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="FILE",
            help="Write every step (modes, lengths, pages; no text) to FILE, for graphpact check --scenario.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write the phases of every step to FILE, a Chrome trace for https://ui.perfetto.dev.",
            show_default=False,
        ),
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(
            "--metrics",
            metavar="FILE",
            help="Write Prometheus metrics to FILE, in the text format, before and after the run.",
            show_default=False,
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            metavar="PORT",
            min=0,
            max=65535,
            help="Serve Prometheus metrics to this machine while the run lasts; 0 takes any free port.",
            show_default=False,
        ),
    ] = None,
    log_format: Annotated[
        Literal["text", "json"] | None,
        typer.Option(
            "--log-format",
            help="Print the engine's events on stderr, one per line, and no progress; with json nothing else"
            " but errors.",
            show_default=False,
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no progress, and no table after the run.")
    ] = False,
) -> None:
    """Continue prompts: from arguments, from a file, or one from each line of stdin.

    Texts are written to stdout. Progress, and a table of replays and eager runs with their reasons, are
    written to stderr.

    On several ranks: torchrun --nproc-per-node 2 --no-python graphpact generate --set parallel.tensor=2 ...
    Rank 0 writes.
    """
    settings = load_settings(config, model, sets, _options(seed=seed, threads=threads, verify=verify))
    from graphpact_engine.cli.report import print_run  # noqa: PLC0415  slow: imports the engine
    from graphpact_engine.cli.writers import JsonWriter, SilentWriter, TextWriter, Writer  # noqa: PLC0415
    from graphpact_engine.request import SamplingParams  # noqa: PLC0415

    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature or 0.0,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop or None,
        ignore_eos=ignore_eos,
    )
    texts = read_prompts(prompts or [], file)
    if not temperature and (top_p != 1 or top_k != 0 or min_p != 0):
        warning("--top-p, --top-k and --min-p have no effect at --temperature 0")

    talks = rank_of_process() == 0
    if not talks:
        log_format = metrics_port = None
        logging.getLogger("graphpact_engine").setLevel(logging.ERROR)
    quiet = quiet or log_format == "json" or not talks
    record, trace, metrics = map(file_of_rank, (record, trace, metrics))
    observation = Observation(record, trace, metrics, metrics_port, log_format, quiet)
    with ExitStack() as stack:
        observers = stack.enter_context(observation.observers(settings))
        silent = quiet or log_format is not None
        engine = stack.enter_context(build_engine(settings, quiet=silent, observers=observers))
        stack.enter_context(observation.exported(engine))
        if temperature is None and engine.recommended_sampling and not quiet:
            options = (
                f"--{name.replace('_', '-')} {value}" for name, value in engine.recommended_sampling.items()
            )
            note(f"generation is greedy; the checkpoint recommends {' '.join(options)}")
        writer: Writer
        if not talks:
            writer = SilentWriter(texts)
        elif as_json:
            writer = JsonWriter(texts)
        else:
            live = data().is_terminal if stream is None else stream
            writer = TextWriter(texts, live=live, after_prompt="\n" if chat else "")
        start = time.perf_counter()

        def report(*, failed: bool = False) -> None:
            seconds = time.perf_counter() - start
            tokens = sum(len(answer.token_ids) for answer in writer.answers)
            print_run(talk(), engine, tokens=tokens, seconds=seconds, quiet=quiet, failed=failed)

        try:
            asked = [[{"role": "user", "content": text}] for text in texts] if chat else texts
            for delta in deltas_of_all(engine, asked, sampling):
                writer.push(delta)
        except ContractError:  # the report helps to find the fault
            writer.close()
            report(failed=True)
            raise
        finally:
            writer.close()
        report()


def _options(*, seed: int | None, threads: int | None, verify: bool) -> dict[str, str]:
    """Return the options that set configuration keys as ``key=value`` strings, by option."""
    options = {}
    if seed is not None:
        options["--seed"] = f"engine.seed={seed}"
    if threads is not None:
        options["--threads"] = f"engine.num_threads={threads}"
    if verify:
        options["--verify"] = "verify.replay_against_eager=1.0"
    return options
