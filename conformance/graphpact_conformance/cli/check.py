"""``graphpact check``: check plugins against the contract, each rule in each lane, in separate processes.

Does not: run experiments (see `graphpact_conformance.suite`), or format results
(see `graphpact_conformance.cli.results`).
"""

import contextlib
import enum
import json
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphpact.errors import UsageError
from graphpact.plugins import PluginCatalog
from graphpact_cli.console import data, note, print_table
from graphpact_cli.signals import stopped_by_sigterm
from graphpact_conformance.cli.extras import need_extra
from graphpact_conformance.rule import Rule
from graphpact_conformance.rules import EVERY_RULE, find_rule
from graphpact_conformance.target_kinds import LANE_KINDS, PREFIXES, TARGET_KINDS

if TYPE_CHECKING:
    from graphpact_conformance.cli.results import Progress
    from graphpact_conformance.results import Report, Result
    from graphpact_conformance.targets import Options, Size, Target

_RULE_COLUMNS = ("rule", "level", "since", "requirement", "hooks")


class KernelsOption(enum.StrEnum):
    """The choices of `--kernels`: ``auto``, ``native``, ``compiled`` and ``portable``."""

    auto = "auto"
    native = "native"
    compiled = "compiled"
    portable = "portable"


class DeviceOption(enum.StrEnum):
    """The choices of `--device`: ``cpu`` and ``cuda``."""

    cpu = "cpu"
    cuda = "cuda"


def complete_plugin(incomplete: str) -> list[str]:
    """Return the names of plugins that can be checked and begin with ``incomplete``."""
    names = _checkable(PluginCatalog.scan(env={}))
    return sorted(name for name in names if name.startswith(incomplete))


def complete_rule(incomplete: str) -> list[tuple[str, str]]:
    """Return the ids of rules that begin with ``incomplete``, in any case, with their names."""
    return [(rule.id, rule.name) for rule in EVERY_RULE.values() if rule.id.startswith(incomplete.upper())]


