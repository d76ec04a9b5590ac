"""`PROOFS`: for each rule of the tiers, why a plugin that states it as done does not meet it.

Does not: import a plugin. What needs its class is in the results of the run (`PluginResults.traits`).
"""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from importlib_metadata import distribution
from packaging.requirements import InvalidRequirement, Requirement

from graphpact.errors import UsageError
from graphpact.files import read_file
from graphpact.plugins import PluginInfo
from graphpact_conformance.report.files import load_report
from graphpact_conformance.results import PluginResults
from graphpact_conformance.traits import HAS_INVARIANTS, HAS_PLAN, TWO_BODIES
from graphpact_conformance.xfails import Xfails


@dataclass(frozen=True)
class TierEvidence:
    """What a rule may look at.

    Args:
        info: The plugin.
        home: The folder of its package.
        results: Its results in the run.
        known: Its known failures.
        whole: Whether the run was whole: every rule, every lane, and not a quick one.
        file: The file that the statement names as its proof, if it names one.
    """

    info: PluginInfo
    home: Path
    results: PluginResults
    known: Xfails
    whole: bool
    file: Path | None

    @property
    def metadata(self) -> Any:
        """The metadata of its distribution."""
        return distribution(self.info.distribution)


class NotJudgedError(Exception):
    """Only a whole run of the suite, on another machine perhaps, shows whether a statement holds."""


def _declared(at: TierEvidence) -> str | None:
    if at.results.contract is None:
        return "its distribution has no entry point in the group graphpact.contract"
    needs = []
    for text in at.metadata.requires or ():
        try:
            needs.append(Requirement(text))
        except InvalidRequirement:
            return f"{text!r} is no requirement"
    ours = [need for need in needs if re.match(r"graphpact([-_.]|$)", need.name)]
    ends = ("<", "<=", "==", "~=")
    bounded = [need for need in ours if any(each.operator in ends for each in need.specifier)]
    always = {need.name for need in bounded if need.marker is None}  # these bound the ones of an extra too
    open_ended = [need for need in ours if need not in bounded and need.name not in always]
    return f"the requirement '{open_ended[0]}' has no upper bound" if open_ended else None


def _licensed(at: TierEvidence) -> str | None:
    found = at.metadata.metadata
    if not (found.get("License-Expression") or found.get("License") or found.get("License-File")):
        return "the metadata of its distribution has no licence"
    return None if _readme(at) else "the metadata of its distribution has no README"


def _conformant(at: TierEvidence) -> str | None:
    if any(result.counts_against for result in at.results.results):
        return "this run is not conformant"
    if not (at.whole and at.results.is_conformant):  # the latter where nothing could run on this machine
        raise NotJudgedError
    return None


def _documented(at: TierEvidence) -> str | None:
    if at.info.name not in _readme(at):
        return f"its README does not name {at.info.name}"
    without = list(_undocumented(at.home))
    more = f" and {len(without) - 1} more" if len(without) > 1 else ""
    return f"{without[0]}{more} has no docstring" if without else None


def _known_failures(at: TierEvidence) -> str | None:
    without = [entry.entry for entry in at.known.entries_of(at.results) if entry.issue is None]
    return f"{without[0]} names no issue" if without else None


def _proven(at: TierEvidence) -> str | None:
    if not at.whole:
        raise NotJudgedError
    unproven = [c.capability for c in at.results.claims if c.is_made and c.shown != "pass"]
    return f"no lane of the run proves {', '.join(unproven)}" if unproven else None


def _one_body(at: TierEvidence) -> str | None:
    if TWO_BODIES in at.results.traits:
        return "its replays fill metadata by another body than its captures; an exemption has to say why"
    return None


def _plan_invariants(at: TierEvidence) -> str | None:
    if HAS_PLAN in at.results.traits and HAS_INVARIANTS not in at.results.traits:
        return "it has a plan, and declares no `plan_invariants`"
    return None


def _gpu_run(at: TierEvidence) -> str | None:
    report = load_report(_file(at))
    ours = [p for p in report.plugins if (p.kind, p.name) == (at.info.kind, at.info.name)]
    if report.environment.device == "cpu":
        return f"{at.file} was made on a CPU"
    if not ours:
        return f"{at.file} has no results of {at.info.name}"
    for plugin in ours:
        if not plugin.is_conformant:
            return f"{at.file}: {plugin.label} is not conformant"
        if plugin.contract != at.results.contract:
            return f"{at.file} is of contract version {plugin.contract}, not {at.results.contract}"
    return None


def _recordings(at: TierEvidence) -> str | None:
    from graphpact.recording import read_recording  # noqa: PLC0415  torch, and only for such a statement

    read_recording(_file(at))
    return None


def _guarded(at: TierEvidence) -> str | None:
    try:
        document = json.loads(read_file(_file(at)))
        states: list[Any] = [state for state in document["tape"]["states"] if state is not None]
        guards = [state["guard"] for state in states]
        replays = sum(graph["replays"] for guard in guards for graph in guard["graphs"].values())
        faults = sum(len(guard["faults"]) for guard in guards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{at.file} is no report of an engine under the guard: {type(error).__name__}: {error}"
    if faults:
        return f"{at.file} has {faults} fault{'s' if faults > 1 else ''}"
    return None if replays else f"{at.file} has no replay that the guard checked"


PROOFS: dict[str, Callable[[TierEvidence], str | None]] = {
    "declared": _declared,
    "licensed": _licensed,
    "conformant": _conformant,
    "documented": _documented,
    "known-failures": _known_failures,
    "proven": _proven,
    "one-body": _one_body,
    "plan-invariants": _plan_invariants,
    "gpu-run": _gpu_run,
    "recordings": _recordings,
    "guarded": _guarded,
}
"""By rule: returns why a plugin does not meet it, or None. They raise `NotJudgedError`."""


def _readme(at: TierEvidence) -> str:
    found = at.metadata.metadata
    return str(found.get("Description") or found.get_payload() or "")


def _file(at: TierEvidence) -> Path:
    """Return the file of a proof, which is in the package.

    Raises:
        UsageError: It leads out of the package.
    """
    assert at.file is not None  # noqa: S101  `statements` asks for it
    file = (at.home / at.file).resolve()
    if not file.is_relative_to(at.home.resolve()):
        raise UsageError(f"{at.file} is not in the package", hint="a wheel has only files of the package")
    return file


def _undocumented(home: Path) -> Iterator[str]:
    """Yield the public modules, classes and functions of a package that have no docstring."""
    for file in sorted(home.rglob("*.py")) if home.is_dir() else [home]:
        relative = file.relative_to(home.parent if home.is_file() else home)
        if any(part.startswith("_") and part != "__init__.py" for part in relative.parts):
            continue
        tree = ast.parse(read_file(file))
        if ast.get_docstring(tree) is None:
            yield f"{relative}"
        yield from (f"{relative}: {name}" for name in _without(tree, ""))


def _without(node: ast.AST, outer: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name.startswith("_") or any(map(_shares_docstring, child.decorator_list)):
                continue
            if ast.get_docstring(child) is None:
                yield f"{outer}{child.name}"
            if isinstance(child, ast.ClassDef):
                yield from _without(child, f"{outer}{child.name}.")


def _shares_docstring(decorator: ast.expr) -> bool:
    """Return whether a function with this decorator has its docstring elsewhere: a setter, an overload."""
    name = decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
    return name in ("setter", "deleter", "overload")
