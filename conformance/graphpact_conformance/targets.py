"""`Target`, the plugin that a run checks; `Options` and `Listener` of the run.

Does not: find plugins, or check them; see `graphpact_conformance.suite` and `graphpact_conformance.drivers`.
"""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from graphpact.plugins import PluginCatalog, PluginInfo
from graphpact_conformance.results import Outcome, PluginResults, Result
from graphpact_conformance.target_kinds import PREFIXES, TargetKind

Size = Literal["quick", "normal", "thorough"]
Kernels = Literal["auto", "native", "compiled", "portable"]
"""The names of `graphpact.attention.ProviderName`: this module is imported where torch is not."""

TIMEOUT = 120.0
"""Seconds for one piece of work."""
TIMEOUT_VARIABLE = "GRAPHPACT_CHECK_TIMEOUT"
"""Environment variable: timeout of one piece of work, in seconds."""

FAIL_FAST = "fail-fast"
"""The check of the result for what a run with `Options.fail_fast` left out."""
IsKnown = Callable[[str, str], bool]
"""``(rule, lane) -> bool``: whether the failure of a rule in a lane is a known one, which ends no run."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run.

    Args:
        seed: Seed of all random batches.
        examples: Sequences of batches for each experiment that repeats, in a plain lane of a single plugin.
            Pairs and lanes with unusual values have half, unless the run is thorough; a quick run has one.
        size: Number of lanes: quick, normal or thorough.
        only: Ids of rules; empty for all.
        lanes: `fnmatch` patterns of lane names; empty for all.
        device: ``"cpu"`` or ``"cuda"``.
        strict: Whether missing proof counts as a failure; see `graphpact_conformance.results.Report`.
        shrink: Whether to search for a smaller failing batch.
        all_findings: Whether to keep every finding, also several of one field, and more than 8 of a rule.
        scenario: File of recorded steps; the lanes are then those of the file.
        kernels: Kernel provider of the checked backends.
        probe: Whether to look only for values that code of another engine reads and its adapter lacks.
        ranks: Number of processes that step together in additional lanes; None for no such lanes.
        fail_fast: Whether the run of a plugin ends at the first finding that names a rule.
    """

    seed: int = 0
    examples: int = 2
    size: Size = "normal"
    only: frozenset[str] = frozenset()
    lanes: tuple[str, ...] = ()
    device: str = "cpu"
    strict: bool = False
    shrink: bool = True
    all_findings: bool = False
    scenario: str | None = None
    kernels: Kernels = "auto"
    probe: bool = False
    ranks: int | None = None
    fail_fast: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A plugin to check, alone or with a partner.

    Args:
        kind: Kind of the plugin.
        name: Name of the plugin; of an adapter's target the reference ``package.module:factory``, or the name
            of the adapter if that has its own factory.
        partner: The runner of a pair; None for a plugin alone.
        adapter: Name of the adapter; None for a plugin.
    """

    kind: TargetKind
    name: str
    partner: str | None = None
    adapter: str | None = None

    @property
    def plugin(self) -> tuple[str, str]:
        """Kind and name of the plugin that has the entry point."""
        return self.kind, self.name if self.adapter is None else self.adapter

    def infos(self, catalog: PluginCatalog) -> list[PluginInfo]:
        """Return the metadata of the plugin that has the entry point, and of the partner, if there is one."""
        asked: list[tuple[str, str]] = [self.plugin]
        if self.partner is not None:
            asked.append(("runner", self.partner))
        found: dict[tuple[str, str], PluginInfo] = {(i.kind, i.name): i for i in catalog.infos()}
        return [found[each] for each in asked]

    def results(self, info: PluginInfo, device: str, **found: Any) -> PluginResults:
        """Return its results object, without results.

        Args:
            info: Its metadata.
            device: Device of the lanes.
            found: More fields of `PluginResults`.
        """
        return PluginResults(
            kind=self.kind,
            name=self.name,
            distribution=info.distribution,
            version=info.version,
            contract=info.contract,
            partner=self.partner,
            device=device,
            **found,
        )

    def __str__(self) -> str:
        return self.name if self.partner is None else f"{self.name} + {self.partner}"

    @property
    def names(self) -> str:
        """Its names as arguments of ``graphpact check``."""
        if self.adapter is not None:
            return f"--adapter {self.adapter}" + ("" if self.name == self.adapter else f" {self.name}")
        if self.kind in PREFIXES:
            return f"{PREFIXES[self.kind]}:{self.name}"
        if self.kind == "runner":
            return f"runner:{self.name}"
        return self.name if self.partner is None else f"{self.name} runner:{self.partner}"


class Listener(Protocol):
    """Callbacks of a run."""

    def begins(self, work: str) -> None:
        """Called before each piece of work."""

    def found(self, result: Result) -> None:
        """Called with each result."""


def ended_early() -> Result:
    """Return the result for the part of a plugin's run that ``fail_fast`` left out."""
    return Result(
        rule=None,
        check=FAIL_FAST,
        lane="the rest",
        outcome=Outcome.NOT_RUN,
        reason="the run ended at the first broken rule (--fail-fast)",
    )


def reproduce_line(names: str, only: Iterable[str], lane: str, options: Options) -> str:
    """Return the command that reproduces a finding.

    Args:
        names: Names of the plugins.
        only: Ids of rules; empty for all.
        lane: Name of the lane.
        options: Options of the run.
    """
    line = f"graphpact check {names}" + "".join(f" --only {rule}" for rule in only)
    line += "" if options.scenario is None else f" --scenario {shlex.quote(options.scenario)}"
    line += "" if options.kernels == "auto" else f" --kernels {options.kernels}"
    line += "" if options.ranks is None else f" --ranks {options.ranks}"
    line += f" --lane '{lane}' --seed {options.seed} --examples {options.examples}"
    if options.size != "normal":
        line += f" --{options.size}"
    return line if options.device == "cpu" else f"{line} --device {options.device}"
