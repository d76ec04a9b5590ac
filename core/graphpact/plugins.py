"""`PluginCatalog`: finds, checks and selects plugins by entry point, in three stages.

    metadata   reads names, versions and contract versions of installed plugins; imports nothing
    import     loads the class of the entry point, which must derive from the base class of its kind
    hooks      checks abstract methods, attributes and hooks of the class without building it

A plugin that fails a stage is `Rejected` with the reason, even a first-party one. Other plugins are not
affected.

Does not: build plugins (the engine does), or replace a plugin that was named.
"""

import difflib
import logging
import os
import re
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from importlib_metadata import EntryPoint, PackageNotFoundError, distribution, distributions

from graphpact._version import CONTRACT_VERSION
from graphpact.errors import (
    AmbiguousPluginError,
    ConfigError,
    GraphpactError,
    RejectedPluginError,
    UnknownPluginError,
    did_you_mean,
)
from graphpact.plugin_calls import call, describe_error

if TYPE_CHECKING:  # these import torch, but a scan only reads metadata
    from graphpact.attention import AttentionBackend
    from graphpact.engines import EngineOffer
    from graphpact.graphs import GraphDriver
    from graphpact.runners import GraphRunner
    from graphpact.speculation import SpeculationAlgorithm

Kind = Literal[
    "attention_backend", "runner", "graph_driver", "speculation", "observer", "adapter", "engine", "command"
]
"""The kinds of plugins. Each kind has an entry-point group. The first four and engines have a base class. An
observer is a class of hook wrappers, an adapter has ``lanes`` for the suite, and a command is a function or a
`typer.Typer`.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)
CONTRACT_GROUP = "graphpact.contract"
"""The entry-point group in which a distribution declares the contract version that it was written for."""
DISABLE_VARIABLE = "GRAPHPACT_DISABLE_PLUGINS"
"""The environment variable that lists plugins to disable, as ``name`` or ``kind:name``, separated by
commas.
"""

GROUPS: dict[str, Kind] = {
    "graphpact.attention_backends": "attention_backend",
    "graphpact.runners": "runner",
    "graphpact.graph_drivers": "graph_driver",
    "graphpact.speculation": "speculation",
    "graphpact.observers": "observer",
    "graphpact.adapters": "adapter",
    "graphpact.engines": "engine",
    "graphpact.commands": "command",
}
"""The kind of the plugins in each entry-point group."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """The metadata of one installed plugin.

    ``name`` is unique within the ``kind``. ``distribution`` provides the plugin. ``version`` and ``contract``
    are the distribution's version and its declared contract version, or None. ``target`` is the class or
    command as ``module:attribute``.
    """

    kind: Kind
    name: str
    distribution: str
    version: str
    target: str
    contract: str | None

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"

    @property
    def disabling(self) -> str:
        """Return text that says how to disable the plugin."""
        return f"{DISABLE_VARIABLE}={self.kind}:{self.name} disables it"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plugin that passed every stage: its ``info``, and ``cls``, its class or command."""

    info: PluginInfo
    cls: Any


@dataclass(frozen=True, slots=True)
class Rejected:
    """A plugin that failed a stage: its ``info``, and the ``reason``."""

    info: PluginInfo
    reason: str


Plugin = Loaded | Rejected


