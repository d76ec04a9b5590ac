"""A stand-in for the suite in child processes: each function ``work...`` of a plugin is one piece of work.

Does not: check rules. A `ValueError` of a function is its failure.
"""

import importlib
import inspect
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

from graphpact.errors import UnknownPluginError
from graphpact_conformance.isolation import worker
from graphpact_conformance.results import Finding, Outcome, PluginResults, Result
from graphpact_conformance.targets import Listener, Options, Target


def _targets(names: Sequence[str], _: object) -> list[Target]:
    if "broken suite" in names:
        raise ZeroDivisionError("of the suite's own")
    if "nobody" in names:
        raise UnknownPluginError("no runner is called 'nobody'", hint="look")
    for name in names:
        importlib.import_module(f"fake_{name}")
    return [Target("runner", name) for name in names]


def _examine(
    target: Target,
    _: Options,
    listener: Listener,
    *,
    skip: Collection[str] = (),
    part: tuple[int, int] = (0, 1),
) -> PluginResults:
    plugin = importlib.import_module(f"fake_{target.name}")
    members = inspect.getmembers(plugin, inspect.isfunction)
    works = [(name, work) for name, work in members if name.startswith("work")]
    for name, work in works[part[0] :: part[1]]:
        if name not in skip:
            listener.begins(name)
            listener.found(_result_of(name, work))
            if "breaks the suite" in (work.__doc__ or ""):
                raise ZeroDivisionError("of the suite's own")
    return PluginResults(
        kind="runner", name=target.name, distribution="d", version="1", contract="1", drivers=["tape"]
    )


def _result_of(name: str, work: Any) -> Result:
    outcome, findings = Outcome.PASS, []
    try:
        work()
    except ValueError as error:
        outcome = Outcome.FAIL
        findings = [Finding(rule="GP01", hook=None, field=None, expected="", actual=str(error))]
    return Result(rule="GP01", check="works", lane=name, outcome=outcome, findings=findings)


worker.suite = SimpleNamespace(  # type: ignore[assignment]
    targets=_targets, examine=_examine, require_lanes=lambda *_: None
)
examine, resolve = worker.examine_for_parent, worker.resolve
