"""``graphpact bench``: measures graphpact, beside other ways to run the same model.

    graphpact bench                              the parts of a step, and decode beside other ways
    graphpact bench fill decode --json out.json  two measurements, and a file
    graphpact bench decode --model-shape 768x12  a model of your own
    graphpact bench all                          everything; takes long

Does not: measure; each measurement is a module of this package.
"""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphpact.errors import UsageError, did_you_mean
from graphpact.files import write_file
from graphpact_bench.ways.table import WAYS, WayKind
from graphpact_cli.console import data, note
from graphpact_cli.pairs import pair_of

if TYPE_CHECKING:
    from graphpact_bench.options import BenchOptions
    from graphpact_bench.report import Table


@dataclass(frozen=True)
class Measurement:
    """One measurement by its name.

    Args:
        about: What it measures, in a few words.
        takes: The options that it accepts, in addition to those that all accept.
        is_first: Whether `graphpact bench` runs it if none is named.
    """

    about: str
    takes: frozenset[str] = frozenset()
    is_first: bool = False


_DEVICE, _BATCH = frozenset({"--device"}), frozenset({"--batch"})
_MODEL = _DEVICE | {"--dtype", "--model-shape"}
_WAYS = _MODEL | {"--way"}
_ROUNDS = _WAYS | {"--python-of", "--rounds"}
MEASUREMENTS = {
    "fill": Measurement("a fill of the registry, against one slot after another", _DEVICE, is_first=True),
    "metadata": Measurement("the metadata hook of each backend", _DEVICE | {"--dtype"}, is_first=True),
    "step": Measurement("the parts of a decode step: host work, replay, sampling", _WAYS, is_first=True),
    "decode": Measurement("decode steps end to end, beside other ways", _ROUNDS | _BATCH, is_first=True),
    "checks": Measurement("what pact, verification and observers cost", _MODEL, is_first=True),
    "prefill": Measurement("prompts end to end, beside other ways", _ROUNDS),
    "capture": Measurement("time and memory of a capture, by shape", _WAYS | _BATCH),
    "speculation": Measurement("decoding with drafts, against plain decoding", _BATCH),
    "ranks": Measurement("an exchange of two ranks, against the collective that it needs"),
}
"""Every measurement, in the order in which they run; the module has the name."""
ALL = "all"
FIRST_WAYS = ("eager", "tape", "cpu_graph", "cuda", "generate", "generate-static")
"""The ways that `graphpact bench` compares if no measurement is named: they are ready within a minute."""
APART = tuple(name for name, each in WAYS.items() if each.is_apart)
"""The ways that run in an environment of their own."""


def _complete(
    kinds: Mapping[str, Measurement] | Mapping[str, WayKind], incomplete: str
) -> list[tuple[str, str]]:
    """Return completions of a name, each with a description."""
    return [(name, each.about) for name, each in kinds.items() if name.startswith(incomplete)]


