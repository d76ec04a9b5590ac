"""`V1Driver`: a graph driver for a CPU that repeats what the recorder of graphpact_tape kept.

The recorder is a library: it follows the versions of its distribution, not those of the contract.

Does not: have a strict mode, streams or tasks.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from graphpact.errors import CaptureError, EngineError
from graphpact.graphs import EagerCall, Graph
from graphpact_tape.host_guard import HostReadGuard
from graphpact_tape.host_tensors import HostMemory
from graphpact_tape.nodes import Node, make_node
from graphpact_tape.recorder import Recorder, Recording, RecordingDriver


class V1Graph(Graph):
    """The recorded operations of a region."""

    def __init__(self, recording: Recording) -> None:
        self.outputs = recording.outputs
        self.num_nodes = recording.num_nodes
        self.num_segments = len(recording.segments)
        self.pool_nbytes = sum(memory.nbytes() for memory in recording.used_memory().values())
        self._external: list[torch.Tensor] = recording.external_tensors()
        self._work: list[Node] | None = []
        for part in recording.parts:
            if isinstance(part, EagerCall):
                self._work.append((part, (), {}))
            else:
                self._work += [make_node(call) for call in part.calls if call.is_work]

    def replay(self) -> None:
        """Repeat the recorded work."""
        if self._work is None:
            raise EngineError("a released graph was replayed", hint="capture the shape again")
        with torch.inference_mode():
            for op, args, kwargs in self._work:
                op(*args, **kwargs)

    def release(self) -> None:
        """Drop the recorded work."""
        self._work, self._external, self.outputs, self.pool_nbytes = None, [], None, 0

    def external_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the graph did not allocate."""
        return list(self._external)


class V1Driver(RecordingDriver):
    """A driver of `V1Graph`."""

    name: ClassVar[str] = "v1_driver"
    repeats_eager_kernels = True

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why this driver cannot record on ``device``, or None."""
        return None if device.type == "cpu" else "it serves only a CPU"

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Run ``fn`` ``warmup`` times, then record it."""
        self.refuse_nested_capture()
        with torch.inference_mode():
            for _ in range(warmup):
                fn()
            host = HostMemory(self.memory.host, strict=False)
            guard = HostReadGuard(host, "while a graph is recorded", CaptureError)
            return V1Graph(self.record(Recorder(guard), fn))
