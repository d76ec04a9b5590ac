"""Quick checks of the builders in the tests, and assertions on their results, for every engine."""

from collections.abc import Iterator, Sequence

from graphpact_conformance.results import Finding, Outcome, Result
from graphpact_conformance.suite import examine_lane
from graphpact_conformance.suite.adapter import Adapter
from graphpact_conformance.targets import Options


def results_of(subject: Adapter, *lanes: str) -> Iterator[Result]:
    """Yield the results of ``graphpact check --quick`` in the named lanes, or in all; do not shrink."""
    options = Options(size="quick", lanes=lanes, shrink=False)
    for plan in subject.lanes(options):
        yield from examine_lane(plan, options, experiments=subject.experiments)


def findings_of(subject: Adapter, *lanes: str) -> list[Finding]:
    """Return the findings of a check, and require that no part of it was skipped."""
    results = [*results_of(subject, *lanes)]
    assert not any(result.outcome is Outcome.ERROR for result in results)
    return [finding for result in results for finding in result.findings]


def assert_right(subject: Adapter, *lanes: str) -> None:
    """Assert that all checked rules pass, and that some rules were checked."""
    results = [*results_of(subject, *lanes)]
    assert [str(r.findings[:1]) for r in results if r.findings] == []
    assert not {Outcome.FAIL, Outcome.ERROR} & {result.outcome for result in results}
    assert {result.rule for result in results if result.outcome is Outcome.PASS} >= {"GP01", "GP02", "GP19"}


def assert_found(findings: Sequence[Finding], rule: str | None, field: str) -> None:
    """Assert that a finding has a rule and an author's field, both values, and the batch."""
    found = [f for f in findings if f.rule == rule and (f.field or "").startswith(field)]
    assert found, findings
    assert found[0].expected
    assert found[0].actual != found[0].expected
    assert found[0].batch
