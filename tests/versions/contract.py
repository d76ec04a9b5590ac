"""What the contract has, read from the core's sources, and what a later version may change of it.

    PYTHONPATH=tests python -m versions     writes contract_next.json, or says what is no addition

``contract_v1.json`` and those after it are never edited: each lists what its version added.
``contract_next.json`` lists what came since the newest of them, for the next version
(docs/reference/versions.md).

Does not: read what methods do; the suite's rules are about that.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from graphpact.plugins import GROUPS
from graphpact_cli.releases.sources import Source
from graphpact_cli.releases.surface import Member, Surface, read_surface
from graphpact_conformance.rules import RULES

FOLDER = Path(__file__).parent
CORE = FOLDER.parents[1] / "core"
NEXT = FOLDER / "contract_next.json"

OVERRIDDEN: Surface = {
    "graphpact.attention": ("AttentionBackend", "KernelProvider"),
    "graphpact.runners": ("GraphRunner", "DecodeRunner"),
    "graphpact.graphs": ("GraphDriver", "Graph", "Event", "Stream"),
    "graphpact.speculation": ("SpeculationAlgorithm",),
    "graphpact.engines": ("EngineOffer",),
}
"""The base classes of plugins, whose methods plugins override: an argument more would break an override."""

GIVEN: Surface = {
    "graphpact.attention": (
        *("BackendContext", "Buffers", "Capabilities", "DraftLimits", "DraftMetadata", "GraphSupport"),
        *("HeadLayout", "KVBuffers", "LayerSpec", "Limits", "each_step", "kv_tensors", "new_kv"),
    ),
    "graphpact.batch": ("ForwardBatch", "ForwardMode"),
    "graphpact.buffers": (
        *("BoundSlot", "CudaGraphBufferRegistry", "FillContext", "GraphSlot", "PaddingPolicy"),
        *("SharedBuffers", "input_slots", "metadata_slot"),
    ),
    "graphpact.errors": ("GraphpactError", "ContractError", "EngineError", "ConfigError", "CaptureError"),
    "graphpact.graphs": ("DeclaredMemory", "EagerCall", "Ownership", "TaskKey", "declare_kernel"),
    "graphpact.lane": ("CapturedShape", "Lane", "PreparedStep"),
    "graphpact.pact": ("Pact", "bounded", "updated"),
    "graphpact.runners": ("RunnerContext", "dummy_batch"),
    "graphpact.shapes": ("CaptureSizes", "EagerReason", "GraphShape"),
    "graphpact.speculation": (*("DecodeStep", "ExtendStep", "LaneRole", "SpeculationContext", "Verified"),),
    "graphpact.step": ("Attend", "Forward", "RegionContext", "StepOutputs"),
}
"""What plugins get and use: they pass arguments of today, and read fields of today."""

HOOKS: Surface = {
    "graphpact.hookspecs": (
        *("populate", "prepare_replay", "init_metadata_capture", "init_metadata_replay"),
        *("run_step", "launch", "capture", "engine_phase"),
    )
}
"""The hooks. pluggy passes to each implementation the arguments that it names."""

Members = dict[str, Member]


def read_contract(core: Path = CORE) -> Members:
    """Return the members of the contract by name, from the sources in the folder ``core``."""
    source = Source(f"{core}", core, "graphpact")
    return {n: m for surface in (HOOKS, OVERRIDDEN, GIVEN) for n, m in read_surface(source, surface).items()}


def read_lists() -> Members:
    """Return the groups of entry points and the rules, as members."""
    groups = [Member(f"group {group}", "group", (kind,)) for group, kind in GROUPS.items()]
    rules = [Member(f"rule {rule.id}", "rule", (rule.name, rule.level)) for rule in RULES.values()]
    return {member.name: member for member in (*groups, *rules)}


def released() -> dict[int, Members]:
    """Return what each released version added, by its number."""
    files = {int(file.stem.removeprefix("contract_v")): file for file in FOLDER.glob("contract_v*.json")}
    return {version: load(files[version]) for version in sorted(files)}


def load(file: Path) -> Members:
    """Return the members in a file."""
    rows = json.loads(file.read_text(encoding="utf-8"))
    return {
        row["name"]: Member(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
        for row in rows
    }


def dump(members: Iterable[Member]) -> str:
    """Return the text of a file, with a member in each line."""
    lines = [json.dumps(asdict(member)) for member in members]
    return "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"


def merged(versions: Iterable[Members]) -> Members:
    """Return the members of a contract, from what each version added."""
    return {name: member for version in versions for name, member in version.items()}


def additions(before: Members, now: Members) -> Members:
    """Return the members that ``now`` adds or extends."""
    return {name: member for name, member in now.items() if before.get(name) != member}


def breaches(before: Members, now: Members) -> Iterator[str]:
    """Yield, in words, each difference that is no addition."""
    for name, old in before.items():
        new = now.get(name)
        if new is None:
            yield f"{name} is gone: deprecate it, and keep it"
        elif old.kind != new.kind or (old.kind in ("field", "group", "rule") and old.parts != new.parts):
            yield f"{name} was {_form(old)} and is {_form(new)}: keep it, and add another"
        elif set(old.marks) != set(new.marks):
            yield f"{name} was {_form(old)} and is {_form(new)}: callers and overrides depend on it"
        else:
            yield from _parameters(old, new)
    owners = {_owner(name) for name in before}
    for name in now:
        if name in before:
            continue
        if now[name].kind == "method" and _owner(name) in owners and "abstractmethod" in now[name].marks:
            yield f"{name} is new and abstract: give it a body, which plugins of today then have"
        if now[name].kind == "field" and _owner(name) in owners and not _has_default(now[name]):
            yield f"{name} is new and has no default: code that makes a {_owner(name)} does not give it"
    yield from _reordered(before, now)


def _parameters(old: Member, new: Member) -> Iterator[str]:
    """Yield what breaks in the parameters of a function or a method."""
    if old.parts == new.parts:
        return
    if new.parts[: len(old.parts)] != old.parts:
        yield f"{old.name} took {_form(old)} and takes {_form(new)}: parameters are only added, at the end"
    elif _owner(old.name) in _names(OVERRIDDEN):
        yield f"{old.name} takes {_form(new)}: plugins override it without that; add a method or a field"
    elif old.name not in _names(HOOKS):  # a hook's implementation need not name it
        bare = [part for part in new.parts[len(old.parts) :] if "=" not in part and not part.startswith("*")]
        yield from (f"{old.name}: the new parameter {part} has no default" for part in bare)


def _reordered(before: Members, now: Members) -> Iterator[str]:
    """Yield the classes whose fields have another order, which positional arguments follow."""
    fields = {name: member for name, member in before.items() if member.kind == "field"}
    for owner in dict.fromkeys(map(_owner, fields)):
        old = [name for name in fields if _owner(name) == owner]
        new = [name for name, member in now.items() if member.kind == "field" and _owner(name) == owner]
        if all(name in now for name in old) and new[: len(old)] != old:
            yield f"the fields of {owner} have another order: add new ones at the end"


def _form(member: Member) -> str:
    return " ".join([*member.marks, f"({', '.join(member.parts)})" if member.parts else member.kind])


def _has_default(member: Member) -> bool:
    """Whether a field has a default; the value of an enumeration counts as one."""
    return member.parts[-1] == "has a default" or member.parts[0].startswith("=")


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _names(surface: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {f"{module}.{name}" for module, names in surface.items() for name in names}


def main() -> str | None:
    """Write what the next version adds; return what is no addition."""
    before, now = merged(released().values()), read_contract() | read_lists()
    if broken := [*breaches(before, now)]:
        return "\n".join(broken)
    NEXT.write_text(dump(additions(before, now).values()), encoding="utf-8")
    return None
