"""``graphpact plugins``: lists the installed plugins, their availability, and capabilities of backends.

Does not: fail because of a broken plugin; a rejected plugin is a row with its reason.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from graphpact.plugins import Kind, PluginCatalog
from graphpact_cli.console import data, note, print_table


def plugins(
    *,
    kind: Annotated[Kind | None, typer.Option("--kind", "-k", help="Only plugins of this kind.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write a JSON array with one object for each plugin.")
    ] = False,
) -> None:
    """List the installed plugins, those that were rejected and why, and what each can do."""
    from graphpact_cli.survey import survey  # noqa: PLC0415  imports multiprocessing, and help needs none

    found = survey(PluginCatalog.scan(), kind)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    if not found:
        note("no plugin is installed" if kind is None else f"no {kind} is installed")
        return
    console = data()
    headings = ("kind", "name", "distribution", "status", "")
    print_table(console, headings, [_row(plugin) for plugin in found])
    capabilities = [row for plugin in found for row in _capability_rows(plugin)]
    if capabilities:
        console.print()
        print_table(console, ("backend", "declares", ""), capabilities)


def _row(plugin: Mapping[str, Any]) -> tuple[str, ...]:
    more = f"serves {', '.join(plugin['modes'])}" if plugin["modes"] else ""
    if plugin["lanes"]:
        more = f"runs the lanes {', '.join(f'{name} ({runner})' for name, runner in plugin['lanes'].items())}"
    if plugin["reason"] is not None:
        more = plugin["reason"]
    elif plugin["unavailable"]:
        more = _devices_text(plugin["unavailable"])
    elif plugin["driver"]:
        more += f"; records with {plugin['driver']} unless another is named"
    distribution = f"{plugin['distribution']} {plugin['version']}"
    return plugin["kind"], plugin["name"], distribution, plugin["status"], more


def _capability_rows(plugin: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    declared, providers = plugin["capabilities"] or {}, plugin["providers"] or {}
    rows = [(key.replace("_", " "), _declared_text(value)) for key, value in declared.items()]
    rows += [(f"{name} kernels", _devices_text(found)) for name, found in providers.items()]
    for number, (key, text) in enumerate(rows):
        yield "" if number else plugin["name"], key, text


def _declared_text(value: Any) -> str:
    if value is None:
        return "any"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower()


def _devices_text(found: Mapping[str, str | None]) -> str:
    return "; ".join(f"{device}: {reason or 'available'}" for device, reason in found.items())
