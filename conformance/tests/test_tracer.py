"""The operations of the runs of a capture, as the tracer keeps them."""

from graphpact import ForwardMode
from graphpact_conformance.draws.batches import draw
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend


def test_the_operations_of_a_capture_name_lines_of_what_is_tested() -> None:
    """Each operation of each run of a capture has a line, and none is a line of the tracer."""
    config = next(configs_of(ReferenceBackend.capabilities, cases=[Case(ForwardMode.DECODE)]))
    ((exact, *_),) = draw(config, 1, 0)
    rig = LaneUnderTest(config).build(capture=False)
    runs = rig.runs_of_capture(exact, config.shapes[-1])
    assert len(runs) > 1
    lines = [str(call.line) for run in runs for call in run]
    assert lines
    assert not [line for line in lines if "tracer.py" in line or "/rig.py" in line]
    assert "capture" not in vars(rig.lane.driver)  # no longer traced
