"""`survey`: describes installed plugins that may hang, exit or crash when they are imported.

A child process imports one plugin after another and sends a description of each; what plugins print goes to
stderr. If it ends or hangs at a plugin, that plugin is rejected with the reason, and another child process
continues with the next one.

Does not: show the descriptions; `graphpact plugins` and `graphpact doctor` do.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

from graphpact.errors import EngineError
from graphpact.plugin_calls import describe_error, why_unavailable
from graphpact.plugins import DISABLE_VARIABLE, Kind, Plugin, PluginCatalog, PluginInfo, Rejected
from graphpact_cli import children
from graphpact_cli.child import Parent
from graphpact_cli.children import Ending, Task

LIMIT = 60.0
"""Seconds for the import and the description of one plugin."""
_FEATURES = ("sliding_window", "softcap", "sinks", "trees")


def survey(catalog: PluginCatalog, kind: Kind | None = None) -> list[dict[str, Any]]:
    """Return the description of every plugin of ``kind``, or of all, sorted by kind and name.

    Raises `EngineError` if the process that imports plugins does not start.
    """
    task = _Survey(catalog, kind)
    children.prepare([] if kind == "command" else ["graphpact.lane"])
    children.run([task] if task.rest else [], 1)
    return task.found


class _Survey(Task):
    """The task that describes plugins.

    Attributes:
        found: The descriptions.
    """

    work = f"{__name__}:describe_from"

    def __init__(self, catalog: PluginCatalog, kind: Kind | None) -> None:
        self._kind, self._infos, self._disabled = kind, catalog.infos(kind), sorted(catalog.disabled)
        self.limit = LIMIT
        self.found: list[dict[str, Any]] = []

    @property
    def rest(self) -> list[PluginInfo]:
        """The plugins that are not described yet."""
        return self._infos[len(self.found) :]

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of `describe_from`."""
        return self._kind, len(self.found), self._disabled

    def hears(self, description: str) -> None:
        """Take the description of the next plugin, as JSON."""
        self.found.append(json.loads(description))

    def ends(self, ending: Ending) -> bool:
        """Reject the plugin that ended the process; return whether there are others."""
        sys.stderr.write(ending.stdout + ending.stderr)
        if self.rest:
            if not ending.started:
                raise EngineError(f"the process that imports plugins did not start: {ending.fault}")
            info = self.rest[0]
            reason = f"loading {info.target}: {ending.fault}; {info.disabling}"
            self.found.append(describe_plugin(Rejected(info, reason)))
        return bool(self.rest)


def describe_from(parent: Parent, kind: Kind | None, start: int, disabled: Sequence[str]) -> None:
    """Describe the plugins of ``kind``, or of all, from number ``start`` on: the work of a child process."""
    os.environ[DISABLE_VARIABLE] = ",".join(disabled)
    catalog = PluginCatalog.scan()
    for info in catalog.infos(kind)[start:]:
        parent.begins(str(info))
        try:
            description = json.dumps(describe_plugin(catalog.load(info)))
        except BaseException as error:  # noqa: BLE001  a third party's attributes; no Ctrl-C comes here
            reason = f"loading {info.target} raised {describe_error(error)}; {info.disabling}"
            description = json.dumps(describe_plugin(Rejected(info, reason)))
        parent.send(description)


def describe_plugin(plugin: Plugin) -> dict[str, Any]:
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
    if plugin.info.kind == "engine":
        about["unavailable"] = {cls.name: why_unavailable(lambda offer: offer.unavailable(), cls())}
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
