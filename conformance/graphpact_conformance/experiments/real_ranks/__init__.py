"""Ranks as processes: ``graphpact check --ranks N``. Rules GP05, GP06, GP11, GP17 and GP18.

``torchrun`` starts the processes. On each, a lane of the plugin runs on a strict tape. Its model gathers
tokens over the ranks, masks their padding, and adds up results of all ranks, by gloo. Before each step the
ranks exchange what they are about to do, as in an engine.

    messages  tasks of ranks, and their reports
    scenes    the batches of ranks
    model     the model
    rig       the lane of one rank
    steps     the work of one rank
    worker    the process of one rank
    launch    the processes, on the side of the suite
    verdict   reports as findings

Does not: import ``torch.distributed`` in the process of the suite; simulate ranks, as
`graphpact_conformance.experiments.ranks` does.
"""

from collections.abc import Sequence
from typing import ClassVar

from graphpact.shapes import EagerReason
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.experiment import Experiment, Findings
from graphpact_conformance.experiments.real_ranks.launch import RankProcesses
from graphpact_conformance.experiments.real_ranks.messages import ClassSource, RankReport, RankTask
from graphpact_conformance.experiments.real_ranks.verdict import EXAMINES, findings_of
from graphpact_conformance.experiments.when import everywhere
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.records.raised import DeclinedError

__all__ = ["ClassSource", "RankProcesses", "RealRanks"]


class RealRanks:
    """The experiment with real ranks for one plugin.

    Args:
        processes: The processes.
        source: The plugin's classes, for the processes.
    """

    name: ClassVar = "real_ranks"
    about: ClassVar = "Step ranks as processes: equal collectives, right rows, and padding without effect."

    def __init__(self, processes: RankProcesses, source: ClassSource) -> None:
        self._processes, self._source = processes, source

    @property
    def experiment(self) -> Experiment:
        """The experiment."""
        return Experiment(self.name, EXAMINES, self.real_ranks, everywhere, shrinks=False, num_captures=20)

    def real_ranks(self, lane: LaneUnderTest, steps: Sequence[Problem]) -> Findings:
        """Step ranks as processes: equal collectives, right rows, and padding without effect."""
        del steps  # the batches of ranks have loads of their own
        lane.rig()  # a lane that cannot be captured in one process is no question of ranks
        task = RankTask(lane.config, self._source, lane.kind, lane.provider, EXAMINES)
        answers = self._processes.run(task)
        yield from findings_of(lane, answers)
        reports = [each for each in answers if isinstance(each, RankReport)]
        declined = next((each.declined for each in reports if each.declined is not None), None)
        if declined is not None and not any(each.replays for each in reports):
            raise DeclinedError(EagerReason("declined", declined))
