"""`beside_another_model`: a lane beside one of another model: GP10 and GP15.

Layers of both models have the same numbers, and the models share a class. So what the class keeps by the
number of a layer is mixed. Containers of the classes are emptied, one by one, to name the cause.

Does not: capture lanes of another mode, or two of the same model; see
`graphpact_conformance.experiments.recapture`.
"""

from collections.abc import Sequence
from typing import Any

from graphpact_conformance.draws.choice import of_another_model
from graphpact_conformance.draws.chosen_batches import half_size_batch
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import faults, is_right
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.lane.host_state import class_containers, emptied
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig

_HELP = (
    "keep the state of a model's layers in the instance: a cache of the class or the module that is keyed by"
    " the number of a layer, or by a shape, mixes the models of a process, such as draft and target"
)
_OTHER = (
    "a lane of another model in the same process is right: its layers have the same numbers, but other heads"
    " and scales"
)
_FIRST = "the results of a lane without other lanes, also beside a lane of another model"


def beside_another_model(lane: LaneUnderTest, rig: Rig, problems: Sequence[Problem]) -> Findings:
    """Capture and step a lane of another model, and then replay in the first one.

    If the lane is wrong for the same batch with its own model, the other model is not the cause.

    Args:
        lane: The lane.
        rig: A rig of it.
        problems: Batches that it replays correctly.
    """
    config = of_another_model(lane.config, lane.backend.capabilities, lane.device)
    if config is None or not is_right(lane, rig, half_size_batch(lane.config), may_decline=True):
        return
    other, largest = lane.like(config), half_size_batch(config)
    try:
        theirs = other.build()
    except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
        found = lane.of_error(error, expected=_OTHER, rule="GP10", problem=largest, help=_HELP)
        wrong = [found.model_copy(update={"rule": "GP10"})]
    else:
        step = theirs.step(largest, may_decline=True)
        wrong = faults(other, theirs, step, rule="GP10", expected=_OTHER, help=_HELP)
        for problem in [] if wrong else problems:
            step = rig.step(problem, may_decline=True)
            wrong += faults(lane, rig, step, rule="GP15", expected=_FIRST, help=_HELP)
    if wrong and (name := _cause(lane, other, rig, (problems, largest))) is not None:
        wrong = [wrong[0].model_copy(update={"field": name, "actual": f"{wrong[0].actual}; {_IS_CAUSE}"})]
    yield from wrong


_IS_CAUSE = "with this container of the class empty, both models are right"


def _cause(
    lane: LaneUnderTest, other: LaneUnderTest, rig: Rig, batches: tuple[Sequence[Problem], Problem]
) -> str | None:
    """Return the container of a class that must be empty for two models to be right, or None.

    Args:
        lane: The lane.
        other: The lane of the other model.
        rig: A rig of the lane; its classes are searched.
        batches: The batches of the lane, and the batch of the other one.
    """
    mine, largest = batches

    def are_right_without(container: Any) -> bool:
        with emptied(container):
            one = lane.build()
        with emptied(container):
            try:
                two = other.build()
            except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
                return False
            is_second_right = is_right(other, two, largest, may_decline=True)
        return is_second_right and all(is_right(lane, one, problem, may_decline=True) for problem in mine)

    containers = class_containers(rig.lane.backend, rig.lane.runner)
    return next((name for name, container in containers.items() if are_right_without(container)), None)
