"""Finding and choosing plugins by entry point: `PluginCatalog`.

    metadata   what is installed and which contract it was written for; nothing is imported
    import     the class that the entry point refers to, which derives from its kind's base class
    hooks      what the base class and pluggy say about the class; nothing is built

A plugin that fails a stage is `Rejected`, with the reason; the others are not touched by it.
graphpact's own plugins come through the same door as anybody's.

Does not: build plugins (the engine does), or put another one in the place of one that was named.
"""

import inspect
import logging
import os
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

import pluggy
from importlib_metadata import (
    EntryPoint,
    PackageNotFoundError,
    distribution,
    distributions,
)

from graphpact import hookspecs
from graphpact.attention import AttentionBackend, KernelProvider
from graphpact.errors import (
    AmbiguousPluginError,
    ConfigError,
    RejectedPluginError,
    UnknownPluginError,
    did_you_mean,
)
from graphpact.graphs import GraphDriver
from graphpact.hookspecs import CONTRACT_VERSION, PROJECT
from graphpact.runners import GraphRunner

Kind = Literal["attention_backend", "runner", "graph_driver", "observer", "command"]
"""What a plugin is; each kind has an entry-point group. The first three have a base class, an observer is a
class of hook wrappers, a command is what typer takes: a function, or a group of them."""

KINDS: tuple[Kind, ...] = get_args(Kind)
CONTRACT_GROUP = "graphpact.contract"
"""The entry-point group in which a distribution names the contract version it was written for."""
DISABLE_VARIABLE = "GRAPHPACT_DISABLE_PLUGINS"
"""Environment variable: plugins to leave out, ``name`` or ``kind:name``, commas between them."""

