"""The driver ``tape``: the rules of CUDA graphs on any device that runs eager torch.

    tape             the driver, fast and strict
    recorder         records dispatched operations for replay
    compiled         refuses compiled code, whose work a recorder cannot see
    operators        finds what a call of an operator does: writes, work, Python implementations
    collectives      runs the collectives that a tape can repeat
    threads          refuses work that a region gives to other threads
    raw              refuses direct access of the host to memory
    entrances        replaces functions of other modules during a recording, for compiled, threads and raw
    draws            refuses changes of a random generator other than draws
    nodes            runs a recorded call again
    outs             lists operations whose out-variants compute the same bits
    code             generates straight-line code for a fast tape
    rewrites         replaces nodes by cheaper ones that write the same bits
    reuse            lets intermediates of a fast tape share memory
    trace            compares the operations of two runs
    strict           the strict tape: every replay runs over poison
    externals        refers to memory that a strict tape does not own
    preparation      checks what the preparation of a replay does
    rearmed          replays a graph twice on the same inputs
    tasks            recorded operators whose arguments are updated before each replay
    task_table       the tasks of a driver's graphs, and when each must be updated
    order            streams, events and copies, with checks for missing waits
    host_tensors     distinguishes host tensors from device tensors
    host_calls       lists calls that read on the host, or make host tensors
    host_guard       refuses host reads
    memories         makes host and device two memories on a machine that has one
    poison           values that mark memory which no step may read
    trees            finds the tensors in arguments and results
    strict_observer  the observer of a strict lane's hooks and steps
    cuda_graphs      ``torch.cuda.CUDAGraph`` over a tape, for engines that call it by name

Other drivers, the engine and the suite also use this package as a library. They may import its public names
from here.

Does not: import anything except torch and the core.
"""

from graphpact_tape.cuda_graphs import stand_in_for_cuda_graphs
from graphpact_tape.host_guard import HostReadGuard
from graphpact_tape.host_tensors import HostMemory, WeakTensor
from graphpact_tape.memories import two_memories
from graphpact_tape.nodes import RunAndCopy, make_node
from graphpact_tape.operators import written_by
from graphpact_tape.order import Order, TapeEvent, TapeStream
from graphpact_tape.poison import is_poison, poison, poison_of
from graphpact_tape.recorder import EagerSection, RecordedCall, Recorder, Recording, Segment
from graphpact_tape.strict import StrictRecorder, StrictTape
from graphpact_tape.strict_observer import StrictObserver, is_due
from graphpact_tape.tape import Capture, Tape, TapeDriver
from graphpact_tape.task_table import GraphTasks, TaskTable
from graphpact_tape.tasks import RecordedTask
from graphpact_tape.trace import TracedCall, TraceDifference, first_difference
from graphpact_tape.trees import tensors_of

__all__ = [
    "Capture",
    "EagerSection",
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
    "stand_in_for_cuda_graphs",
    "tensors_of",
    "two_memories",
    "written_by",
]