def bench(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT",
            help="Measurements, or `all`. Default: those that take a few minutes together:"
            f" {', '.join(name for name, each in MEASUREMENTS.items() if each.is_first)}.",
            show_default=False,
            autocompletion=lambda incomplete: _complete(MEASUREMENTS, incomplete),
        ),
    ] = None,
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small models, one round: a smoke test in seconds.")
    ] = False,
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="CPU threads of everything that is measured.")
    ] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="DTYPE", help="float32 (the default) or bfloat16: weights and computation."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="cpu (the default) or cuda.")
    ] = None,
    model_shape: Annotated[
        list[str] | None,
        typer.Option(
            "--model-shape",
            metavar="SHAPE",
            help="WIDTHxLAYERS of a random Llama, such as 576x30, or with more of its sizes"
            " 768x12:heads=12,vocab=32000; repeatable.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Requests at a time; repeatable.", show_default=False),
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(
            "--way",
            metavar="WAY",
            help="Compare only this way with eager; repeatable. prefill and capture have more; prefill lists"
            " them if you name an unknown one.",
            show_default=False,
            autocompletion=lambda incomplete: _complete(WAYS, incomplete),
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds", min=1, help="Timed rounds of each way; fewer for large models.", show_default=False
        ),
    ] = None,
    python_of: Annotated[
        list[str] | None,
        typer.Option(
            "--python-of",
            metavar="WAY=PYTHON",
            help="The Python of an environment with vLLM or llama.cpp, such as"
            " vllm-cpu=.venv-vllm/bin/python; repeatable.",
            show_default=False,
            autocompletion=lambda incomplete: [f"{n}=" for n in APART if n.startswith(incomplete)],
        ),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write JSON to FILE; `-`: to stdout, without tables."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the tables to FILE.svg or FILE.png."),
    ] = None,
) -> None:
    """Measure graphpact, as ratios inside one process.

    Without a name it measures the first five, in a few minutes:

    - `fill`: a fill of the registry, against one fill and one copy per slot
    - `metadata`: the metadata hook of each backend, its work in the graph and before it
    - `step`: the parts of a decode step: host work, pact, replay, schedule, sample
    - `decode`: decode steps end to end, beside other ways to run the model
    - `checks`: what pact, verification, observers and a strict lane cost
    - `prefill`: prompts end to end, beside other ways
    - `capture`: time and memory of a capture, by shape
    - `speculation`: decoding with drafts, against plain decoding
    - `ranks`: an exchange of two ranks, against the collective that it needs
    - `all`: everything; takes long

    Whole steps are compared with other ways to run the same model:

    - `eager`: the engine without graphs; the others must write its tokens
    - `tape`, `tape-strict`, `cpu_graph`, `cuda`: the engine, decode through graphs
    - `generate`, `generate-static`: generate of transformers, with a growing or a static cache
    - `compile`, `generate-compiled`: the same, the model compiled by torch.compile
    - `continuous`: continuous batching of transformers
    - `vllm-cpu`, `llama.cpp`: other engines, in an environment of their own; `--python-of` names its Python

    Ways that are compared write the same greedy tokens before anything is timed; a difference ends the run
    with both rows. They take turns. Tables have the median, the quartiles and the best.

    Exit status: 0 done, 1 what is compared gives different results, 2 usage.
    """
    pythons = dict(map(parse_python, python_of or ()))
    given: dict[str, Any] = {
        "--dtype": dtype,
        "--device": device,
        "--model-shape": model_shape,
        "--batch": batch,
        "--way": way,
        "--rounds": rounds,
        "--python-of": pythons,
    }
    names = choose(what or [], [option for option, value in given.items() if value])
    ways = tuple(way or (() if what else (*FIRST_WAYS, *pythons)))
    run_all(
        names,
        make_options(given, ways, quick=quick, narrow=not what),
        threads=threads,
        json_file=json_file,
        plot=plot,
    )


def choose(what: list[str], options: list[str]) -> list[str]:
    """Return the names of the measurements to run, in their order.

    Args:
        what: The names that were given.
        options: The options that were given; each has to apply to one of the measurements.

    Raises:
        UsageError: A name is unknown, or an option concerns none of them.
    """
    for name in what:
        if name not in MEASUREMENTS and name != ALL:
            near = did_you_mean(name, [*MEASUREMENTS, ALL])
            raise UsageError(
                f"no measurement is called {name!r}; they are {', '.join(MEASUREMENTS)}, or {ALL}",
                hint=f"did you mean {near!r}?" if near else "`graphpact bench --help` explains them",
            )
    chosen = [
        name
        for name, each in MEASUREMENTS.items()
        if name in what or ALL in what or (not what and each.is_first)
    ]
    for option in options:
        if not any(option in MEASUREMENTS[name].takes for name in chosen):
            takers = ", ".join(name for name, each in MEASUREMENTS.items() if option in each.takes)
            raise UsageError(
                f"{option} concerns none of {', '.join(chosen)}", hint=f"it is an option of {takers}"
            )
    return chosen