_BASES: dict[Kind, type[Any]] = {
    "attention_backend": AttentionBackend,
    "runner": GraphRunner,
    "graph_driver": GraphDriver,
    "observer": object,
}
_OURS: dict[str, dict[Kind, str]] = {  # what each distribution of ours offers
    "graphpact": {"runner": "eager", "command": "plugins"},
    "graphpact-tape": {"graph_driver": "tape"},
    "graphpact-cuda-graph": {"runner": "cuda_graph", "graph_driver": "cuda"},
    "graphpact-cpu-graph": {"runner": "cpu_graph", "graph_driver": "inductor"},
    "graphpact-flashinfer": {"attention_backend": "flashinfer"},
    "graphpact-fa3": {"attention_backend": "fa3"},
    "graphpact-trtllm-mla": {"attention_backend": "trtllm_mla"},
    "graphpact-engine": {"observer": "trace", "command": "doctor generate pact"},
    "graphpact-conformance": {"command": "check explain museum report"},
}
_FIRST_PARTY: dict[Kind, dict[str, str]] = {
    kind: {n: d for d, offers in _OURS.items() for n in offers.get(kind, "").split()}
    for kind in KINDS
}
_GROUPS: dict[str, Kind] = {f"graphpact.{kind}s": kind for kind in KINDS}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """What the metadata of an installed distribution says about one plugin.

    Args:
        kind: What it is.
        name: What it is selected by; unique within its kind.
        distribution: The distribution that offers it.
        version: The version of that distribution.
        target: The class, of a command the function, as ``module:attribute``.
        contract: The contract version that the distribution declares; None where it has none.
    """

    kind: Kind
    name: str
    distribution: str
    version: str
    target: str
    contract: str | None

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plugin that passed every stage: ``cls`` may be built, or called where it is a command."""

    info: PluginInfo
    cls: Any


@dataclass(frozen=True, slots=True)
class Rejected:
    """A plugin that failed a stage, and why."""

    info: PluginInfo
    reason: str


Plugin = Loaded | Rejected


class PluginCatalog:
    """The plugins that are installed. Each is imported once, when it is selected or checked.

    Args:
        entry_points: What was found, by what its metadata says.
        disabled: Entries of `DISABLE_VARIABLE`.

    Raises:
        ConfigError: An entry of ``disabled`` matches no plugin.
    """

    def __init__(
        self, entry_points: Mapping[PluginInfo, EntryPoint], disabled: frozenset[str] = frozenset()
    ) -> None:
        self._entry_points = dict(sorted(entry_points.items(), key=lambda item: _order(item[0])))
        self._disabled = disabled
        self._decided: dict[PluginInfo, Plugin] = {}
        spellings = {spelling for info in self._entry_points for spelling in _spellings(info)}
        if strangers := sorted(disabled - spellings):
            near = did_you_mean(strangers[0], spellings)
            names = ", ".join(dict.fromkeys(info.name for info in self._entry_points))
            raise ConfigError(
                f"{DISABLE_VARIABLE}: {strangers[0]!r} matches no installed plugin",
                hint=f"did you mean {near!r}?" if near else f"unset it, or name some of: {names}",
            )

    @classmethod
    def scan(cls, *, env: Mapping[str, str] | None = None) -> "PluginCatalog":
        """Read the metadata of what is installed. Imports nothing.

        Args:
            env: Environment variables; the process's where none are given.

        Raises:
            ConfigError: An entry of ``GRAPHPACT_DISABLE_PLUGINS`` matches no plugin.
        """
        entries = (os.environ if env is None else env).get(DISABLE_VARIABLE, "").split(",")
        return cls(_installed(), frozenset(e.strip() for e in entries if e.strip()))

    def infos(self, kind: Kind | None = None) -> list[PluginInfo]:
        """Return what is installed, by kind and name; all kinds where none is given."""
        return [info for info in self._entry_points if kind in (None, info.kind)]

    def check(self, kind: Kind | None = None) -> list[Plugin]:
        """Try every plugin, by kind and name; a broken one does not keep others from loading."""
        return [self._decide(info) for info in self.infos(kind)]

    @overload
    def select(self, kind: Literal["attention_backend"], name: str) -> type[AttentionBackend]: ...
    @overload
    def select(self, kind: Literal["runner"], name: str) -> type[GraphRunner]: ...
    @overload
    def select(self, kind: Literal["graph_driver"], name: str) -> type[GraphDriver]: ...
    @overload
    def select(self, kind: Literal["observer"], name: str) -> type[Any]: ...
    @overload
    def select(self, kind: Literal["command"], name: str) -> Any: ...
    def select(self, kind: Kind, name: str) -> Any:
        """Return the plugin that is called ``name``; imports that one and no other.

        Raises:
            UnknownPluginError: Nothing installed offers the name.
            RejectedPluginError: The plugin failed a stage, or is disabled; the message says which.
            AmbiguousPluginError: Two distributions offer the name.
        """
        offers = [info for info in self.infos(kind) if info.name == name]
        if not offers:
            raise self._unknown(kind, name)
        plugin = self._decide(offers[0])
        if isinstance(plugin, Loaded):
            return plugin.cls
        if len(offers) > 1 and not self._is_disabled(offers[0]):
            raise AmbiguousPluginError(
                f"{kind} {name!r}: {plugin.reason}", hint="uninstall all of them but one"
            )
        raise RejectedPluginError(
            f"{kind} {plugin.info} was rejected: {plugin.reason}",
            hint="nothing takes its place unasked; `graphpact plugins` lists what there is",
        )

    # -- inside ----------------------------------------------------------------------------------

    def _decide(self, info: PluginInfo) -> Plugin:
        if info not in self._decided:
            reason = self._metadata_fault(info)
            self._decided[info] = (
                _load(info, self._entry_points[info]) if reason is None else Rejected(info, reason)
            )
        return self._decided[info]

    def _is_disabled(self, info: PluginInfo) -> bool:
        return not self._disabled.isdisjoint(_spellings(info))

    def _metadata_fault(self, info: PluginInfo) -> str | None:
        """Return why ``info`` is rejected before anything is imported, or None."""
        if self._is_disabled(info):
            return f"disabled by {DISABLE_VARIABLE}"
        offers = [other for other in self.infos(info.kind) if other.name == info.name]
        if len(offers) > 1:
            names = " and ".join(f"{o.distribution} {o.version} ({o.target})" for o in offers)
            return f"offered by {names}"
        if info.contract is None:
            return f"{info.distribution} names no contract version in the group {CONTRACT_GROUP}"
        if not re.fullmatch("[0-9]+", info.contract):
            return f"its contract version {info.contract!r} is not a whole number"
        if not 1 <= int(info.contract) <= CONTRACT_VERSION:
            versions = "version 1" if CONTRACT_VERSION == 1 else f"versions 1 to {CONTRACT_VERSION}"
            return f"written for contract version {info.contract}; this graphpact keeps {versions}"
        return None

    def _unknown(self, kind: Kind, name: str) -> UnknownPluginError:
        """Return the error for a name that nothing offers; imports nothing to say it."""
        there, refused = [], []
        for info in self.infos(kind):
            known = self._decided.get(info)
            reason = known.reason if isinstance(known, Rejected) else self._metadata_fault(info)
            if reason is None:
                there.append(info)
            else:
                refused.append(f"\n  rejected: {info}: {reason}")
        listing = ", ".join(map(str, there)) or "none"
        elsewhere = [f"\n  note: {i} is a {i.kind}" for i in self.infos() if i.name == name]
        wheels = _FIRST_PARTY.get(kind, {})
        near = did_you_mean(name, [info.name for info in there] + list(wheels))
        hint = "`graphpact plugins` lists what there is"
        if name in wheels:
            hint = f"pip install {wheels[name]}"
        elif near is not None:
            installed = near in {info.name for info in there}
            hint = f"did you mean {near!r}?" + ("" if installed else f" pip install {wheels[near]}")
        return UnknownPluginError(
            f"no {kind} is called {name!r}\n  available: {listing}" + "".join(refused + elsewhere),
            hint=hint,
        )


def _order(info: PluginInfo) -> tuple[str, ...]:
    return info.kind, info.name, info.distribution, info.version, info.target


def _spellings(info: PluginInfo) -> set[str]:
    return {info.name, f"{info.kind}:{info.name}"}


def _installed() -> dict[PluginInfo, EntryPoint]:
    """Return every plugin that the metadata on ``sys.path`` offers.

    A distribution that lies there twice counts once, as the one that is found by its name. One
    whose metadata cannot be read is left out, with a warning in the log.
    """
    found: dict[PluginInfo, EntryPoint] = {}
    for any_dist in distributions():
        try:
            if not _GROUPS.keys() & any_dist.entry_points.groups:
                continue
            dist = _first_of_its_name(any_dist)
            offers = dist.entry_points
            contract = ", ".join(sorted(offers.select(group=CONTRACT_GROUP).names)) or None
            for e in offers:
                if kind := _GROUPS.get(e.group):
                    info = PluginInfo(kind, e.name, dist.name, dist.version, e.value, contract)
                    found[info] = e
        except Exception as error:  # noqa: BLE001  what is installed beside us is not ours to trust
            _log.warning("a distribution's metadata cannot be read: %s", _say(error))
    return found


def _first_of_its_name(dist: Any) -> Any:
    """Return the distribution that is found first by the name of ``dist``; itself where none is."""
    try:
        return distribution(dist.name)
    except PackageNotFoundError:  # its folder is not named as its metadata is
        return dist


def _load(info: PluginInfo, entry_point: EntryPoint) -> Plugin:
    doing = "importing"
    try:
        cls = entry_point.load()
        doing = "looking at"
        if info.kind == "command":
            reason = None if callable(cls) else f"refers to {cls!r}, which cannot be called"
        else:
            base = _BASES[info.kind]
            reason = _class_fault(cls, base) or (
                observer_fault(cls) if info.kind == "observer" else _hook_fault(cls, base)
            )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  SystemExit; the panics of Rust extensions
        reason = (
            f"{doing} {info.target} raised {_say(error)};"
            f" {DISABLE_VARIABLE}={info.kind}:{info.name} leaves it out"
        )
    return Loaded(info, cls) if reason is None else Rejected(info, reason)


def _class_fault(cls: Any, base: type[Any]) -> str | None:
    """Return what keeps ``cls`` from being built as a ``base``, or None."""
    if not isinstance(cls, type) or not issubclass(cls, base):
        what = f"class {cls.__name__}" if isinstance(cls, type) else type(cls).__name__
        return f"refers to a {what}, not to a class derived from {base.__module__}.{base.__name__}"
    lacks: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
    if lacks:
        return f"{cls.__name__} is abstract: it lacks {', '.join(sorted(lacks))}"
    owed = [n for n, a in inspect.get_annotations(base).items() if "ClassVar" in str(a)]
    unset = [name for name in owed if not hasattr(cls, name)]
    if issubclass(cls, AttentionBackend) and (bad := _no_providers(cls)):
        return (
            f"{cls.__name__}.providers has {bad[0]!r}, no KernelProvider called native or portable"
        )
    return f"{cls.__name__} does not set {', '.join(unset)}" if unset else None


def _no_providers(cls: type[AttentionBackend]) -> list[Any]:
    """Return what stands among the kernel providers of a backend and is none."""

    def is_one(provider: Any) -> bool:
        return (
            isinstance(provider, type)
            and issubclass(provider, KernelProvider)
            and getattr(provider, "name", None) in ("native", "portable")
        )

    return [provider for provider in cls.providers or () if not is_one(provider)]


def _hook_fault(cls: type[Any], base: type[Any]) -> str | None:
    """Return what is wrong with the hooks that ``cls`` implements, or None."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    hooks = {name: caller for name, caller in vars(manager.hook).items() if name[0] != "_"}
    ours, theirs = _Unbuilt(base), _Unbuilt(cls)
    try:
        manager.register(ours, name=base.__qualname__)
        manager.register(theirs, name=f"{cls.__module__}.{cls.__qualname__}")
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        for caller in manager.get_hookcallers(theirs) or ():
            if not caller.has_spec():
                near = did_you_mean(caller.name, hooks)
                hint = f"did you mean {near!r}" if near else f"there are {', '.join(hooks)}"
                return f"{cls.__name__} implements an unknown hook {caller.name!r}; {hint}"
        return " ".join(str(error).split())
    owed = {caller.name for caller in manager.get_hookcallers(ours) or ()}
    owed -= {caller.name for caller in manager.get_hookcallers(theirs) or ()}
    if owed:
        return f"{cls.__name__} overrides {', '.join(sorted(owed))} without @graphpact.hookimpl"
    return None


