"""`survey`: describes installed plugins that may hang, exit or crash when they are imported.

A child process imports one plugin after another and writes a description of each to its stdout; what plugins
print goes to stderr. If it ends or hangs at a plugin, that plugin is rejected with the reason, and another
child process continues with the next one.

Does not: show the descriptions; `graphpact plugins` and `graphpact doctor` do.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any, cast

from graphpact.errors import EngineError
from graphpact.plugin_calls import describe_error
from graphpact.plugins import DISABLE_VARIABLE, Kind, Plugin, PluginCatalog, Rejected

LIMIT = 60.0
"""Seconds for the import and the description of one plugin."""
_START_LIMIT, _TICK = 300.0, 0.02  # seconds: to import graphpact, and between two polls
_FEATURES = ("sliding_window", "softcap", "sinks", "trees")


def survey(catalog: PluginCatalog, kind: Kind | None = None) -> list[dict[str, Any]]:
    """Return the description of every plugin of ``kind``, or of all, sorted by kind and name.

    Raises `EngineError` if the process that imports plugins does not start.
    """
    infos = catalog.infos(kind)
    found: list[dict[str, Any]] = []
    while rest := infos[len(found) :]:
        lines, end = _run(kind or "", len(found), catalog.disabled)
        if not lines:
            raise EngineError(f"the process that imports plugins did not start: {end}")
        found += lines[1:]
        if len(lines) <= len(rest):
            info = infos[len(found)]
            found.append(describe(Rejected(info, f"loading {info.target}: {end}; {info.disabling}")))
    return found


def _run(kind: str, start: int, disabled: Iterable[str]) -> tuple[list[Any], str]:
    """Return the lines that one process wrote, and how it ended."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "graphpact_cli.survey", kind, str(start)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            env={**child_environment(), DISABLE_VARIABLE: ",".join(sorted(disabled))},
            start_new_session=True,
        )
        size, deadline = 0, time.monotonic() + _START_LIMIT
        end = f"it did not finish within {LIMIT:g} s"
        try:
            while time.monotonic() < deadline:
                if size < (size := os.fstat(output.fileno()).st_size):
                    deadline = time.monotonic() + LIMIT
                with suppress(subprocess.TimeoutExpired):
                    end = ending(process.wait(_TICK))
                    break
        finally:
            kill(process)
        output.seek(0)
        return [json.loads(line) for line in output if line.endswith(b"\n")], end


def child_environment() -> dict[str, str]:
    """Return the environment of a process that imports plugins: with the import path of this one."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # noqa: PTH109  text to text
    return {**os.environ, "PYTHONPATH": path}


def ending(status: int) -> str:
    """Return how a process ended, in words, from its `subprocess.Popen.returncode`."""
    if status >= 0:
        return f"it ended the process: exit status {status}"
    return f"signal {-status} ({signal.Signals(-status).name}) ended the process"


def kill(process: "subprocess.Popen[Any]") -> None:
    """Kill a process that leads a session, and its child processes; wait for its end."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def describe(plugin: Plugin) -> dict[str, Any]:
    """Return the description of a plugin, ready for JSON; imports torch for a class."""
    about: dict[str, Any] = {**asdict(plugin.info), "status": "loaded", "reason": None}
    about |= dict.fromkeys(("modes", "driver", "unavailable", "providers", "capabilities", "lanes"))
    if isinstance(plugin, Rejected):
        return about | {"status": "rejected", "reason": plugin.reason}
    if plugin.info.kind == "command":
        return about
    from graphpact.attention import Capabilities  # noqa: PLC0415  imports torch, as a class does

    cls, can = plugin.cls, getattr(plugin.cls, "capabilities", None)
    about["driver"] = getattr(cls, "driver", None)
    modes = getattr(cls, "modes", None)
    if isinstance(can, Capabilities):
        modes = can.modes
        declared = {field.name: _plain(getattr(can, field.name)) for field in fields(can)}
        features = [name for name in _FEATURES if declared.pop(name)]
        about["capabilities"] = declared | {"features": features}
    if modes:
        about["modes"] = _plain(modes)
    if plugin.info.kind == "speculation":
        about["lanes"] = {name: role.runner for name, role in cls.lanes.items()}
    if plugin.info.kind == "graph_driver":
        about["unavailable"] = _by_device(cls.unavailable)
    if plugin.info.kind == "attention_backend" and cls.providers:  # the best provider comes first
        about["providers"] = {each.name: _by_device(each.unavailable) for each in cls.providers}
    return about


def _by_device(unavailable: Callable[[Any], str | None]) -> dict[str, str | None]:
    """Return for each device of this machine why something cannot run there, or None if it can."""
    import torch  # noqa: PLC0415  slow


    devices = ("cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count())))
    return {device: why_unavailable(unavailable, torch.device(device)) for device in devices}


def _plain(value: Any) -> Any:
    """Return a set as a sorted list, an enum member by its value, and a dtype without ``torch.``."""
    if isinstance(value, frozenset | set | tuple | list):
        return sorted(map(_plain, value))
    value = getattr(value, "value", value)
    return value if isinstance(value, str | int | None) else str(value).removeprefix("torch.")


def main(kind: str, start: str) -> None:
    """Describe the plugins of ``kind`` (all if empty) from number ``start`` on, one line of JSON each."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what a plugin prints
    catalog, text = PluginCatalog.scan(), "null"
    if kind != "command":
        importlib.import_module("graphpact.lane")  # torch: before the plugins' time begins
    print(text, file=output)
    for info in catalog.infos(cast("Kind | None", kind or None))[int(start) :]:
        try:
            text = json.dumps(describe(catalog.load(info)))
        except BaseException as error:  # noqa: BLE001  a third party's attributes; no Ctrl-C comes here
            reason = f"loading {info.target} raised {describe_error(error)}; {info.disabling}"
            text = json.dumps(describe(Rejected(info, reason)))
        print(text, file=output)


if __name__ == "__main__":
    main(*sys.argv[1:])
