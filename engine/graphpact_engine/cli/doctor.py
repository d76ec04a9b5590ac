"""``graphpact doctor``: checks whether this machine can generate text.

With ``--memory`` it lists the memory that the graphs of an engine read and write, and checks that all of it
is declared.

Does not: examine the machine (see `graphpact_engine.cli.machine`), generate text, or write files.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from graphpact.errors import UsageError
from graphpact_cli.console import clean, data, print_table
from graphpact_cli.distributions import installed_distributions
from graphpact_engine.cli.options import (
    ConfigOption,
    ModelOption,
    SetOption,
    build_engine,
    load_settings,
)

_NOT_USABLE = 3


def doctor(
    *,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="Build the engine, and list the memory that its graphs read and write: slots, pools,"
            " weights, KV cache, and undeclared tensors.",
        ),
    ] = False,
    one_line: Annotated[
        bool,
        typer.Option(
            "--provenance",
            help="Print one line for the report of a bug: versions, device, driver, and kernels in use.",
        ),
    ] = False,
    model: ModelOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """List what is installed on this machine, and what prevents it from generating text.

    Exit status: 0 if text can be generated, otherwise 3. With --memory, list the memory that the graphs of
    an engine read and write instead; undeclared memory is a warning.
    """
    if one_line and (memory or as_json):
        raise UsageError(
            f"--provenance with {'--memory' if memory else '--json'}: it prints one line",
            hint="remove one of the two; --json alone has the same versions and more",
        )
    if memory:
        _examine_memory(model, config, sets, as_json=as_json)
        return
    options = {"--model": model, "--config": config, "--set": sets}
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UsageError(
            f"{' and '.join(given)} without --memory: doctor builds an engine only with --memory",
            hint="add --memory, or remove the option",
        )
    from graphpact_engine.cli.machine import examine_machine, provenance  # noqa: PLC0415  torch

    report = examine_machine()
    if one_line:
        sys.stdout.write(clean(provenance(report)) + "\n")
        return
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _show(report)
    if not report["usable"]:
        raise typer.Exit(_NOT_USABLE)


def _examine_memory(
    model: str | None,
    config: Path | None,
    sets: Sequence[str] | None,
    *,
    as_json: bool,
) -> None:
    """Build the engine and show the memory of its graphs, with undeclared memory as problems."""
    settings = load_settings(config, model, sets)
    from graphpact_engine.cli import memory as output  # noqa: PLC0415  slow: imports the engine
    from graphpact_engine.memory import EngineMemory  # noqa: PLC0415

    with build_engine(settings) as engine:
        memory = EngineMemory.of(engine)
    problems = [
        {"severity": "warning", "what": what, "help": fix}
        for what, fix in map(output.undeclared_problem, memory.unknown)
    ]
    if as_json:
        report = {"usable": True, "memory": memory.to_dict(), "problems": problems}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    console = data()
    output.print_memory(console, memory)
    console.print()
    _show_problems(problems)
    console.print(output.memory_verdict(memory), soft_wrap=True)


def _show(report: dict[str, Any]) -> None:
    console = data()
    cuda = report["cuda"]
    versions = report["packages"]
    small = f"{report['threads_of_small_models']} (engine.num_threads)"
    rows = [
        ("python", f"{report['python']} ({report['executable']})"),
        ("platform", report["platform"]),
        ("cpus", str(report["cpus"])),
        ("threads", f"torch uses {report['threads']}; a step of a small model {small}"),
        (
            "cuda",
            f"torch is built for {cuda['built']}; driver {cuda['driver'] or 'none'}"
            if cuda["built"]
            else "torch is built without it",
        ),
    ]
    rows += [
        (
            f"cuda:{number}",
            f"{device['name']}, sm {device['capability']}, {device['memory_gib']} GiB",
        )
        for number, device in enumerate(cuda["devices"])
    ]
    rows += [(name, version or "not installed") for name, version in versions.items()]
    rows += list(report["engines"].items())
    rows += [
        (name, f"{version}: {plugins}" if plugins else version)
        for name, (version, plugins) in installed_distributions().items()
    ]
    rows += [
        (f"graphpact[{extra}]", "installed" if there else "not complete")
        for extra, there in report["extras"].items()
    ]
    rows += [
        (f"{driver['name']} on {driver['device']}", driver["unavailable"] or "available")
        for driver in report["drivers"]
    ]
    rows += [
        (
            f"{one['backend']} {one['provider']} on {one['device']}",
            one["unavailable"] or "available",
        )
        for one in report["kernels"]
    ]
    rows += list(report["environment"].items())
    print_table(console, ("what", "found"), rows)
    console.print()
    _show_problems(report["problems"])
    verdict = "can" if report["usable"] else "cannot"
    console.print(f"Text {verdict} be generated on this machine.")


def _show_problems(problems: Sequence[dict[str, Any]]) -> None:
    console = data()
    for problem in problems:
        console.print(f"{problem['severity']}: {clean(problem['what'])}", soft_wrap=True)
        if problem["help"] is not None:
            console.print(f"  help: {clean(problem['help'])}", soft_wrap=True)
