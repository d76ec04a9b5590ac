"""``graphpact plugins``: lists the installed plugins, their availability, and capabilities of backends.

Does not: fail because of a broken plugin; a rejected plugin is a row with its reason.
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
    """`graphpact.plugins.Kind` for typer.

    Members: ``attention_backend``, ``runner``, ``graph_driver``, ``observer``, ``command``.
    """

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
    headings = ("kind", "name", "distribution", "status", "")
    print_table(console, headings, [_row(plugin) for plugin in found])
    capabilities = [row for plugin in found for row in _capability_rows(plugin)]
    if capabilities:
        console.print()
        print_table(console, ("backend", "declares", ""), capabilities)


def check(catalog: PluginCatalog, kind: Kind | None = None) -> list[Plugin]:
    """Return the results of loading every plugin of ``catalog``; what plugins print goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        return catalog.check(kind)


def distributions() -> dict[str, str]:
    """Return the version of graphpact and of every distribution with plugins, by name."""
    infos = PluginCatalog.scan(env={}).infos()
    found = sorted({(info.distribution, info.version) for info in infos})
    return {"graphpact": __version__} | dict(found)


def unavailable(plugin: Plugin) -> dict[str, str | None]:
    """Return, for each device, why a driver cannot record on it, or None if it can; empty for other kinds."""
    if not isinstance(plugin, Loaded) or plugin.info.kind != "graph_driver":
        return {}
    return _by_device(plugin.cls.unavailable)


def kernels(plugin: Plugin) -> dict[str, dict[str, str | None]]:
    """Return, for each kernel provider and device, why it cannot run there, or None if it can.

    The best provider comes first. Empty for plugins without providers.
    """
    if not isinstance(plugin, Loaded) or plugin.info.kind != "attention_backend":
        return {}
    return {provider.name: _by_device(provider.unavailable) for provider in plugin.cls.providers}


def describe(plugin: Plugin) -> dict[str, Any]:
    """Return the description of a plugin, ready for JSON."""
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
            more = _devices_text(unavailable(plugin))
        elif driver := getattr(plugin.cls, "driver", None):
            more += f"; records with {driver} unless another is named"
    else:
        status, more = "rejected", plugin.reason
    return info.kind, info.name, f"{info.distribution} {info.version}", status, more


def _capability_rows(plugin: Plugin) -> Iterator[tuple[str, str, str]]:
    about = describe(plugin)
    declared, providers = about["capabilities"] or {}, about["providers"] or {}
    rows = [(key.replace("_", " "), _declared_text(value)) for key, value in declared.items()]
    rows += [(f"{name} kernels", _devices_text(found)) for name, found in providers.items()]
    for number, (key, text) in enumerate(rows):
        yield "" if number else plugin.info.name, key, text


def _declared_text(value: Any) -> str:
    if value is None:
        return "any"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower()


def _devices_text(found: Mapping[str, str | None]) -> str:
    return "; ".join(f"{device}: {reason or 'available'}" for device, reason in found.items())


def _by_device(unavailable: Callable[[torch.device], str | None]) -> dict[str, str | None]:
    """Return ``unavailable`` for each device of this machine; what plugins print goes to stderr."""
    devices = ("cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count())))
    with contextlib.redirect_stdout(sys.stderr):
        return {device: why_unavailable(unavailable, torch.device(device)) for device in devices}


def _capabilities(plugin: Plugin) -> Capabilities | None:
    can = getattr(plugin.cls, "capabilities", None) if isinstance(plugin, Loaded) else None
    return can if isinstance(can, Capabilities) else None


def _modes(plugin: Plugin) -> list[str] | None:
    """Return the modes that a runner or a backend serves; None for plugins without modes."""
    if not isinstance(plugin, Loaded):
        return None
    can = _capabilities(plugin)
    modes = getattr(plugin.cls, "modes", None) if can is None else can.modes
    return _words(modes) if modes else None


def _words(values: Iterable[Any]) -> list[str]:
    """Return set members as sorted text: enum members by value, dtypes without ``torch.``."""
    return sorted(str(getattr(value, "value", value)).removeprefix("torch.") for value in values)
