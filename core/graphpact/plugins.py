"""`PluginCatalog`: finds, checks and selects plugins by entry point, in three stages.

    metadata   names, versions and contract version of installed plugins; imports nothing
    import     loads the class of the entry point, which derives from its kind's base class
    hooks      checks abstract methods, attributes and hooks of the class; builds nothing

A plugin that fails a stage, a first-party one too, is `Rejected` with the reason; the others are unaffected.

Does not: build plugins (the engine does), or replace a plugin that was named.
"""

import difflib
import inspect
import logging
import os
import re
import reprlib
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args, overload

import pluggy
from importlib_metadata import EntryPoint, PackageNotFoundError, distribution, distributions

import graphpact
from graphpact._version import CONTRACT_VERSION, __version__
from graphpact.errors import (
    AmbiguousPluginError,
    ConfigError,
    RejectedPluginError,
    UnknownPluginError,
    did_you_mean,
    misspelt,
)
from graphpact.plugin_calls import describe_error

Kind = Literal["attention_backend", "runner", "graph_driver", "speculation", "observer", "adapter", "command"]
"""The kinds of plugins; each has an entry-point group. The first four have a base class, an observer is a
class of hook wrappers, an adapter has ``lanes`` for the suite, a command is a function or a `typer.Typer`."""

KINDS: tuple[Kind, ...] = get_args(Kind)
CONTRACT_GROUP = "graphpact.contract"
"""The entry-point group in which a distribution declares the contract version it was written for."""
DISABLE_VARIABLE = "GRAPHPACT_DISABLE_PLUGINS"
"""Environment variable: plugins to disable, ``name`` or ``kind:name``, separated by commas."""

