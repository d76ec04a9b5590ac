"""``graphpact doctor``: checks whether this machine can generate text.

With ``--memory`` it lists the memory that the graphs of an engine read and write, and checks that all of it
is declared.

Does not: generate text, or write anything except the file of ``--picture``.
"""

import json
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import importlib_metadata
import torch
import typer

from graphpact.cli.console import clean, data, note, print_table
from graphpact.cli.plugins import check, describe, distributions, kernels, unavailable
from graphpact.errors import GraphpactError, UsageError
from graphpact.plugins import Loaded, PluginCatalog
from graphpact_engine.cli.options import (
    ConfigOption,
    ModelOption,
    SetOption,
    build_engine,
    load_settings,
)
from graphpact_engine.config import ENV_PREFIX, EngineConfig
from graphpact_engine.threads import SMALL_MODEL, choose_num_threads

_NOT_USABLE = 3
_EXTRAS = {
    "engine": ("transformers", "safetensors", "jinja2"),
    "cli": ("typer", "rich"),
    "conformance": ("hypothesis", "pytest", "jinja2"),
}
_PACKAGES = dict.fromkeys(
    ("torch", "pluggy", "pydantic", *(name for names in _EXTRAS.values() for name in names))
)
_VARIABLES = (  # reported in addition to the variables of graphpact
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A problem of this machine.

    Args:
        severity: ``error`` if no text can be generated until it is fixed.
        what: The problem.
        help: The fix.
    """

    severity: Literal["error", "warning"]
    what: str
    help: str | None = None


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
    model: ModelOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE",
            help="With --memory: draw the slots of all lanes to an SVG file.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """List what is installed on this machine, and what prevents it from generating text.

    Exit status: 0 if text can be generated, otherwise 3. With --memory, list the memory that the graphs of
    an engine read and write instead; undeclared memory is a warning.
    """
    if memory:
        _examine_memory(model, config, sets, picture, as_json=as_json)
        return
    options = {"--model": model, "--config": config, "--set": sets, "--picture": picture}
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UsageError(
            f"{' and '.join(given)} without --memory: doctor builds an engine only with --memory",
            hint="add --memory, or remove the option",
        )
    report = examine()
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
    picture: Path | None,
    *,
    as_json: bool,
) -> None:
    """Build the engine and show the memory of its graphs, with undeclared memory as problems."""
    settings = load_settings(config, model, sets)
    from graphpact_engine.cli import memory as output  # noqa: PLC0415  slow: imports the engine
    from graphpact_engine.memory import EngineMemory  # noqa: PLC0415

    if picture is not None:
        output.check_picture(picture)
    with build_engine(settings) as engine:
        memory = EngineMemory.of(engine)
    if picture is not None:
        output.write_picture(picture, memory)
        note(f"picture of the slots written to {picture}")
    problems = [asdict(Fault("warning", *output.undeclared_problem(row))) for row in memory.unknown]
    if as_json:
        report = {"usable": True, "memory": memory.to_dict(), "problems": problems}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    console = data()
    output.print_memory(console, memory)
    console.print()
    _show_problems(problems)
    console.print(output.verdict(memory), soft_wrap=True)


def examine() -> dict[str, Any]:
    """Return everything that was found, for JSON."""
    problems: list[Fault] = []
    versions = {name: _version(name) for name in _PACKAGES}
    cuda = _cuda(problems)
    catalog = _catalog(problems)
    found = check(catalog)
    for plugin in found:
        if not isinstance(plugin, Loaded):
            what = f"{plugin.info.kind} {plugin.info} was rejected: {plugin.reason}"
            problems.append(Fault("warning", what, "update it, uninstall it, or do not select it"))
    _try_models(problems)
    _try_defaults(catalog, problems)
    return {
        "usable": all(problem.severity != "error" for problem in problems),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "threads_of_small_models": choose_num_threads(None, torch.device("cpu"), SMALL_MODEL),
        "cuda": cuda,
        "packages": versions,
        "extras": {
            extra: all(versions[name] is not None for name in names)
            for extra, names in _EXTRAS.items()
        },
        "distributions": distributions(),
        "drivers": [
            {"name": plugin.info.name, "device": device, "unavailable": reason}
            for plugin in found
            for device, reason in unavailable(plugin).items()
        ],
        "kernels": [
            {
                "backend": plugin.info.name,
                "provider": provider,
                "device": device,
                "unavailable": reason,
            }
            for plugin in found
            for provider, reasons in kernels(plugin).items()
            for device, reason in reasons.items()
        ],
        "plugins": [describe(plugin) for plugin in found],
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENV_PREFIX) or name in _VARIABLES
        },
        "problems": [asdict(problem) for problem in problems],
    }


def _version(name: str) -> str | None:
    try:
        return importlib_metadata.version(name)
    except importlib_metadata.PackageNotFoundError:
        return None


def _cuda(problems: list[Fault]) -> dict[str, Any]:
    """Return the CUDA devices of torch; add its warnings to ``problems``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problems += [Fault("warning", " ".join(str(one.message).split())) for one in caught]
    built: str | None = torch.version.cuda
    if built is not None and not count:
        what = f"torch is built for CUDA {built} but sees no CUDA device"
        problems.append(
            Fault(
                "warning",
                what,
                "graphs are recorded on the tape; check the GPU driver with nvidia-smi",
            )
        )
    devices = []
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        devices.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return {"built": built, "devices": devices}


def _catalog(problems: list[Fault]) -> PluginCatalog:
    try:
        return PluginCatalog.scan()
    except GraphpactError as error:
        problems.append(Fault("error", error.message, error.hint))
        return PluginCatalog.scan(env={})


def _try_models(problems: list[Fault]) -> None:
    try:
        import graphpact_engine.models  # noqa: F401, PLC0415  only to check that it can be imported
    except GraphpactError as error:
        problems.append(Fault("error", error.message, error.hint))
    except Exception as error:  # noqa: BLE001  a broken installation can raise anything
        what = f"transformers cannot be imported: {type(error).__name__}: {error}"
        problems.append(Fault("error", what, 'pip install --upgrade "graphpact[engine]"'))


def _try_defaults(catalog: PluginCatalog, problems: list[Fault]) -> None:
    """Check that the plugins selected by default or by the environment can be used here."""
    from graphpact_engine.plans import plan_lanes, resolve_device, select_observers  # noqa: PLC0415

    try:
        config = EngineConfig.load()
        device = resolve_device(config.engine.device)
        for plan in plan_lanes(config, catalog, device):
            if plan.eager_reason is not None:
                what = f"lane {plan.name} runs eagerly: {plan.eager_reason.text}"
                why = plan.driver.unavailable(device)
                problems.append(Fault("warning", f"{what} ({plan.driver.name}: {why})"))
        select_observers(config, catalog)
    except GraphpactError as error:
        problems.append(Fault("error", error.message, error.hint))
    except Exception as error:  # noqa: BLE001  plugin code can raise anything
        what = f"the lanes cannot be planned: {type(error).__name__}: {error}"
        problems.append(Fault("error", what, "select other plugins, or fix the one that raised"))


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
            f"torch is built for {cuda['built']}" if cuda["built"] else "torch is built without it",
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
    rows += [(name, version) for name, version in report["distributions"].items()]
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