def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...",
            autocompletion=complete_plugin,
            help="Backends and runners to check, alone and in pairs, graph drivers, speculation algorithms"
            " and observers. Use `runner:NAME`, `driver:NAME`, `speculation:NAME` or `observer:NAME` if"
            " another kind has the same name.",
            show_default=False,
        ),
    ] = None,
    *,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="NAME",
            help="Check another engine's code by this adapter. The NAMEs are its builders, as"
            " `package.module:factory`; none for an adapter with its own factory.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="RULE",
            help="Check only this rule, such as GP03; repeatable.",
            autocompletion=complete_rule,
        ),
    ] = None,
    lane: Annotated[
        list[str] | None,
        typer.Option("--lane", metavar="GLOB", help="Check only lanes with matching names; repeatable."),
    ] = None,
    list_rules: Annotated[
        bool,
        typer.Option(
            "--list", help="List the rules, or the lanes of NAMEs with their checks, without a run."
        ),
    ] = False,
    device: Annotated[DeviceOption, typer.Option("--device", help="Device of the lanes.")] = DeviceOption.cpu,
    kernels: Annotated[
        KernelsOption, typer.Option("--kernels", help="Kernel provider of the attention backends.")
    ] = KernelsOption.auto,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Also fail for failed SHOULDs, open hints, requirements that did not run, and declared"
            " capabilities without a passing lane.",
        ),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer lanes.")] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="More lanes.")] = False,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of random batches.")] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            "--examples", min=1, help="Sequences of batches for each experiment; half in unusual lanes."
        ),
    ] = None,
    scenario: Annotated[
        Path | None,
        typer.Option(
            "--scenario",
            metavar="FILE",
            help="Check with the recorded steps of FILE, from graphpact generate --record.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            min=2,
            max=8,
            help="Add lanes in which N ranks, from 2 to 8, step together as processes (torchrun, gloo)."
            " Without it ranks are simulated in one process.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Number of plugins that are checked in parallel."),
    ] = None,
    fail_fast: Annotated[
        bool,
        typer.Option(
            "--fail-fast",
            help="End the check of each plugin at the first finding that names a rule; the others stay"
            " unchecked.",
        ),
    ] = False,
    all_findings: Annotated[
        bool,
        typer.Option(
            "--all-findings",
            help="Keep and print every finding: usually the first of each field, 8 of a rule in a lane.",
        ),
    ] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="With --adapter: only list, in seconds, the values that the code reads and the adapter"
            " lacks. Every run begins with this.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="DIR",
            help="Write results.json, junit.xml and report.html into DIR.",
        ),
    ] = None,
) -> None:
    """Check that plugins keep the contract between capture and replay.

    Exit status: 0 conformant, 1 not conformant, 2 usage error, 3 error of the suite or the environment, 5
    nothing ran; 130 or 143 if Ctrl-C or SIGTERM stopped the run, which then prints what it found so far.
    """
    rules = {rule.id: rule for rule in (find_rule(text) for text in only or [])}
    if adapter is not None:
        names = [f"adapter:{adapter}:{name}" for name in names or []] or [f"adapter:{adapter}"]
    if list_rules and not names:
        print_rules(rules.values() or EVERY_RULE.values(), as_json=as_json)
        return
    if probe and adapter is None:
        raise UsageError(
            "--probe looks for values that an adapter lacks, and --adapter is not given",
            hint="graphpact check --adapter NAME package.module:factory --probe",
        )
    if ranks is not None:
        _require_processes(device, adapter=adapter, scenario=scenario)
    if not names:
        raise UsageError("there is nothing to check", hint=_installed_hint())
    need_extra("conformance", "hypothesis", *(["jinja2"] if report else []))
    if report is not None:
        from graphpact_conformance.report.files import make_directory  # noqa: PLC0415  pydantic

        make_directory(report)
    from graphpact_conformance.targets import Options  # noqa: PLC0415  pydantic

    if scenario is not None:
        from graphpact_conformance.draws.scenario import read  # noqa: PLC0415  torch

        read(scenario)  # a broken file is refused before any process starts

    given: dict[str, Any] = {"seed": seed, "examples": examples}
    options = Options(
        only=frozenset(rules),
        lanes=tuple(lane or ()),
        device=device.value,
        kernels=kernels.value,
        strict=strict,
        scenario=None if scenario is None else str(scenario.resolve()),
        all_findings=all_findings,
        fail_fast=fail_fast,
        probe=probe,
        ranks=ranks,
        size=_size(quick=quick, thorough=thorough),
        **{name: value for name, value in given.items() if value is not None},
    )
    if list_rules:
        _print_lanes(names, options, as_json=as_json)
        return
    found, stopped = _run(names, options, workers, quiet=as_json)
    if probe and not stopped and not any(plugin.results for plugin in found.plugins):
        note(f"the adapter {adapter} has every value that is read; nothing else was checked")
        raise typer.Exit
    _write(found, report, as_json=as_json)
    raise typer.Exit(_BY_SIGNAL + stopped if stopped else found.exit_code)


def _require_processes(device: DeviceOption, *, adapter: str | None, scenario: Path | None) -> None:
    """Refuse options that contradict `--ranks`."""
    if device is not DeviceOption.cpu:
        raise UsageError("--ranks and --device cuda contradict each other", hint="real ranks run on the CPU")
    for option, value in (("--adapter", adapter), ("--scenario", scenario)):
        if value is not None:
            raise UsageError(
                f"--ranks and {option} contradict each other",
                hint=f"leave one of them out: lanes of {option} have no ranks",
            )


def _size(*, quick: bool, thorough: bool) -> "Size":
    if quick and thorough:
        raise UsageError("--quick and --thorough contradict each other", hint="give one of them")
    return "quick" if quick else "thorough" if thorough else "normal"


_BY_SIGNAL = 128
"""The exit status of a run that a signal stopped is this plus the number of the signal, as in shells."""