class PluginCatalog:
    """The installed plugins, found by entry points. Each is imported once, when it is selected or loaded.

    Raises:
        ConfigError: An entry of ``disabled``, which comes from `DISABLE_VARIABLE`, matches no plugin.
    """

    def __init__(
        self, entry_points: Mapping[PluginInfo, EntryPoint], disabled: frozenset[str] = frozenset()
    ) -> None:
        self._entry_points = dict(sorted(entry_points.items(), key=lambda item: astuple(item[0])[:-1]))
        self.disabled = disabled
        self._decided: dict[PluginInfo, Plugin] = {}
        spellings = {spelling for info in self._entry_points for spelling in _spellings(info)}
        if unknown := sorted(disabled - spellings):
            near = did_you_mean(unknown[0], spellings)
            names = ", ".join(dict.fromkeys(info.name for info in self._entry_points))
            raise ConfigError(
                f"{DISABLE_VARIABLE}: {unknown[0]!r} matches no installed plugin",
                hint=f"did you mean {near!r}?" if near else f"unset it, or name some of: {names}",
            )

    @classmethod
    def scan(cls, *, env: Mapping[str, str] | None = None) -> "PluginCatalog":
        """Return the catalog of installed distributions, read from metadata. It imports nothing.

        ``env`` contains the environment variables, by default those of the process. For errors see
        `PluginCatalog`.
        """
        entries = (os.environ if env is None else env).get(DISABLE_VARIABLE, "").split(",")
        return cls(_installed(), frozenset(e.strip() for e in entries if e.strip()))

    def infos(self, kind: Kind | None = None) -> list[PluginInfo]:
        """Return the installed plugins of ``kind``, or all, sorted by kind and name."""
        return [info for info in self._entry_points if kind in (None, info.kind)]

    def load(self, info: PluginInfo) -> Plugin:
        """Return the plugin, or why it is rejected. The first call imports and checks it."""
        if info not in self._decided:
            reason = self._metadata_fault(info)
            self._decided[info] = Rejected(info, reason) if reason else _load(info, self._entry_points[info])
        return self._decided[info]

    def reject(self, info: PluginInfo, reason: str) -> None:
        """Reject a plugin without importing it."""
        self._decided[info] = Rejected(info, reason)

    @overload
    def select(self, kind: Literal["attention_backend"], name: str) -> "type[AttentionBackend]": ...
    @overload
    def select(self, kind: Literal["runner"], name: str) -> "type[GraphRunner]": ...
    @overload
    def select(self, kind: Literal["graph_driver"], name: str) -> "type[GraphDriver]": ...
    @overload
    def select(self, kind: Literal["speculation"], name: str) -> "type[SpeculationAlgorithm]": ...
    @overload
    def select(self, kind: Literal["engine"], name: str) -> "type[EngineOffer]": ...
    @overload
    def select(self, kind: Literal["observer", "adapter", "command"], name: str) -> Any: ...
    def select(self, kind: Kind, name: str) -> Any:
        """Return the class or command of the plugin ``name``, without importing other plugins.

        Raises:
            UnknownPluginError: No installed distribution offers the name.
            RejectedPluginError: The plugin failed a stage, or is disabled; the message gives the reason.
            AmbiguousPluginError: Two distributions offer the name.
        """
        offers = [info for info in self.infos(kind) if info.name == name]
        if not offers:
            raise self._unknown(kind, name)
        plugin = self.load(offers[0])
        if isinstance(plugin, Loaded):
            return plugin.cls
        if len(offers) > 1 and not self._is_disabled(offers[0]):
            hint = "uninstall all of them but one"
            raise AmbiguousPluginError(f"{kind} {name!r}: {plugin.reason}", hint=hint)
        hint = "fix the plugin or select another one; `graphpact plugins` lists what is installed"
        raise RejectedPluginError(f"{kind} {plugin.info} was rejected: {plugin.reason}", hint=hint)

    def _is_disabled(self, info: PluginInfo) -> bool:
        return not self.disabled.isdisjoint(_spellings(info))

    def _metadata_fault(self, info: PluginInfo) -> str | None:
        """Return why ``info`` is rejected before anything is imported, or None."""
        if self._is_disabled(info):
            return f"disabled by {DISABLE_VARIABLE}"
        offers = [other for other in self.infos(info.kind) if other.name == info.name]
        if len(offers) > 1:
            names = " and ".join(f"{o.distribution} {o.version} ({o.target})" for o in offers)
            return f"offered by {names}"
        if info.contract is None:
            return f"{info.distribution} declares no contract version in the group {CONTRACT_GROUP}"
        if not re.fullmatch("[0-9]{1,9}", info.contract):
            return f"its contract version {reprlib.repr(info.contract)} is not an integer below 10**9"
        if not 1 <= int(info.contract) <= CONTRACT_VERSION:
            versions = "version 1" if CONTRACT_VERSION == 1 else f"versions 1 to {CONTRACT_VERSION}"
            return f"written for contract version {info.contract}; this graphpact has {versions}"
        return None

    def _unknown(self, kind: Kind, name: str) -> UnknownPluginError:
        """Return the error for a name that no plugin has, without importing plugins."""
        available, rejected = [], []
        for info in self.infos(kind):
            known = self._decided.get(info)
            reason = known.reason if isinstance(known, Rejected) else self._metadata_fault(info)
            if reason is None:
                available.append(info)
            else:
                rejected.append(f"\n  rejected: {info}: {reason}")
        listing = ", ".join(map(str, available)) or "none"
        other_kinds = [f"\n  note: {i} is a {i.kind}" for i in self.infos() if i.name == name]
        near = did_you_mean(name, [info.name for info in available])
        hint = f"did you mean {near!r}?" if near else "`graphpact plugins` lists what is installed"
        message = f"no {kind} is called {name!r}\n  available: {listing}"
        text = "".join([message, *rejected, *other_kinds])
        return UnknownPluginError(text, hint=hint, kind=kind, name=name)


