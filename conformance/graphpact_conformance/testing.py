"""The suite in anybody's pytest: `conformance`, which makes a test of each rule.

    import graphpact

    @graphpact.conformance("my_backend")
    def test_keeps_the_pact(check):
        check()

The first of these tests has the plugin examined, in the process of the tests; the others look up what came of
it.

Does not: outlive a plugin that crashes or hangs; `graphpact check` does.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, get_args

import pytest
import torch

from graphpact.errors import UsageError
from graphpact.plugins import PluginCatalog
from graphpact_conformance.report import digest
from graphpact_conformance.results import Outcome, PluginResults, Result
from graphpact_conformance.rules import RULES, Rule
from graphpact_conformance.suite import Options, Size, Target, examine, lanes_of, targets
from graphpact_conformance.xfails import Xfails

Device = Literal["cpu", "cuda"]

_MOST = 3  # failing lanes of a rule that are told in full


def conformance(
    *names: str,
    seed: int = 0,
    examples: int = 2,
    size: Size = "quick",
    lanes: Collection[str] = (),
    device: Device = "cpu",
) -> pytest.MarkDecorator:
    """Return a decorator: the test gets ``check`` for each rule, and for the answers, which are no rule's.

    ``check()`` passes where the rule holds, and fails with what `graphpact check` says where it does not. It
    skips what could not be looked at, and is an xfail where the plugin's ``xfails.toml`` says so.

    Args:
        names: Of plugins, as `graphpact check` takes them: each is examined, and each pair of a backend and
            a runner among them.
        seed: Of all that is drawn.
        examples: Sequences of batches for each experiment in each lane.
        size: How many lanes: ``"quick"``, ``"normal"`` or ``"thorough"``.
        lanes: Patterns of lane names; none for all lanes.
        device: Where; ``check()`` skips where torch sees no such device.

    Raises:
        pytest.Collector.CollectError: A name that is unknown, a plugin that is rejected, a list of known
            failures that cannot be read, or an option that is none.
    """
    patterns = (lanes,) if isinstance(lanes, str) else tuple(lanes)
    options = Options(seed=seed, examples=examples, size=size, lanes=patterns, device=device)
    try:
        examination = _examination(names, options)
    except UsageError as error:
        raise pytest.Collector.CollectError(str(error)) from error
    checks = [
        Check(examination, target, rule)
        for target in examination.targets
        for rule in (None, *RULES.values())
    ]
    return pytest.mark.parametrize("check", [pytest.param(check, id=check.id) for check in checks])


@dataclass(frozen=True, repr=False)
class Check:
    """One rule and one plugin; a test calls it.

    Args:
        examination: What the plugin is a part of.
        target: The plugin.
        rule: The rule; None for what is no rule's.
    """

    examination: "Examination"
    target: Target
    rule: Rule | None

    def __repr__(self) -> str:
        return f"<{self.rule or 'answers'} of {self.target}>"

    @property
    def id(self) -> str:
        """What pytest calls it: the rule, and behind others the plugin, where there are several."""
        rule = "answers" if self.rule is None else f"{self.rule.id}-{self.rule.name}"
        several = len(self.examination.targets) > 1
        return f"{str(self.target).replace(' ', '')}-{rule}" if several else rule

    def __call__(self) -> None:
        """Examine the plugin unless that was done, and tell how the rule came out, as pytest hears it.

        Raises:
            AssertionError: It does not hold; or it does, against the plugin's list of known failures; or the
                suite is at fault.
        """
        __tracebackhide__ = True
        row = self.examination.row(self.target, self.rule)
        if row is None:
            pytest.skip(f"{self.target} has no lane in which {self.rule or 'this'} is looked at")
        known = [result for result in row.results if result.outcome is Outcome.XFAIL]
        if row.outcome is Outcome.XFAIL:
            pytest.xfail(_reasons(known))  # with --runxfail it is nothing, and the failure counts
        if broken := row.failures or known:
            raise AssertionError("\n".join(_tell(row, broken)))
        if not row.outcome.ran:
            pytest.skip(_reasons(row.results))


class Examination:
    """Plugins that are examined together, once.

    Args:
        names: As `conformance` takes them.
        options: How.

    Raises:
        UsageError: As `conformance` tells.
    """

    def __init__(self, names: tuple[str, ...], options: Options) -> None:
        _require_choice("size", options.size, get_args(Size))
        _require_choice("device", options.device, get_args(Device))
        if not names:
            raise UsageError("there is nothing to check", hint='name it: conformance("my_backend")')
        catalog = PluginCatalog.scan()
        self.targets = tuple(targets(names, catalog))
        self._options = options
        self._xfails = Xfails.read(self.targets, catalog)
        if options.lanes and not any(lanes_of(t, options, catalog) for t in self.targets):
            raise UsageError(
                f"no lane of {', '.join(map(str, self.targets))} is called {' or '.join(options.lanes)}",
                hint=f"there are {_lanes(self.targets, options, catalog)}",
            )

    def row(self, target: Target, rule: Rule | None) -> digest.Row | None:
        """Return how a rule came out for one of the plugins; None where nothing was asked about it."""
        return self._rows[target].get(rule)

    @cached_property
    def _rows(self) -> dict[Target, dict[Rule | None, digest.Row]]:
        if self._options.device == "cuda" and not torch.cuda.is_available():
            pytest.skip("device cuda: torch sees none on this machine")
        with _one_thread():
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
    """Keeps what the suite tells."""

    def __init__(self) -> None:
        self.results: list[Result] = []

    def begins(self, work: str) -> None:
        """Hear what is about to be done, which nobody waits for."""

    def found(self, result: Result) -> None:
        """Keep a result."""
        self.results.append(result)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute as `graphpact check` does: tensors are tiny, and threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}", hint=f"say one of {', '.join(choices)}")


def _lanes(found: Iterable[Target], options: Options, catalog: PluginCatalog) -> str:
    every = replace(options, lanes=())
    return ", ".join(str(plan) for target in found for plan in lanes_of(target, every, catalog))


# -- words ---------------------------------------------------------------------------------------


def _reasons(results: Iterable[Result]) -> str:
    return "; ".join(dict.fromkeys(r.reason or digest.say(r.outcome) for r in results))


def _tell(row: digest.Row, broken: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of a failure, as `graphpact check` tells it."""
    yield f"{row.label}: {row.requirement}"
    for result in broken[:_MOST]:
        yield f"{digest.GLYPHS[result.outcome]} {result.lane}  {result.check}"
        if result.reason:
            yield f"  {result.reason}"
        for finding in result.findings[:1]:
            for name, text in digest.evidence(finding):
                yield f"  {name:<9}  " + text.replace("\n", "\n" + " " * 13)
        if (more := len(result.findings) - 1) > 0:
            yield f"  and {more} more findings in this lane"
    if rest := broken[_MOST:]:
        yield f"and in {len(rest)} more: {digest.lanes(rest)}"