def make_options(
    given: dict[str, Any], ways: tuple[str, ...], *, quick: bool, narrow: bool
) -> "BenchOptions":
    """Return the options of the measurements.

    Args:
        given: The value of each option.
        ways: The names of ways.
        quick: Whether it is a smoke test.
        narrow: Whether ``ways`` are a default; ways that a quick run or the device lacks are then dropped.

    Raises:
        UsageError: A value is not allowed, or there is no such device.
    """
    _quieten()
    import torch  # noqa: PLC0415  slow

    from graphpact_bench.models import parse_shape  # noqa: PLC0415  slow
    from graphpact_bench.options import DTYPES, BenchOptions  # noqa: PLC0415  slow

    dtype, device = given["--dtype"] or "float32", given["--device"] or "cpu"
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not allowed", hint=f"use {' or '.join(DTYPES)}")
    if device not in {"cpu", "cuda"}:
        raise UsageError(f"--device {device} is not allowed", hint="use cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device", hint="use cpu")
    if narrow:
        ways = tuple(n for n in ways if device in WAYS[n].devices and not (quick and WAYS[n].compiles))
    return BenchOptions(
        quick=quick,
        dtype=dtype,
        device=torch.device(device),
        shapes=tuple(map(parse_shape, given["--model-shape"] or ())),
        batch_sizes=tuple(given["--batch"] or ()),
        ways=ways,
        rounds=given["--rounds"],
        pythons=given["--python-of"] or {},
        say=note if sys.stderr.isatty() else lambda _: None,
    )


def parse_python(text: str) -> tuple[str, str]:
    """Return the way and the Python that an argument of ``--python-of`` names.

    Raises:
        UsageError: It is not ``WAY=PYTHON``, or the way runs in this environment.
    """
    name, python = pair_of("--python-of", text, "WAY=PYTHON", f"{APART[0]}=.venv-vllm/bin/python")
    if name not in APART:
        near = did_you_mean(name, APART)
        raise UsageError(
            f"--python-of {text}: the ways with an environment of their own are {', '.join(APART)}",
            hint=f"did you mean {near!r}?" if near else None,
        )
    return name, python


def run_all(
    names: list[str], options: "BenchOptions", *, threads: int, json_file: str | None, plot: Path | None
) -> None:
    """Run measurements and write what they found.

    Args:
        names: The names of the measurements.
        options: Their options.
        threads: CPU threads of torch's operators.
        json_file: The file of the JSON; ``-`` for stdout, without tables. None for no JSON.
        plot: The file of the picture, or None.

    Raises:
        UsageError: A file cannot be written, or a picture cannot be drawn.
        DifferentResultsError: What is compared gives different results; tables before it are printed.
    """
    from graphpact_bench.machine import describe_machine  # noqa: PLC0415  slow
    from graphpact_bench.report import BenchReport, draw_charts, require_picture  # noqa: PLC0415  slow
    from graphpact_engine.threads import running_on  # noqa: PLC0415  slow

    if plot is not None:
        require_picture(plot)
    console = data()
    with running_on(threads):
        machine = describe_machine(options.device)
        report = BenchReport(quick=options.quick, dtype=options.dtype, machine=machine)
        if json_file != "-":
            versions = ", ".join(f"{name} {machine.versions[name]}" for name in ("torch", "transformers"))
            console.print(f"{machine.cpu}, {machine.threads} thread(s), {versions}\n", soft_wrap=True)
        for name in names:
            for table in _tables(name, options):
                report.tables.append(table)
                if json_file != "-":
                    table.show(console)
    if json_file == "-":
        sys.stdout.write(report.to_json())
    elif json_file is not None:
        write_file(Path(json_file), report.to_json())
        note(f"JSON written to {json_file}")
    if plot is not None:
        note(f"picture written to {plot}" if draw_charts(report, plot) else "no table has a picture")


def _tables(name: str, options: "BenchOptions") -> "Iterator[Table]":
    """Yield the tables of a measurement, or one that says why it cannot run here."""
    from graphpact_bench.report import Skipped, Table  # noqa: PLC0415  slow
    from graphpact_bench.timing import UnavailableWayError  # noqa: PLC0415  slow

    takes = MEASUREMENTS[name].takes
    if options.dtype != "float32" and "--dtype" not in takes:
        options = replace(options, dtype="float32")
    module = importlib.import_module(f"graphpact_bench.{name}")
    try:
        yield from module.measure(options)
    except UnavailableWayError as error:
        yield Table(
            name=name,
            title=MEASUREMENTS[name].about,
            columns=[],
            skipped=[Skipped(what=name, reason=error.message)],
        )


def _quieten() -> None:
    """Keep transformers from printing advice and progress bars."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging  # noqa: PLC0415  slow

    logging.disable_progress_bar()