def _run(
    names: Sequence[str], options: "Options", workers: int | None, *, quiet: bool
) -> tuple["Report", int]:
    """Run the suite, with the output of plugins on stderr.

    Returns:
        The report, and the number of the signal that stopped the run (Ctrl-C or SIGTERM), 0 if none did.
    """
    from graphpact_conformance.cli.results import progress  # noqa: PLC0415  pydantic
    from graphpact_conformance.isolation import supervise  # noqa: PLC0415  all that the suite needs

    with stopped_by_sigterm(), progress(quiet=quiet) as shown, contextlib.redirect_stdout(sys.stderr):
        try:
            return supervise.check_plugins(names, options, workers=workers, **_listeners(shown)), 0
        except supervise.StoppedError as stopped:
            return stopped.report, stopped.number


def _listeners(shown: "Progress | None") -> dict[str, Any]:
    if shown is None:
        return {}

    def on_begin(target: "Target", work: str) -> None:
        shown.begins(str(target), work)

    def on_result(target: "Target", result: "Result") -> None:
        shown.found(str(target), result)

    return {"on_begin": on_begin, "on_result": on_result}


def _write(found: "Report", directory: Path | None, *, as_json: bool) -> None:
    from graphpact_conformance.cli.results import print_report  # noqa: PLC0415  pydantic
    from graphpact_conformance.report.files import FILES, save  # noqa: PLC0415

    try:
        if directory is not None:
            save(found, directory)
    finally:  # the report is printed even if the disk is full
        if as_json:
            sys.stdout.write(found.model_dump_json(indent=2) + "\n")
        else:
            print_report(data(), found)
    if directory is not None:
        note(f"{', '.join(FILES)} written to {directory}")


# -- rules ---------------------------------------------------------------------------------------


def _print_lanes(names: Sequence[str], options: "Options", *, as_json: bool) -> None:
    """Print the lanes of plugins, with the experiments in each, or the requirements of a contract."""
    from graphpact_conformance import suite  # noqa: PLC0415  all that the suite needs

    with contextlib.redirect_stdout(sys.stderr):
        catalog = PluginCatalog.scan()
        targets = suite.targets(names, catalog)
        suite.require_lanes(targets, options, catalog)
        rows = [
            (str(target), lane, checks)
            for target in targets
            for lane, checks in suite.checks_by_lane(target, options, catalog).items()
        ]
    if as_json:
        keys = ("plugin", "lane", "experiments")
        listed = [dict(zip(keys, row, strict=True)) for row in rows]
        sys.stdout.write(json.dumps(listed, indent=2) + "\n")
        return
    cells = [(name, lane, ", ".join(done)) for name, lane, done in rows]
    print_table(data(), ("plugin", "lane", "experiments"), cells)


def print_rules(rules: Collection[Rule], *, as_json: bool) -> None:
    """Print a table of rules, or a JSON array of them."""
    if as_json:
        sys.stdout.write(json.dumps([asdict(rule) for rule in rules], indent=2) + "\n")
        return
    cells = [(str(r), r.level, r.since, r.requirement, ", ".join(r.hooks)) for r in rules]
    print_table(data(), _RULE_COLUMNS, cells, numbers=("since",))


def _installed_hint() -> str:
    names = _checkable(PluginCatalog.scan())
    return f"give one or more of: {', '.join(names)}" if names else "no plugin that it checks is installed"


def _checkable(catalog: PluginCatalog) -> list[str]:
    """Return the arguments that select what is checked: ``fa3``, ``driver:tape``, ``--adapter vllm``."""
    kinds = [(kind, PREFIXES.get(kind, kind)) for kind in TARGET_KINDS]
    found = [(prefix, info.name) for kind, prefix in kinds for info in catalog.infos(kind)]
    bare = Counter(name for _, name in found)
    is_plain = {(prefix, name) for prefix, name in found if prefix in LANE_KINDS and bare[name] == 1}
    names = [name if (prefix, name) in is_plain else f"{prefix}:{name}" for prefix, name in found]
    adapters = [f"--adapter {info.name}" for info in catalog.infos("adapter")]
    return list(dict.fromkeys([*names, *adapters]))
