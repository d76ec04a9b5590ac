"""`TimedDriver`: a graph driver for a CPU that measures each operation of its replays.

The recorder of `graphpact_tape` runs the region once and keeps its operations. What this driver does with
them is `TimedGraph.replay`.

Does not: support a strict mode, streams or asynchronous copies. The base class does all work at once, in
order.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from graphpact.errors import CaptureError, EngineError
from graphpact.graphs import EagerCall, Graph
from graphpact_tape.host_guard import HostReadGuard
from graphpact_tape.host_tensors import HostMemory
from graphpact_tape.nodes import Node, make_node
from graphpact_tape.recorder import Recorder, Recording, RecordingDriver


class TimedGraph(Graph):
    """The recorded operations of a region.

    Attributes:
        seconds: For each operation, its total time over all replays. Eager calls are not measured.
    """

    def __init__(self, recording: Recording) -> None:
        self.outputs = recording.outputs
        self.num_nodes = recording.num_nodes
        self.num_segments = len(recording.segments)
        self.pool_nbytes = sum(memory.nbytes() for memory in recording.used_memory().values())
        self.seconds: dict[str, float] = defaultdict(float)
        self._external: list[torch.Tensor] = recording.external_tensors()
        self._work: list[tuple[str, Node]] | None = []
        for part in recording.parts:
            if isinstance(part, EagerCall):  # between two segments, called again in each replay
                self._work.append(("", (part, (), {})))
            else:
                self._work += [(str(c.op), make_node(c)) for c in part.calls if c.is_work]

    def replay(self) -> None:
        """Repeat the recorded work on the recorded memory, and the eager calls between segments."""
        if self._work is None:
            raise EngineError("a released graph was replayed", hint="capture the shape again")
        with torch.inference_mode():
            for name, (op, args, kwargs) in self._work:
                start = time.perf_counter()
                op(*args, **kwargs)
                if name:
                    self.seconds[name] += time.perf_counter() - start

    def release(self) -> None:
        """Drop the recorded work, and every tensor that only this graph holds."""
        self._work, self._external, self.outputs, self.pool_nbytes = None, [], None, 0

    def external_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the graph reads or writes and did not allocate."""
        return list(self._external)


class TimedDriver(RecordingDriver):
    """A driver of `TimedGraph`."""

    name: ClassVar[str] = "timed"
    repeats_eager_kernels = True

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why this driver cannot record on ``device``, or None."""
        return None if device.type == "cpu" else "it measures time on the host, so it serves only a CPU"

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Run ``fn`` ``warmup`` times, then once more and record every operation."""
        self.refuse_nested_capture()
        with torch.inference_mode():
            for _ in range(warmup):
                fn()
            host = HostMemory(self.memory.host, strict=False)
            guard = HostReadGuard(host, "while a graph is recorded", CaptureError)
            return TimedGraph(self.record(Recorder(guard), fn))
