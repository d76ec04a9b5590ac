"""``graphpact plugins``: what is installed, what of it can be used, and what each backend can do.

Does not: fail because of a plugin that does; a rejected one is a row with its reason.
"""

import contextlib
import enum
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

import torch
import typer

from graphpact._version import __version__
from graphpact.attention import Capabilities
from graphpact.attention.providers import why_unavailable
from graphpact.cli.console import data, note, print_table
from graphpact.plugins import Kind, Loaded, Plugin, PluginCatalog

_FEATURES = ("sliding_window", "softcap", "sinks", "trees")


class KindOption(enum.StrEnum):
    """`graphpact.plugins.Kind`, as typer reads choices."""

    attention_backend = "attention_backend"
    runner = "runner"
    graph_driver = "graph_driver"
    observer = "observer"
    command = "command"


def plugins(
    *,
    kind: Annotated[
        KindOption | None, typer.Option("--kind", "-k", help="Only plugins of this kind.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write a JSON array with one object for each plugin.")
    ] = False,
) -> None:
    """List the installed plugins, those that were rejected and why, and what each can do."""
    found = check(PluginCatalog.scan(), None if kind is None else kind.value)
    if as_json:
        sys.stdout.write(json.dumps([describe(plugin) for plugin in found], indent=2) + "\n")
        return
    if not found:
        note("no plugin is installed" if kind is None else f"no {kind.value} is installed")
        return
    console = data()
    print_table(
        console,
        ("kind", "name", "distribution", "status", ""),
        [_row(plugin) for plugin in found],
    )
    capabilities = [row for plugin in found for row in _capability_rows(plugin)]
    if capabilities:
        console.print()
        print_table(console, ("backend", "declares", ""), capabilities)


def check(catalog: PluginCatalog, kind: Kind | None = None) -> list[Plugin]:
    """Try every plugin of ``catalog``; what one prints when it is imported is no data of ours."""
    with contextlib.redirect_stdout(sys.stderr):
        return catalog.check(kind)


def distributions() -> dict[str, str]:
    """Return the version of graphpact and of every distribution with plugins, by name."""
    infos = PluginCatalog.scan(env={}).infos()
    found = sorted({(info.distribution, info.version) for info in infos})
    return {"graphpact": __version__} | dict(found)


def unavailable(plugin: Plugin) -> dict[str, str | None]:
    """Return, by device of this machine, why a driver cannot record there, or None where it can.

    Empty for what is no driver.
    """
    if not isinstance(plugin, Loaded) or plugin.info.kind != "graph_driver":
        return {}
    return _by_device(plugin.cls.unavailable)


def kernels(plugin: Plugin) -> dict[str, dict[str, str | None]]:
    """Return, by kernel provider of a backend and by device, why it cannot run there, or None where it can.

    The best provider first. Empty for what has no choice of kernels.
    """
    if not isinstance(plugin, Loaded) or plugin.info.kind != "attention_backend":
        return {}
    return {provider.name: _by_device(provider.unavailable) for provider in plugin.cls.providers}


def describe(plugin: Plugin) -> dict[str, Any]:
    """Return what there is to say about a plugin, ready for JSON."""
    info = plugin.info
    can = _capabilities(plugin)
    return {
        "kind": info.kind,
        "name": info.name,
        "distribution": info.distribution,
        "version": info.version,
        "target": info.target,
        "contract": info.contract,
        "status": "loaded" if isinstance(plugin, Loaded) else "rejected",
        "reason": None if isinstance(plugin, Loaded) else plugin.reason,
        "modes": _modes(plugin),
        "driver": getattr(plugin.cls, "driver", None) if isinstance(plugin, Loaded) else None,
        "unavailable": unavailable(plugin) or None,
        "providers": kernels(plugin) or None,
        "capabilities": None
        if can is None
        else {
            "modes": _words(can.modes),
            "graph_support": can.graph_support.value,
            "dtypes": _words(can.dtypes),
            "devices": _words(can.devices),
            "head_layouts": _words(can.head_layouts),
            "page_sizes": None if can.page_sizes is None else sorted(can.page_sizes),
            "head_dims": None if can.head_dims is None else sorted(can.head_dims),
            "features": [name for name in _FEATURES if getattr(can, name)],
            "needs_host_plan": can.needs_host_plan,
            "seq_len_fill_value": can.seq_len_fill_value,
        },
    }


def _row(plugin: Plugin) -> tuple[str, ...]:
    info = plugin.info
    if isinstance(plugin, Loaded):
        modes = _modes(plugin)
        status, more = "loaded", f"serves {', '.join(modes)}" if modes else ""
        if info.kind == "graph_driver":
            more = _say_devices(unavailable(plugin))
        elif driver := getattr(plugin.cls, "driver", None):
            more += f"; records with {driver} unless another is named"
    else:
        status, more = "rejected", plugin.reason
    return info.kind, info.name, f"{info.distribution} {info.version}", status, more


def _capability_rows(plugin: Plugin) -> Iterator[tuple[str, str, str]]:
    about = describe(plugin)
    words = {
        key.replace("_", " "): _say_declared(value)
        for key, value in (about["capabilities"] or {}).items()
    }
    words |= {
        f"{provider} kernels": _say_devices(found)
        for provider, found in (about["providers"] or {}).items()
    }
    name = plugin.info.name
    for key, text in words.items():
        yield name, key, text
        name = ""  # once is enough


def _say_declared(value: Any) -> str:
    if value is None:
        return "any"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower()


def _say_devices(found: Mapping[str, str | None]) -> str:
    return "; ".join(f"{device}: {reason or 'available'}" for device, reason in found.items())


def _by_device(unavailable: Callable[[torch.device], str | None]) -> dict[str, str | None]:
    """Ask about each device of this machine; what a plugin prints is no data of ours."""
    devices = ("cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count())))
    with contextlib.redirect_stdout(sys.stderr):
        return {device: why_unavailable(unavailable, torch.device(device)) for device in devices}


def _capabilities(plugin: Plugin) -> Capabilities | None:
    can = getattr(plugin.cls, "capabilities", None) if isinstance(plugin, Loaded) else None
    return can if isinstance(can, Capabilities) else None


def _modes(plugin: Plugin) -> list[str] | None:
    """Return the modes that a runner or a backend serves; None for what knows no modes."""
    if not isinstance(plugin, Loaded):
        return None
    can = _capabilities(plugin)
    modes = getattr(plugin.cls, "modes", None) if can is None else can.modes
    return _words(modes) if modes else None


def _words(values: Iterable[Any]) -> list[str]:
    """Return set members in words: modes by value, dtypes without ``torch.``, sorted."""
    return sorted(str(getattr(value, "value", value)).removeprefix("torch.") for value in values)