def observer_fault(cls: type[Any]) -> str | None:
    """Return what keeps objects of ``cls`` from observing a lane, or None.

    It is a hook that the contract does not have, no hook at all, or one that would answer for a plugin.
    """
    if reason := _hook_fault(cls, object):
        return reason
    options = {
        name: opts
        for name in dir(cls)
        if (opts := getattr(inspect.getattr_static(cls, name), f"{PROJECT}_impl", None))
    }
    if not options:
        return f"{cls.__name__} implements no hook"
    answers = sorted(name for name, opts in options.items() if not opts.get("wrapper"))
    if answers:
        return f"{cls.__name__}: an observer only wraps; {', '.join(answers)} lacks wrapper=True"
    return None


class _Unbuilt:
    """The methods of a class bound as an instance would bind them, so that pluggy sees no ``self``.

    The class will not do: pluggy strips ``self`` only from functions defined in a class body.
    """

    def __init__(self, cls: type[Any]) -> None:
        for name in dir(cls):
            method = inspect.getattr_static(cls, name)
            if isinstance(method, staticmethod | classmethod):
                vars(self)[name] = getattr(cls, name)
            elif inspect.isfunction(method):
                vars(self)[name] = types.MethodType(method, cls)


def _say(error: BaseException) -> str:
    """Return an exception's type and message in one line, even where its message cannot be had."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # noqa: BLE001  a foreign __str__
        message = "(its message cannot be had)"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
