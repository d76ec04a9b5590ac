"""Names of plugins as the targets of a run: `targets`.

Does not: load a plugin, except to see whether two of them make a pair.
"""

from collections.abc import Sequence

from graphpact.errors import UnknownPluginError, UsageError, did_you_mean
from graphpact.plugins import KINDS, PluginCatalog
from graphpact_conformance.draws.cases import declares_graphs
from graphpact_conformance.suite.adapter import adapter_of
from graphpact_conformance.target_kinds import PREFIXES, TARGET_KINDS, TargetKind
from graphpact_conformance.targets import Target


def targets(names: Sequence[str], catalog: PluginCatalog) -> list[Target]:
    """Return the plugins with the given names, and every pair of backend and runner.

    Args:
        names: Names of plugins, ``name`` or ``kind:name``; ``driver`` is short for ``graph_driver``. Code of
            another engine: ``adapter:NAME:package.module:factory``.
        catalog: The installed plugins.

    Raises:
        UnknownPluginError: No plugin of a kind that is checked has that name.
        PluginError: The plugin is rejected, or two distributions offer it.
    """
    found: list[Target] = []
    for name in dict.fromkeys(names):
        if name.startswith(OF_ADAPTER):
            found.append(_of_adapter(name, catalog))
            continue
        kind, bare = _kind_of(name, catalog)
        catalog.select(kind, bare)
        if Target(kind, bare) not in found:
            found.append(Target(kind, bare))
    backends = [t for t in found if t.kind == "attention_backend"]
    runners = [t for t in found if t.kind == "runner"]
    pairs = [
        Target("attention_backend", b.name, r.name)
        for b in backends
        for r in runners
        if _can_pair(catalog, b.name, r.name)
    ]
    others = [t for t in found if t.kind in PREFIXES or t.kind == "adapter"]
    return [*backends, *runners, *pairs, *others]


OF_ADAPTER = "adapter:"
"""How the name of an adapter's target begins: ``adapter:NAME`` or ``adapter:NAME:package.module:factory``."""


def _of_adapter(name: str, catalog: PluginCatalog) -> Target:
    adapter, _, reference = name.removeprefix(OF_ADAPTER).partition(":")
    target = Target("adapter", reference or adapter, adapter=adapter)
    adapter_of(target, catalog)
    return target


def _kind_of(name: str, catalog: PluginCatalog) -> tuple[TargetKind, str]:
    asked, _, bare = name.rpartition(":")
    if asked:
        asked = "graph_driver" if asked == "driver" else asked
        for kind in TARGET_KINDS:
            if asked == kind:
                return kind, bare
        raise _cannot_check(name, asked)
    offers = [kind for kind in TARGET_KINDS if any(i.name == name for i in catalog.infos(kind))]
    if len(offers) == 1:
        return offers[0], name
    if offers:
        raise UsageError(
            f"{name!r} is the name of " + " and of ".join(_A_PLUGIN[kind] for kind in offers),
            hint="write " + " or ".join(f"{kind}:{name}" for kind in offers),
        )
    others = [kind for kind in KINDS if any(i.name == name for i in catalog.infos(kind))]
    if others:
        raise _cannot_check(name, others[0])
    there = [info for kind in TARGET_KINDS for info in catalog.infos(kind)]
    near = did_you_mean(name, [info.name for info in there])
    raise UnknownPluginError(
        f"no {_KINDS_IN_WORDS} {name!r}; installed: " + (", ".join(str(info) for info in there) or "none"),
        hint=f"did you mean {near!r}?" if near else "`graphpact plugins` lists what is installed",
    )


_A_PLUGIN: dict[TargetKind, str] = {
    "attention_backend": "an attention backend",
    "runner": "a runner",
    "graph_driver": "a graph driver",
    "speculation": "a speculation algorithm",
    "observer": "an observer",
    "adapter": "an adapter",
}
_NOUNS = [_A_PLUGIN[kind].partition(" ")[2] for kind in TARGET_KINDS]
_KINDS_IN_WORDS = f"{', '.join(_NOUNS[:-1])} or {_NOUNS[-1]}"


def _cannot_check(name: str, kind: str) -> UsageError:
    """Return the error for a plugin of a kind that the suite does not check by its name alone."""
    if kind == "adapter":
        return UsageError(f"{name!r} is code of another engine", hint=f"graphpact check --adapter {name}")
    hint = f"these are checked: {_KINDS_IN_WORDS}; give the name of one"
    if kind not in KINDS:
        kinds = [PREFIXES.get(each, each) for each in TARGET_KINDS]
        hint = f"write KIND:NAME, with the kind {', '.join(kinds[:-1])} or {kinds[-1]}"
    return UsageError(f"{name!r}: plugins of kind {kind!r} cannot be checked", hint=hint)


def _can_pair(catalog: PluginCatalog, backend: str, runner: str) -> bool:
    """Return whether an engine gives this runner and this backend to one lane, for graphs."""
    served = catalog.select("runner", runner)
    can = catalog.select("attention_backend", backend).capabilities
    captures = declares_graphs(served) and can.graph_support.covers(served.needs)
    return bool(served.modes & can.modes) and captures
