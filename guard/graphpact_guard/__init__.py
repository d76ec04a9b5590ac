"""graphpact's guard: the pact inside any engine.

    settings     what ``GRAPHPACT`` asks for
    guard        `Guard`, which an integration calls where its engine captures and replays
    records      what is kept of a captured graph, and the check of a replay
    reads        which attributes a captured region reads
    contents     what must be in the memory that a graph reads, and what a replay gives
    recording    the steps of an engine in a file
    counts       how often each graph was replayed
    faults       faults, each reported once
    agreement    the graphs that all ranks refuse alike
    comparison   what each rank is about to do, compared before it does it
    closing      what a guard has seen, when its process ends
    metrics      the same for Prometheus, with the extra ``metrics``

Does not: import an engine; its integration does.
"""

from graphpact_guard.agreement import RankAgreement
from graphpact_guard.closing import log_at_exit
from graphpact_guard.comparison import RankComparison, describe_ranks
from graphpact_guard.contents import Expected
from graphpact_guard.counts import GraphCounts, summary_of_steps
from graphpact_guard.faults import FaultLog, GraphKey, ReplayFault
from graphpact_guard.guard import Guard, GuardError
from graphpact_guard.reads import ReadWatch
from graphpact_guard.recording import StepRecording
from graphpact_guard.records import GraphRecord
from graphpact_guard.settings import Ignored, Settings

__all__ = [
    "Expected",
    "FaultLog",
    "GraphCounts",
    "GraphKey",
    "GraphRecord",
    "Guard",
    "GuardError",
    "Ignored",
    "RankAgreement",
    "RankComparison",
    "ReadWatch",
    "ReplayFault",
    "Settings",
    "StepRecording",
    "describe_ranks",
    "log_at_exit",
    "summary_of_steps",
]
