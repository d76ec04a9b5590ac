"""Known failures of a plugin: ``xfails.toml`` in the plugin's package, shipped in its wheel.

    [[xfail]]
    rule = "GP07"                                # id or name of a rule
    reason = "the draft stride is packed anew"   # required
    lane = "draft_extend*"                       # a pattern; optional: every lane
    plugin = "my_backend"                        # or "runner:NAME", "driver:NAME", ..; optional: the only one
    issue = "https://example.org/issues/7"       # optional

The list is strict: a listed failure is an xfail, a rule that passes in all lanes of an entry is an xpass, and
an entry without results is a failure. The last two are judged only by a run that includes all lanes of the
entry.

Does not: excuse failures without a rule (a crash, a hang, output), or read a list outside the plugin's
package.
"""

import importlib.util
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from graphpact.errors import UsageError, did_you_mean
from graphpact.files import read_file
from graphpact.plugins import PluginCatalog, PluginInfo
from graphpact_conformance.results import Finding, Outcome, PluginResults, Result
from graphpact_conformance.rules import find_rule
from graphpact_conformance.target_kinds import LANE_KINDS, PREFIXES, TARGET_KINDS
from graphpact_conformance.targets import FAIL_FAST, Options, Target

FILE = "xfails.toml"
_KEYS = ("rule", "reason", "lane", "plugin", "issue")
_REQUIRED = ("rule", "reason")


@dataclass(frozen=True, slots=True)
class Xfail:
    """An entry: a rule that a plugin is known to fail.

    Args:
        kind: Kind of the plugin.
        name: Name of the plugin.
        rule: Id of the rule.
        lane: A pattern (`fnmatch.fnmatchcase`) of lane names.
        reason: Why it fails.
        issue: Address of the issue.
        entry: File and number of the entry, for messages.
    """

    kind: str
    name: str
    rule: str
    lane: str
    reason: str
    issue: str | None
    entry: str

    def concerns(self, target: Target | PluginResults) -> bool:
        """Whether the plugin is the target or its partner."""
        sides = {(target.kind, target.name), ("runner", target.partner)}
        return (self.kind, self.name) in sides

    def covers(self, result: Result) -> bool:
        """Whether the entry has the rule and the lane of ``result``."""
        return result.rule == self.rule and fnmatchcase(result.lane, self.lane)


class Xfails:
    """The known failures of the plugins of one run.

    Args:
        entries: The entries, in the order of plugins and files.
    """

    def __init__(self, entries: Iterable[Xfail]) -> None:
        self._entries = tuple(entries)

    @classmethod
    def read(cls, targets: Iterable[Target], catalog: PluginCatalog) -> "Xfails":
        """Return the known failures of ``targets``, from their packages, without an import.

        Raises:
            UsageError: A file is not valid TOML, or an entry is invalid.
        """
        asked = {(target.kind, target.name) for target in targets}
        infos = [info for info in catalog.infos() if (info.kind, info.name) in asked]
        files: dict[Path, PluginInfo] = {}
        for info in infos:
            home = plugin_home(info.target)
            if home is not None and (file := home / FILE).is_file():
                files.setdefault(file, info)
        entries = (e for file, info in files.items() for e in _read(file, info, catalog))
        return cls(entry for entry in entries if (entry.kind, entry.name) in asked)

    def entries_of(self, plugin: PluginResults) -> list[Xfail]:
        """Return the entries of one plugin."""
        return [entry for entry in self._entries if (entry.kind, entry.name) == (plugin.kind, plugin.name)]

    def expect(self, target: Target, result: Result) -> Result:
        """Return ``result``, as an xfail if it is a listed failure."""
        if result.outcome is not Outcome.FAIL:
            return result
        for entry in self._entries:
            if entry.concerns(target) and entry.covers(result):
                reason = entry.reason + (f" ({entry.issue})" if entry.issue else "")
                if result.reason:  # an error of the suite in another experiment
                    reason += f"; {result.reason}"
                return result.model_copy(update={"outcome": Outcome.XFAIL, "reason": reason})
        return result

    def lists(self, target: Target, rule: str, lane: str) -> bool:
        """Return whether the failure of a rule in a lane is a known one."""
        return any(
            entry.concerns(target) and entry.rule == rule and fnmatchcase(lane, entry.lane)
            for entry in self._entries
        )

    def judge(self, plugins: Sequence[PluginResults], options: Options) -> list[PluginResults]:
        """Return the results of a whole run, with xpasses and with a failure for each stale entry.

        Args:
            plugins: Results after `expect`.
            options: Options of the run. A run of selected lanes has no xpass, and a narrowed run reports no
                stale entry.
        """
        narrowed = bool(options.only or options.lanes) or options.size == "quick"
        judged = list(plugins)
        for entry in self._entries:
            where = [i for i, plugin in enumerate(plugins) if entry.concerns(plugin)]
            results = [result for i in where for result in plugins[i].results]
            covered = [result for result in results if entry.covers(result)]
            if any(result.outcome is Outcome.ERROR or result.check in _CUTS for result in results):
                continue  # the run was incomplete
            fails = any(result.outcome is Outcome.XFAIL for result in covered)
            if not covered and not narrowed:
                first = judged[where[0]]
                updated = [*first.results, _stale(entry)]
                judged[where[0]] = first.model_copy(update={"results": updated})
            elif not fails and not options.lanes:
                for i in where:
                    updated = [_xpass(entry, result) for result in judged[i].results]
                    judged[i] = judged[i].model_copy(update={"results": updated})
        return judged