_BASES: dict[Kind, str] = {  # names of `graphpact`, which imports torch when it is asked for one
    "attention_backend": "AttentionBackend",
    "runner": "GraphRunner",
    "graph_driver": "GraphDriver",
    "speculation": "SpeculationAlgorithm",
}
_OFFERS: dict[str, dict[Kind, str]] = {  # the first-party distributions, and their plugins
    "graphpact": {"runner": "eager"},
    "graphpact-cli": {"command": "plugins"},
    "graphpact-kernels": {},
    "graphpact-tape": {"graph_driver": "tape"},
    "graphpact-cuda-graph": {
        "runner": "cuda_graph breakable_cuda_graph piecewise_cuda_graph",
        "graph_driver": "cuda xpu npu musa",
    },
    "graphpact-cpu-graph": {"runner": "cpu_graph", "graph_driver": "inductor"},
    "graphpact-speculative": {
        "runner": "eagle_draft eagle_draft_extend frozen_kv_mtp",
        "speculation": "eagle frozen_kv_mtp",
    },
    "graphpact-flashinfer": {"attention_backend": "flashinfer"},
    "graphpact-fa3": {"attention_backend": "fa3"},
    "graphpact-trtllm-mla": {"attention_backend": "trtllm_mla"},
    "graphpact-engine": {"observer": "metrics trace", "command": "doctor generate pact"},
    "graphpact-conformance": {"command": "check explain report"},
    "graphpact-museum": {"command": "museum"},
    "graphpact-adapters": {"adapter": "sglang vllm"},
    "graphpact-bench": {"command": "bench"},
}
_FIRST_PARTY: dict[Kind, dict[str, str]] = {
    kind: {n: d for d, offers in _OFFERS.items() for n in offers.get(kind, "").split()} for kind in KINDS
}
_GROUPS: dict[str, Kind] = {
    f"graphpact.{kind}" + ("" if kind == "speculation" else "s"): kind for kind in KINDS
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """The metadata of one installed plugin.

    ``name`` is unique within the ``kind``. ``distribution`` offers it, has the ``version``, and declares the
    ``contract`` version or None. ``target`` is the class or command as ``module:attribute``.
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
    def is_ours(self) -> bool:
        """Whether graphpact's own distributions offer it."""
        return self.distribution in _OFFERS

    @property
    def disabling(self) -> str:
        """How to disable it, in words."""
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
    """The installed plugins by their entry points. Each is imported once, when it is selected or loaded.

    Raises:
        ConfigError: An entry of ``disabled``, those of `DISABLE_VARIABLE`, matches no plugin.
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
        """Return the catalog of installed distributions, from metadata; imports nothing.

        ``env`` are the environment variables, by default those of the process. Errors: see `PluginCatalog`.
        """
        entries = (os.environ if env is None else env).get(DISABLE_VARIABLE, "").split(",")
        return cls(_installed(), frozenset(e.strip() for e in entries if e.strip()))

    def infos(self, kind: Kind | None = None) -> list[PluginInfo]:
        """Return the installed plugins of ``kind``, or all, sorted by kind and name."""
        return [info for info in self._entry_points if kind in (None, info.kind)]

    def load(self, info: PluginInfo) -> Plugin:
        """Return one plugin, imported and checked at the first call, or why it is rejected."""
        if info not in self._decided:
            reason = self._metadata_fault(info)
            self._decided[info] = Rejected(info, reason) if reason else _load(info, self._entry_points[info])
        return self._decided[info]

    def reject(self, info: PluginInfo, reason: str) -> None:
        """Reject a plugin without importing it."""
        self._decided[info] = Rejected(info, reason)

    @overload
    def select(self, kind: Literal["attention_backend"], name: str) -> "type[graphpact.AttentionBackend]": ...
    @overload
    def select(self, kind: Literal["runner"], name: str) -> "type[graphpact.GraphRunner]": ...
    @overload
    def select(self, kind: Literal["graph_driver"], name: str) -> "type[graphpact.GraphDriver]": ...
    @overload
    def select(self, kind: Literal["speculation"], name: str) -> "type[graphpact.SpeculationAlgorithm]": ...
    @overload
    def select(self, kind: Literal["observer", "adapter", "command"], name: str) -> Any: ...
    def select(self, kind: Kind, name: str) -> Any:
        """Return the class or command of the plugin ``name``; imports no other plugin.

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
        hint = "fix it or name another one; `graphpact plugins` lists what is installed"
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
        """Return the error for a name that no plugin has; imports nothing."""
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
        wheels = _FIRST_PARTY.get(kind, {})
        names = [info.name for info in available]
        near = did_you_mean(name, [*names, *wheels])
        hint = "`graphpact plugins` lists what is installed"
        if name in wheels:
            hint = f"pip install {wheels[name]}"
        elif near is not None:
            hint = f"did you mean {near!r}?" + ("" if near in names else f" pip install {wheels[near]}")
        message = f"no {kind} is called {name!r}\n  available: {listing}"
        return UnknownPluginError("".join([message, *rejected, *other_kinds]), hint=hint)


def installed_distributions() -> dict[str, tuple[str, str]]:
    """Return version and plugins of each distribution of graphpact, and of each other one with plugins.

    By name, graphpact first. The plugins are told in words, ``graph_driver tape``, from metadata only: one
    that would be rejected is named too.
    """
    versions: dict[str, str] = {}
    offers: dict[str, dict[Kind, list[str]]] = {}
    for info in PluginCatalog.scan(env={}).infos():
        versions[info.distribution] = info.version
        offers.setdefault(info.distribution, {}).setdefault(info.kind, []).append(info.name)
    for name in _OFFERS.keys() - versions.keys():
        with suppress(PackageNotFoundError):
            versions[name] = distribution(name).version
    in_order = {"graphpact": __version__, **dict(sorted(versions.items()))}
    return {
        name: (version, "; ".join(f"{k} {', '.join(names)}" for k, names in offers.get(name, {}).items()))
        for name, version in in_order.items()
    }


def installed_versions() -> dict[str, str]:
    """Return the versions of `installed_distributions`, by name."""
    return {name: version for name, (version, _) in installed_distributions().items()}


def _spellings(info: PluginInfo) -> set[str]:
    return {info.name, f"{info.kind}:{info.name}"}


def _installed() -> dict[PluginInfo, EntryPoint]:
    """Return every plugin of the distributions on ``sys.path``.

    A distribution that is installed twice counts once, as the first of its name. One with unreadable metadata
    is skipped with a warning in the log.
    """
    found: dict[PluginInfo, EntryPoint] = {}
    for any_dist in distributions():
        try:
            groups = any_dist.entry_points.groups
            for group in sorted(groups - _GROUPS.keys() - {CONTRACT_GROUP}):
                if near := difflib.get_close_matches(group, _GROUPS, n=1, cutoff=0.9):
                    _log.warning("%s: entry points in %r; did you mean %r?", any_dist.name, group, near[0])
            if not _GROUPS.keys() & groups:
                continue
            dist: Any = any_dist
            with suppress(PackageNotFoundError):  # its folder has another name than its metadata
                dist = distribution(any_dist.name)  # the first of this name
            offers = dist.entry_points
            contract = ", ".join(sorted(offers.select(group=CONTRACT_GROUP).names)) or None
            for e in offers:
                if kind := _GROUPS.get(e.group):
                    info = PluginInfo(kind, e.name, dist.name, dist.version, e.value, contract)
                    found[info] = e
        except Exception as error:  # noqa: BLE001  third-party metadata
            _log.warning("a distribution's metadata cannot be read: %s", describe_error(error))
    return found


def _load(info: PluginInfo, entry_point: EntryPoint) -> Plugin:
    stage = "importing"
    try:
        cls = entry_point.load()
        stage = "checking"
        reason = _fault(cls, info)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  SystemExit; the panics of Rust extensions
        reason = f"{stage} {info.target} raised {describe_error(error)}; {info.disabling}"
    return Loaded(info, cls) if reason is None else Rejected(info, reason)


def _fault(cls: Any, info: PluginInfo) -> str | None:
    """Return why the class or command of ``info`` is rejected, or None."""
    if info.kind == "command":
        return None if callable(cls) else f"refers to {cls!r}, which cannot be called"
    if info.kind == "adapter":
        return None if hasattr(cls, "lanes") else f"refers to {cls!r}, which has no lanes"
    base = getattr(graphpact, _BASES[info.kind]) if info.kind in _BASES else object
    reason = _class_fault(cls, base)
    if info.kind == "observer":
        reason = reason or observer_fault(cls)
    else:
        reason = reason or _hook_fault(cls) or _misspelt_name(cls)
    reason = reason or _argument_fault(cls, info.kind)
    if reason is None and info.kind == "graph_driver" and cls.name != info.name:
        return f"{cls.__name__}.name is {cls.name!r}; reports would name another driver"
    return reason


def _class_fault(cls: Any, base: type[Any]) -> str | None:
    """Return why ``cls`` cannot be built as a ``base``, or None."""
    if not isinstance(cls, type) or not issubclass(cls, base):
        what = f"class {cls.__name__}" if isinstance(cls, type) else type(cls).__name__
        return f"refers to a {what}, not to a class derived from {base.__module__}.{base.__name__}"
    lacks: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
    if lacks:
        return f"{cls.__name__} is abstract: it lacks {', '.join(sorted(lacks))}"
    required = [n for n, a in inspect.get_annotations(base).items() if "ClassVar" in str(a)]
    unset = [name for name in required if not hasattr(cls, name)]
    for each in (issubclass(cls, graphpact.AttentionBackend) and cls.providers) or ():
        is_provider = isinstance(each, type) and issubclass(each, graphpact.attention.KernelProvider)
        if not is_provider or getattr(each, "name", None) not in ("native", "compiled", "portable"):
            return f"{cls.__name__}.providers has {each!r}, none called native, compiled or portable"
    return f"{cls.__name__} does not set {', '.join(unset)}" if unset else None


def _misspelt_name(cls: type[Any]) -> str | None:
    """Return the fault of a public name of ``cls`` that is nearly one that it could override, or None."""
    for each in cls.__mro__:
        inherited = {name for base in each.__bases__ for name in dir(base)}
        own = {name for name in vars(each) if name[0] != "_"}
        for name in sorted(own - inherited):
            if near := misspelt(name, sorted(inherited - own)):
                return f"{each.__name__} has {name!r}, which nothing calls; did you mean {near!r}"
    return None


def _hook_fault(cls: type[Any]) -> str | None:
    """Return the fault of the hooks that ``cls`` implements, or None."""
    manager = pluggy.PluginManager(graphpact.hookspecs.PROJECT)
    manager.add_hookspecs(graphpact.hookspecs)
    hooks = [name for name in vars(manager.hook) if name[0] != "_"]
    of_cls = _Unbuilt(cls)
    try:
        manager.register(of_cls, name=f"{cls.__module__}.{cls.__qualname__}")
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        for caller in manager.get_hookcallers(of_cls) or ():
            if not caller.has_spec():
                near = did_you_mean(caller.name, hooks)
                hint = f"did you mean {near!r}" if near else f"hooks: {', '.join(hooks)}"
                return f"{cls.__name__} implements an unknown hook {caller.name!r}; {hint}"
        return " ".join(str(error).split())
    return None


def observer_fault(cls: type[Any]) -> str | None:
    """Return why objects of ``cls`` cannot observe a lane, or None.

    The class implements a hook that the contract does not have, no hook, or a hook without ``wrapper=True``.
    """
    if reason := _hook_fault(cls):
        return reason
    options = {
        name: opts
        for name in dir(cls)
        if (opts := getattr(inspect.getattr_static(cls, name), f"{graphpact.hookspecs.PROJECT}_impl", None))
    }
    if not options:
        return f"{cls.__name__} implements no hook"
    answers = sorted(name for name, opts in options.items() if not opts.get("wrapper"))
    if answers:
        return f"{cls.__name__}: an observer only wraps; {', '.join(answers)} lacks wrapper=True"
    return None


def _argument_fault(cls: type[Any], kind: Kind) -> str | None:
    """Return why a ``cls`` cannot be built with the arguments of its kind, or None."""
    given = {"observer": (), "graph_driver": ("device",)}.get(kind, ("context",))
    try:
        with suppress(ValueError):  # a class in C may have no signature
            inspect.signature(cls).bind(*given)
    except TypeError as error:
        return f"{cls.__name__} cannot be built with {given[0] if given else 'no argument'}: {error}"
    return None


class _Unbuilt:
    """The methods of a class, bound to the class, so that pluggy sees no ``self``.

    The class itself does not work: pluggy strips ``self`` only from functions defined in a class body.
    """

    def __init__(self, cls: type[Any]) -> None:
        for name in dir(cls):
            method = inspect.getattr_static(cls, name)
            if isinstance(method, staticmethod | classmethod):
                vars(self)[name] = getattr(cls, name)
            elif inspect.isfunction(method):
                vars(self)[name] = types.MethodType(method, cls)
