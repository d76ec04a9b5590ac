"""Failures that a plugin's author knows: ``xfails.toml`` in the plugin's package, shipped in its wheel.

    [[xfail]]
    rule = "GP07"                                # id or name of a rule
    reason = "the draft stride is packed anew"   # required
    lane = "draft_extend*"                       # a pattern; left out: every lane
    plugin = "my_backend"                        # or "runner:my_runner"; left out: the only one
    issue = "https://example.org/issues/7"       # may be left out

The list is strict: a failure that it names is an xfail, a rule that passes in every lane that an entry
covers is an xpass, and an entry that covers nothing is a failure of its own. The last two are judged
only by a run that looked wherever the entry could have failed.

Does not: excuse what is no rule's failure (a crash, a hang, noise), or take a list from anywhere but
the plugin's package.
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
from graphpact.plugins import PluginCatalog, PluginInfo
from graphpact_conformance.results import Finding, Outcome, PluginResults, Result
from graphpact_conformance.rules import find_rule
from graphpact_conformance.suite import Options, Target

FILE = "xfails.toml"
_KEYS = ("rule", "reason", "lane", "plugin", "issue")
_REQUIRED = ("rule", "reason")


@dataclass(frozen=True, slots=True)
class Xfail:
    """One entry: a rule that a plugin is known to fail.

    Args:
        kind: What the plugin is.
        name: Its name.
        rule: Id of the rule.
        lane: A pattern (`fnmatch.fnmatchcase`) of lane names.
        reason: Why it fails.
        issue: Where that is followed up.
        entry: Which entry of which file it is, for messages.
    """

    kind: str
    name: str
    rule: str
    lane: str
    reason: str
    issue: str | None
    entry: str

    def concerns(self, target: Target | PluginResults) -> bool:
        """Whether the plugin is what was examined, or its partner."""
        sides = {(target.kind, target.name), ("runner", target.partner)}
        return (self.kind, self.name) in sides

    def covers(self, result: Result) -> bool:
        """Whether the entry speaks of the rule and the lane of ``result``."""
        return result.rule == self.rule and fnmatchcase(result.lane, self.lane)


class Xfails:
    """What the plugins of one run are known to fail.

    Args:
        entries: In the order of the plugins and of their files.
    """

    def __init__(self, entries: Iterable[Xfail]) -> None:
        self._entries = tuple(entries)

    @classmethod
    def read(cls, targets: Iterable[Target], catalog: PluginCatalog) -> "Xfails":
        """Return what the packages of ``targets`` list of the plugins that are targets. Imports nothing.

        Raises:
            UsageError: A list that is no TOML, or an entry that is not as the module's docstring says.
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

    def expect(self, target: Target, result: Result) -> Result:
        """Return ``result``, as an xfail where it is a failure that is listed."""
        if result.outcome is not Outcome.FAIL:
            return result
        for entry in self._entries:
            if entry.concerns(target) and entry.covers(result):
                reason = entry.reason + (f" ({entry.issue})" if entry.issue else "")
                return result.model_copy(update={"outcome": Outcome.XFAIL, "reason": reason})
        return result

    def judge(self, plugins: Sequence[PluginResults], options: Options) -> list[PluginResults]:
        """Return the results of a whole run, with xpasses and with a failure for each stale entry.

        Args:
            plugins: As `expect` left them.
            options: What was asked for: a run that was narrowed to lanes makes no xpass, and one that
                was narrowed at all calls no entry stale.
        """
        narrowed = bool(options.only or options.lanes) or options.size == "quick"
        judged = list(plugins)
        for entry in self._entries:
            where = [i for i, plugin in enumerate(plugins) if entry.concerns(plugin)]
            results = [result for i in where for result in plugins[i].results]
            covered = [result for result in results if entry.covers(result)]
            if any(result.outcome is Outcome.ERROR or result.check == "ends" for result in results):
                continue  # not all was looked at
            fails = any(result.outcome is Outcome.XFAIL for result in covered)
            if not covered and not narrowed:
                first = judged[where[0]]
                told = [*first.results, _stale(entry)]
                judged[where[0]] = first.model_copy(update={"results": told})
            elif not fails and not options.lanes:
                for i in where:
                    told = [_xpass(entry, result) for result in judged[i].results]
                    judged[i] = judged[i].model_copy(update={"results": told})
        return judged


def plugin_home(target: str) -> Path | None:
    """Return where the code of a plugin lies: its outermost package, or its module where it has none.

    A namespace package, which many distributions may share, is passed over. Imports nothing.

    Args:
        target: What its entry point refers to, as ``module:attribute``.

    Returns:
        A folder, or the file of a module that is in no package; None where none can be found.
    """
    parts = target.partition(":")[0].strip().split(".")
    try:
        spec = importlib.util.find_spec(parts[0])
    except ValueError:  # a module that somebody made by hand
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
    reason = f"passes, though {entry.entry} says that it fails ({entry.reason}): remove the entry"
    return result.model_copy(update={"outcome": Outcome.XPASS, "reason": reason})


def _stale(entry: Xfail) -> Result:
    finding = Finding(
        rule=None,
        hook=None,
        field=entry.entry,
        expected="each entry names a rule and a lane that the suite looks at",
        actual=f"{entry.rule} is looked at in no lane of {entry.name} that is called {entry.lane!r}",
        help="remove the entry, or mend its lane",
    )
    return Result(
        rule=None, check="xfails", lane=entry.lane, outcome=Outcome.FAIL, findings=[finding]
    )


# -- the file ------------------------------------------------------------------------------------


def _read(file: Path, info: PluginInfo, catalog: PluginCatalog) -> list[Xfail]:
    try:
        document = tomllib.loads(file.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} is no TOML that can be read: {error}") from None
    tables = document.pop("xfail", [])
    if document:
        raise UsageError(
            f"{file}: unknown key {next(iter(document))!r}", hint="use [[xfail]] alone"
        )
    if not isinstance(tables, list):
        raise UsageError(f"{file}: xfail is no array of tables", hint="write [[xfail]]")
    wheel = [
        other
        for other in catalog.infos()
        if other.distribution == info.distribution and other.kind != "graph_driver"
    ]
    return [_entry(file, number, table, wheel) for number, table in enumerate(tables, 1)]


def _entry(file: Path, number: int, table: Any, wheel: Sequence[PluginInfo]) -> Xfail:
    at = f"{file}, entry {number}"
    if not isinstance(table, dict):
        raise UsageError(f"{at} is no table", hint="write [[xfail]]")
    for key, value in table.items():
        if key not in _KEYS:
            near = did_you_mean(key, _KEYS)
            hint = f"did you mean {near!r}?" if near else f"the keys are {', '.join(_KEYS)}"
            raise UsageError(f"{at}: unknown key {key!r}", hint=hint)
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{at}: {key} = {value!r} is no text, or an empty one")
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
    """Return the plugin of the distribution that an entry speaks of."""
    spellings = {f"{info.kind}:{info.name}": info for info in wheel}
    fit = [i for s, i in spellings.items() if named is None or named in (s, i.name)]
    if len(fit) == 1:
        return fit[0]
    near = did_you_mean(named or "", [info.name for info in wheel])
    raise UsageError(
        "names no plugin" if named is None else f"plugin = {named!r} is none, or not the only one",
        hint=f"did you mean {near!r}?"
        if near and not fit
        else f"say one of {', '.join(spellings)}",
    )
