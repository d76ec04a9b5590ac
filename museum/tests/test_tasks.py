"""Exhibits of tasks: the experiment that shows each of them, and the text of the finding."""

from collections import Counter

import pytest

from graphpact_conformance.experiments import EXPERIMENTS, compared_inputs
from graphpact_conformance.results import Finding
from graphpact_conformance.suite import examine_lane
from graphpact_museum import room_of
from graphpact_museum.collection import EXHIBITS, VARIANTS
from graphpact_museum.exhibit import Exhibit
from graphpact_museum.gallery import OPTIONS, planted, right_class

SHOWN_BY = {
    "strict_replays": (
        *("task-updated-twice", "tasks-missed", "tasks-out-of-order", "task-of-another-layer"),
        *("task-of-another-graph", "task-of-an-unknown-key"),
        *("tasks-updated-during-the-replay", "task-update-not-awaited"),
        *("tasks-updated-after-a-read-of-outputs", "tasks-updated-with-lengths-of-the-device"),
    ),
    "replay_against_capture": (
        *("tasks-missed", "task-length-not-refreshed", "tasks-one-step-late", "task-tail-overwritten"),
        "task-of-another-graph",
    ),
}
"""The exhibits by the experiment that shows them: errors of the strict tape, or values on the fast tape."""
SAYS = {
    "tasks-missed": ("was not updated before this replay", "task 1: ends, task 1: starts"),
    "task-updated-twice": ("for the second time", ""),
    "tasks-out-of-order": ("before its turn", ""),
    "task-of-another-layer": ("recorded at", ""),
    "task-of-another-graph": ("were updated instead", "task 0: ends"),
    "task-of-an-unknown-key": ("is not a task", ""),
    "tasks-updated-during-the-replay": ("its arguments are in use", ""),
    "task-update-not-awaited": ("its arguments are in use", ""),
    "tasks-updated-after-a-read-of-outputs": ("a device would wait forever", ""),
    "tasks-updated-with-lengths-of-the-device": ("a device would wait forever", ""),
    "task-length-not-refreshed": ("", "task 1: starts"),
    "tasks-one-step-late": ("", "task 0: ends"),
    "task-tail-overwritten": ("", "task 0: ends"),
}
"""A part of the error of the strict tape, and the field of the finding about values."""


OF_TASKS = [exhibit for exhibit in EXHIBITS if room_of(exhibit.module) == "tasks"]


def findings_of(exhibit: Exhibit, experiment: str) -> list[Finding]:
    """Return the findings of GP21 of one experiment."""
    chosen = [e for e in EXPERIMENTS if e.name == experiment]
    with planted(exhibit, right_class(exhibit.base)) as plans:
        results = [r for plan in plans for r in examine_lane(plan, OPTIONS, experiments=chosen)]
    return [f for result in results for f in result.findings if f.rule == "GP21"]


@pytest.mark.few(4)
@pytest.mark.parametrize(("by", "name"), [(by, name) for by, names in SHOWN_BY.items() for name in names])
def test_an_experiment_shows_its_exhibits(by: str, name: str) -> None:
    """The experiment finds the exhibit under GP21, names the replay hook, and says what is wrong."""
    (exhibit,) = [e for e in OF_TASKS if e.name == name]
    found = findings_of(exhibit, by)
    assert found
    error, field = SAYS[name]
    assert found[0].hook == "init_metadata_replay" or name.startswith("task-update-not")
    assert found[0].help
    if by == "strict_replays":
        assert error in str(found[0].actual)
    else:
        assert str(found[0].field).startswith(field)
        assert found[0].expected != found[0].actual


def test_every_exhibit_of_tasks_has_its_experiment() -> None:
    """Each exhibit of the room is shown by an experiment, and there are exhibits of drivers for GP21 too."""
    shown = {name for names in SHOWN_BY.values() for name in names}
    assert shown == {e.name for e in OF_TASKS} == SAYS.keys()
    sites = Counter(e.site for e in EXHIBITS if e.rule == "GP21")
    assert sites == {"backend": len(OF_TASKS), "driver": 5}


def test_arguments_of_a_capture_prove_nothing_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right backend that captures other arguments passes, because these do not count as right."""
    (variant,) = [v for v in VARIANTS if v.name == "tasks-captured-with-other-arguments"]
    chosen = [e for e in EXPERIMENTS if e.name == "replay_against_capture"]

    def found() -> list[Finding]:
        with planted(variant, right_class(variant.base)) as plans:
            results = [*examine_lane(plans[0], OPTIONS, experiments=chosen)]
        return [f for result in results for f in result.findings]

    assert not found()
    monkeypatch.setattr(compared_inputs, "_is_right", lambda *_: True)
    assert {f.rule for f in found()} == {"GP21"}
