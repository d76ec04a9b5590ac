"""The suite as pytest tests: `conformance` makes one test per rule.

    import graphpact

    @graphpact.conformance("my_backend")
    def test_keeps_the_pact(check):
        check()

The first of these tests runs the suite on the plugin, in the process of the tests. The other tests look up
the results.

Does not: survive a plugin that crashes or hangs; `graphpact check` does.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, get_args

import pytest
import torch

from graphpact.errors import UsageError, named_options
from graphpact.plugins import PluginCatalog
from graphpact_conformance.records.global_state import one_thread
from graphpact_conformance.report import digest
from graphpact_conformance.results import Outcome, PluginResults, Result
from graphpact_conformance.rule import Rule
from graphpact_conformance.rules import rules_of
from graphpact_conformance.suite import examine, require_lanes, targets
from graphpact_conformance.targets import Kernels, Options, Size, Target
from graphpact_conformance.xfails import Xfails

Device = Literal["cpu", "cuda"]

_MOST = 3  # failing lanes of a rule that are shown in full


@named_options
def conformance_decorator(
    *names: str,
    adapter: str | None = None,
    seed: int = 0,
    examples: int = 2,
    size: Size = "quick",
    lanes: Collection[str] = (),
    device: Device = "cpu",
    scenario: str | Path | None = None,
    kernels: Kernels = "auto",
) -> pytest.MarkDecorator:
    """Return a decorator that parametrizes a test with ``check``: one per rule, and one for general checks.

    ``check()`` passes if the rule holds, and fails with the findings of `graphpact check` if not. It skips a
    rule that could not be checked, and is an xfail if the plugin's ``xfails.toml`` lists the failure.

    Args:
        names: Names of plugins, as for `graphpact check`: each is checked, and each pair of a backend and a
            runner among them.
        adapter: Name of the adapter that checks code of another engine; the names are its builders then, as
            ``package.module:factory``.
        seed: Seed of all random batches.
        examples: Sequences of batches for each experiment in each lane.
        size: Number of lanes: ``"quick"``, ``"normal"`` or ``"thorough"``.
        lanes: Patterns of lane names; empty for all lanes.
        device: The device; ``check()`` skips if torch has no such device.
        scenario: A file of ``graphpact generate --record``: its steps in lanes like its own, instead of
            drawn ones.
        kernels: Kernel provider of the backends.

    Raises:
        pytest.Collector.CollectError: A name is unknown, a plugin is rejected, a list of known failures
        cannot be read, or an option is invalid.
    """
    patterns = (lanes,) if isinstance(lanes, str) else tuple(lanes)
    file = None if scenario is None else str(Path(scenario).resolve())
    options = Options(
        seed=seed,
        examples=examples,
        size=size,
        lanes=patterns,
        device=device,
        scenario=file,
        kernels=kernels,
    )
    if adapter is not None:
        names = tuple(f"adapter:{adapter}:{name}" for name in names) or (f"adapter:{adapter}",)
    try:
        examination = _examination(names, options)
    except UsageError as error:
        raise pytest.Collector.CollectError(str(error)) from error
    checks = [
        Check(examination, target, rule)
        for target in examination.targets
        for rule in (None, *rules_of(target.kind).values())
    ]
    return pytest.mark.parametrize("check", [pytest.param(check, id=check.id) for check in checks])


@dataclass(frozen=True, repr=False)
class Check:
    """The check of one rule for one plugin; a test calls it.

    Args:
        examination: The examination of the plugin.
        target: The plugin.
        rule: The rule; None for general checks.
    """

    examination: "Examination"
    target: Target
    rule: Rule | None

    def __repr__(self) -> str:
        return f"<{self.rule or 'answers'} of {self.target}>"

    @property
    def id(self) -> str:
        """Its id for pytest: the rule, after the plugin if there are several."""
        rule = "answers" if self.rule is None else f"{self.rule.id}-{self.rule.name}"
        several = len(self.examination.targets) > 1
        return f"{str(self.target).replace(' ', '')}-{rule}" if several else rule

    def __call__(self) -> None:
        """Run the suite on the plugin, once, and report the result of the rule to pytest.

        Raises:
            AssertionError: The rule fails, or passes against the plugin's list of known failures, or the
                suite has a fault, or nothing of another engine's code could be checked.
        """
        __tracebackhide__ = True
        row = self.examination.row(self.target, self.rule)
        if row is None:
            pytest.skip(f"{self.target} has no lane that checks {self.rule or 'this'}")
        known = [result for result in row.results if result.outcome is Outcome.XFAIL]
        if row.outcome is Outcome.XFAIL:
            pytest.xfail(_reasons(known))  # with --runxfail it does nothing, and the failure counts
        if broken := row.failures or known:
            raise AssertionError("\n".join(_lines_of(row, broken)))
        if not row.outcome.ran:
            if (
                self.target.kind == "adapter"
                and self.rule is None
                and not self.examination.has_run(self.target)
            ):
                # The code of another engine needs no device: a green run would mean nothing.
                raise AssertionError(f"nothing of {self.target} was checked: {_reasons(row.results)}")
            pytest.skip(_reasons(row.results))


class Examination:
    """Plugins that are examined together, once.

    Args:
        names: Names of plugins, as for `conformance`.
        options: Options of the run.

    Raises:
        UsageError: A name or an option is invalid.
    """

    def __init__(self, names: tuple[str, ...], options: Options) -> None:
        _require_choice("size", options.size, get_args(Size))
        _require_choice("device", options.device, get_args(Device))
        _require_choice("kernels", options.kernels, get_args(Kernels))
        if not names:
            raise UsageError("there is nothing to check", hint='give a name: conformance("my_backend")')
        catalog = PluginCatalog.scan()
        self.targets = tuple(targets(names, catalog))
        self._options = options
        self._xfails = Xfails.read(self.targets, catalog)
        require_lanes(self.targets, options, catalog)

    def row(self, target: Target, rule: Rule | None) -> digest.Row | None:
        """Return the results of a rule for one of the plugins; None if it was not checked."""
        return self._rows[target].get(rule)

    def has_run(self, target: Target) -> bool:
        """Return whether at least one rule of a plugin was checked."""
        return any(row.outcome.ran for row in self._rows[target].values())

    @cached_property
    def _rows(self) -> dict[Target, dict[Rule | None, digest.Row]]:
        if self._options.device == "cuda" and not torch.cuda.is_available():
            pytest.skip("device cuda: torch has no such device on this machine")
        with one_thread():
            plugins = [self._results(target) for target in self.targets]
        judged = self._xfails.judge(plugins, self._options)
        return {
            target: {row.rule: row for row in digest.rows(plugin)}
            for target, plugin in zip(self.targets, judged, strict=True)
        }

    def _results(self, target: Target) -> PluginResults:
        listener = _Listener()
        plugin = examine(target, self._options, listener)
        results = [self._xfails.expect(target, result) for result in listener.results]
        return plugin.model_copy(update={"results": results})


_examination = cache(Examination)


class _Listener:
    """A listener that keeps the results."""

    def __init__(self) -> None:
        self.results: list[Result] = []

    def begins(self, work: str) -> None:
        """Ignore the name of the work."""

    def found(self, result: Result) -> None:
        """Keep a result."""
        self.results.append(result)


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}", hint=f"use one of {', '.join(choices)}")


# -- messages ------------------------------------------------------------------------------------


def _reasons(results: Iterable[Result]) -> str:
    return "; ".join(dict.fromkeys(r.reason or digest.say(r.outcome) for r in results))


def _lines_of(row: digest.Row, broken: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of a failure, as `graphpact check` prints it."""
    yield f"{row.label}: {row.requirement}"
    for result in broken[:_MOST]:
        yield f"{digest.GLYPHS[result.outcome]} {result.lane}  {result.check}"
        if result.reason:
            yield f"  {result.reason}"
        for finding in result.findings[:1]:
            for name, text in digest.evidence(finding):
                yield f"  {name:<9}  " + text.replace("\n", "\n" + " " * 13)
        if more := digest.more_findings(result):
            yield f"  {more}"
    if rest := broken[_MOST:]:
        yield f"and in {len(rest)} more: {digest.lanes(rest)}"
