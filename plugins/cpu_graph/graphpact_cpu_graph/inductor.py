"""The ``inductor`` driver: a region recorded once and compiled for the CPU by torch's inductor.

A replay runs what was compiled: none of the region's Python, and fewer, fused kernels. Its inputs are
the recorded tensors themselves, written in place; what the region returned is written to the same
memory every time.

Does not: run on a GPU, freeze weights into code, or look for wrong use (the tape's strict mode does).
"""

import functools
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from graphpact.errors import CaptureError, EngineError
from graphpact.graphs import Graph, GraphDriver
from graphpact_cpu_graph._recorder import Recorder, Segment
from graphpact_tape.host import HostMemory, HostReadGuard, storage_id

__tracebackhide__ = True  # as in _recorder.py

# Random numbers come from torch's generator, as in an eager run, and not from inductor's.
_OPTIONS = {"fallback_random": True}


@functools.cache
def missing_compiler() -> str | None:
    """Return what torch's compiler for CPUs lacks on this machine, or None; found out once a process.

    The C++ compiler is the one that torch takes: what ``CXX`` names, else ``g++``.
    """
    from torch._inductor import config, cpp_builder, exc  # noqa: PLC0415  heavy to import

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError, subprocess.SubprocessError):
        asked = config.cpp.cxx if isinstance(config.cpp.cxx, tuple) else (config.cpp.cxx,)
        names = " or ".join(repr(name) for name in asked if name)
        return f"no C++ compiler: {names} cannot be run; install g++, or name a compiler in CXX"
    include = sysconfig.get_path("include")
    if sys.platform == "linux" and not Path(include, "Python.h").exists():
        return f"no Python.h in {include}: install the headers of Python (python3-dev)"
    return None


class InductorGraph(Graph):
    """Compiled segments, the eager calls between them, and what the region returned.

    ``num_nodes`` counts the recorded operations, before they are fused. ``pool_nbytes`` is what is kept
    between replays; what a segment needs only while it runs is allocated then.
    """

    def __init__(
        self,
        steps: list[Callable[[], object]],
        outputs: Any,
        recorder: Recorder,
    ) -> None:
        segments = [part for part in recorder.parts if isinstance(part, Segment)]
        self.outputs = outputs
        self.num_nodes = sum(segment.num_nodes for segment in segments)
        self.num_segments = len(segments)
        self.pool_nbytes = sum(memory.nbytes() for memory in recorder.own.values())
        self._steps = steps
        self._external = [
            tensor
            for segment in segments
            for _, tensor in segment.inputs.values()
            if storage_id(tensor) not in recorder.own and tensor.numel()
        ]

    def replay(self) -> None:
        """Run every compiled segment, and the eager calls between them, in order."""
        with torch.inference_mode():
            for step in self._steps:
                step()

    def release(self) -> None:
        """Drop the compiled code and every tensor that only it held."""
        self._steps = [_replay_of_released]
        self._external = []
        self.outputs = None
        self.pool_nbytes = 0

    def external_tensors(self) -> list[torch.Tensor]:
        """Return the inputs that are not the graph's own memory; views of what it writes may be joined."""
        return list(self._external)


class InductorDriver(GraphDriver):
    """Compiles what it records. The memory of a graph is its own; graphs of one driver do not overlap."""

    name: ClassVar[str] = "inductor"

    def __init__(self, device: torch.device, *, strict: bool = False) -> None:
        super().__init__(device, strict=strict)
        self._recorder: Recorder | None = None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return that ``device`` is no CPU, or what the compiler lacks; None where it can compile."""
        if device.type != "cpu":
            return f"it compiles for the CPU, not for {device.type}"
        return missing_compiler()

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> InductorGraph:
        """Run ``fn`` ``warmup`` times and once more, recorded, and compile what was recorded.

        Raises:
            CaptureError: A host read, a tensor that changes its shape, a capture inside another one, or
                what inductor cannot compile.
        """
        self.refuse_nested_capture()
        with torch.inference_mode():
            for _ in range(warmup):
                fn()
            recorder, outputs = self._record(fn)
        recorder.finish(outputs)
        steps = [
            _compile(part) if isinstance(part, Segment) else part
            for part in recorder.parts
            if not isinstance(part, Segment) or part.num_nodes
        ]
        return InductorGraph(steps, outputs, recorder)

    def _record(self, fn: Callable[[], Any]) -> tuple[Recorder, Any]:
        """Run ``fn`` recorded; return the recorder and what ``fn`` returned."""
        guard = HostReadGuard(
            HostMemory(self.memory.host), "while a graph is recorded", CaptureError
        )
        self._recorder = recorder = Recorder(guard)
        try:
            with self.recorded_run(), guard, recorder:
                outputs = fn()
        finally:
            self._recorder = None
        if guard.refused is not None:  # and swallowed: a capture does not recover
            raise guard.refused
        return recorder, outputs

    def break_graph(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call ``fn(*args)`` now, and at every replay, between two compiled segments."""
        assert self._recorder is not None  # noqa: S101  it is capturing
        return self._recorder.eager_call(fn, args)


def _compile(segment: Segment) -> Callable[[], object]:
    """Return what runs ``segment`` on its inputs.

    Raises:
        CaptureError: Inductor cannot compile it.
    """
    inputs = segment.finish()
    module = fx.GraphModule(torch.nn.Module(), segment.graph)
    from torch import _inductor  # noqa: PLC0415  heavy to import

    # Of the inputs the compiler sees shapes and strides, no two of one memory: those that overlap and
    # are written were made one.
    with torch.inference_mode(mode=False), torch.no_grad():
        with FakeTensorMode():
            examples: list[Any] = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
                for t in inputs
            ]
        try:
            compiled = _inductor.compile(module, examples, _OPTIONS)
        except Exception as error:
            raise CaptureError(
                f"inductor cannot compile the region: {type(error).__name__}:"
                f" {str(error).strip().partition(chr(10))[0]}",
                hint='runner = "cuda_graph" needs no compiler: on a CPU its driver is the tape',
            ) from error
    return functools.partial(compiled, *inputs)


def _replay_of_released() -> None:
    raise EngineError("a released graph was replayed", hint="capture the shape again")
