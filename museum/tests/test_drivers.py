"""Exhibits of graph drivers: each breaks a promise of the driver contract."""

import ast
from pathlib import Path

from graphpact_conformance.contracts.examine import examine_contract_lane
from graphpact_conformance.drivers import promises
from graphpact_conformance.drivers.driver_lanes import DriverLane
from graphpact_conformance.results import Outcome
from graphpact_conformance.targets import Options
from graphpact_museum.collection import EXHIBITS
from graphpact_tape.tape import TapeDriver

SUITE_TESTS = Path(__file__).parents[2] / "conformance/tests/test_drivers.py"


def broken_by_the_suites_tests() -> set[str]:
    """Return the promises that drivers in the suite's tests break: the keys of their ``LOCAL``."""
    for node in ast.parse(SUITE_TESTS.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="LOCAL")], value=ast.Dict(keys=keys)):
                return {ast.literal_eval(key) for key in keys if key is not None}
    raise LookupError(SUITE_TESTS)


def test_every_promise_is_broken_by_a_planted_bug() -> None:
    """Each exhibit of a fast driver breaks a check of its rule; with the suite's tests, all are broken."""
    broken = broken_by_the_suites_tests()
    for exhibit in EXHIBITS:
        if exhibit.base == "tape" and exhibit.lanes[0] == "fast":
            lane = DriverLane(exhibit.make(TapeDriver), is_strict=False)
            (result,) = examine_contract_lane(lane, Options(only=frozenset({exhibit.rule})))
            assert result.outcome is Outcome.FAIL, exhibit.name
            broken |= {str(found.field).partition(": ")[2] for found in result.findings}
    assert broken == set(promises.CHECKS)