_CUTS = ("ends", FAIL_FAST)
"""Checks whose results say that a run was incomplete."""


def plugin_home(target: str) -> Path | None:
    """Return the location of a plugin's code: its outermost package, or its module outside packages.

    Namespace packages, which distributions may share, are skipped. No import.

    Args:
        target: Value of its entry point, ``module:attribute``.

    Returns:
        A folder, or the file of a module outside packages; None if not found.
    """
    parts = target.partition(":")[0].strip().split(".")
    try:
        spec = importlib.util.find_spec(parts[0])
    except ValueError:  # a module object without a spec
        return None
    for end in range(2, len(parts) + 1):
        if spec is None or spec.origin is not None:
            break
        spec = PathFinder.find_spec(".".join(parts[:end]), spec.submodule_search_locations)
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    return origin if spec.submodule_search_locations is None else origin.parent


def _xpass(entry: Xfail, result: Result) -> Result:
    if not entry.covers(result) or result.outcome is not Outcome.PASS:
        return result
    reason = f"passes, but {entry.entry} lists it as a failure ({entry.reason}): remove the entry"
    return result.model_copy(update={"outcome": Outcome.XPASS, "reason": reason})


def _stale(entry: Xfail) -> Result:
    finding = Finding(
        rule=None,
        hook=None,
        field=entry.entry,
        expected="each entry names a rule and a lane that the suite checks",
        actual=f"no lane of {entry.name} that matches {entry.lane!r} checks {entry.rule}",
        help="remove the entry, or fix its lane",
    )
    return Result(rule=None, check="xfails", lane=entry.lane, outcome=Outcome.FAIL, findings=[finding])


# -- the file ------------------------------------------------------------------------------------


def _read(file: Path, info: PluginInfo, catalog: PluginCatalog) -> list[Xfail]:
    try:
        document = tomllib.loads(read_file(file).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}") from None
    tables = document.pop("xfail", [])
    if document:
        raise UsageError(f"{file}: unknown key {next(iter(document))!r}", hint="use only [[xfail]]")
    if not isinstance(tables, list):
        raise UsageError(f"{file}: xfail is not an array of tables", hint="write [[xfail]]")
    wheel = [
        other
        for other in catalog.infos()
        if other.distribution == info.distribution and other.kind in TARGET_KINDS
    ]
    return [_entry(file, number, table, wheel) for number, table in enumerate(tables, 1)]


def _entry(file: Path, number: int, table: Any, wheel: Sequence[PluginInfo]) -> Xfail:
    at = f"{file}, entry {number}"
    if not isinstance(table, dict):
        raise UsageError(f"{at} is not a table", hint="write [[xfail]]")
    for key, value in table.items():
        if key not in _KEYS:
            near = did_you_mean(key, _KEYS)
            hint = f"did you mean {near!r}?" if near else f"the keys are {', '.join(_KEYS)}"
            raise UsageError(f"{at}: unknown key {key!r}", hint=hint)
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{at}: {key} = {value!r} is not a string, or empty")
    for key in _REQUIRED:
        if key not in table:
            raise UsageError(f"{at} has no {key}", hint=f'write {key} = "..."')
    try:
        rule = find_rule(table["rule"]).id
        info = _plugin(table.get("plugin"), wheel)
    except UsageError as error:
        raise UsageError(f"{at}: {error.message}", hint=error.hint) from None
    return Xfail(
        kind=info.kind,
        name=info.name,
        rule=rule,
        lane=table.get("lane", "*"),
        reason=table["reason"],
        issue=table.get("issue"),
        entry=f"{file.parent.name}/{file.name}, entry {number},",
    )


def _plugin(named: str | None, wheel: Sequence[PluginInfo]) -> PluginInfo:
    """Return the plugin of an entry, among those of its distribution.

    Without a name it is the only backend or runner; if there is none, the only plugin of another kind.
    """
    spellings = {f"{_prefix(info.kind)}:{info.name}": info for info in wheel}
    lanes = [info for info in wheel if info.kind in LANE_KINDS]
    fit = [i for s, i in spellings.items() if named in (s, i.name, f"{i.kind}:{i.name}")]
    if named is None:
        fit = lanes or list(wheel)
    if len(fit) == 1:
        return fit[0]
    near = did_you_mean(named or "", [info.name for info in wheel])
    raise UsageError(
        "plugin is missing" if named is None else f"plugin = {named!r} is unknown or ambiguous",
        hint=f"did you mean {near!r}?" if near and not fit else f"use one of {', '.join(spellings)}",
    )


def _prefix(kind: str) -> str:
    """Return how names of a kind begin."""
    return next((prefix for known, prefix in PREFIXES.items() if known == kind), kind)