def _spellings(info: PluginInfo) -> set[str]:
    return {info.name, f"{info.kind}:{info.name}"}


def _installed() -> dict[PluginInfo, EntryPoint]:
    """Return every plugin of the distributions on ``sys.path``.

    If two installed distributions have the same name, only the first one counts. A distribution with
    unreadable metadata is skipped, with a warning in the log.
    """
    found: dict[PluginInfo, EntryPoint] = {}
    for any_dist in distributions():
        try:
            groups = any_dist.entry_points.groups
            for group in sorted(groups - GROUPS.keys() - {CONTRACT_GROUP}):
                if near := difflib.get_close_matches(group, GROUPS, n=1, cutoff=0.9):
                    _log.warning("%s: entry points in %r; did you mean %r?", any_dist.name, group, near[0])
            if not GROUPS.keys() & groups:
                continue
            dist: Any = any_dist
            with suppress(
                PackageNotFoundError
            ):  # the name of its folder differs from the one in its metadata
                dist = distribution(any_dist.name)  # the first of this name
            offers, metadata = dist.entry_points, dist.metadata  # each access parses a file
            contract = ", ".join(sorted(offers.select(group=CONTRACT_GROUP).names)) or None
            for e in offers:
                if kind := GROUPS.get(e.group):
                    info = PluginInfo(kind, e.name, metadata["Name"], metadata["Version"], e.value, contract)
                    found[info] = e
        except Exception as error:  # noqa: BLE001  third-party metadata
            _log.warning("a distribution's metadata cannot be read: %s", describe_error(error))
    return found


def _load(info: PluginInfo, entry_point: EntryPoint) -> Plugin:
    try:
        cls = call(f"importing {info.target}", entry_point.load)
        reason = call(f"checking {info.target}", _fault, cls, info)
    except GraphpactError as error:
        missing = isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name
        if info.kind == "adapter" and missing == "graphpact_adapters":
            return Rejected(info, "only `graphpact check` uses it, and needs graphpact-adapters for it")
        return Rejected(info, f"{error.message}; {info.disabling}")
    return Loaded(info, cls) if reason is None else Rejected(info, reason)


def _fault(cls: Any, info: PluginInfo) -> str | None:
    """Return why the class or command of ``info`` is rejected, or None."""
    if info.kind == "command":
        return None if callable(cls) else f"refers to {cls!r}, which cannot be called"
    if info.kind == "adapter":
        return None if hasattr(cls, "lanes") else f"refers to {cls!r}, which has no lanes"
    from graphpact.plugin_checks import class_fault  # noqa: PLC0415  it imports torch, and commands must start without torch

    return class_fault(cls, info.kind, info.name)
