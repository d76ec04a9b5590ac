"""The driver ``tape``: the rules of CUDA graphs on any device that runs eager torch.

    tape        the driver, fast and strict
    recorder    records dispatched operations for replay
    compiled    refuses compiled code, which a recorder cannot see
    operators   what a call of an operator does: writes, work, Python implementations
    collectives the collectives that a tape repeats
    threads     refuses work that a region has other threads do
    raw         refuses access of the host to memory itself
    entrances   replaces functions of other modules for these three, while a region is recorded
    draws       refuses what changes a generator, other than draws
    nodes       runs a recorded call again
    outs        operations whose out-variants compute the same bits
    code        straight-line code of a fast tape
    rewrites    cheaper nodes that write the same bits
    reuse       memory that intermediates of a fast tape share
    trace       the operations of a run, compared with those of another
    strict      the strict tape: every replay runs over poison
    tasks       recorded operators whose host arguments are updated
    order       streams, events and copies, with a check for missing waits
    host        distinguishes host tensors from device tensors, and refuses host reads
    memories    copies between host and device as two memories, where a machine has one
    poison      values for memory that no step may read
    trees       the tensors in arguments and results
    guard       the strict guard of a lane's hooks and steps

A library for other drivers, the engine and the suite too: its public names may be imported from here.

Does not: import more than torch and the core.
"""

from graphpact_tape.host import HostMemory, HostReadGuard, WeakTensor
from graphpact_tape.memories import two_memories
from graphpact_tape.nodes import RunAndCopy, make_node
from graphpact_tape.operators import written_by
from graphpact_tape.order import Order, TapeEvent, TapeStream
from graphpact_tape.poison import is_poison, poison, poison_of
from graphpact_tape.recorder import RecordedCall, Recorder, Recording, Segment
from graphpact_tape.strict import StrictRecorder, StrictTape
from graphpact_tape.strict_observer import StrictObserver, is_due
from graphpact_tape.tape import Tape, TapeDriver
from graphpact_tape.tasks import GraphTasks, RecordedTask, TaskTable
from graphpact_tape.trace import TracedCall, TraceDifference, first_difference
from graphpact_tape.trees import tensors_of

__all__ = [
    "GraphTasks",
    "HostMemory",
    "HostReadGuard",
    "Order",
    "RecordedCall",
    "RecordedTask",
    "Recorder",
    "Recording",
    "RunAndCopy",
    "Segment",
    "StrictObserver",
    "StrictRecorder",
    "StrictTape",
    "Tape",
    "TapeDriver",
    "TapeEvent",
    "TapeStream",
    "TaskTable",
    "TraceDifference",
    "TracedCall",
    "WeakTensor",
    "first_difference",
    "is_due",
    "is_poison",
    "make_node",
    "poison",
    "poison_of",
    "tensors_of",
    "two_memories",
    "written_by",
]
