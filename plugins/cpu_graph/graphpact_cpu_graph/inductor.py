"""The ``inductor`` driver: records a region once and compiles it for the CPU with torch's inductor.

A replay runs the compiled code, without the region's Python, and with fewer, fused kernels. Its inputs are
the recorded tensors themselves, which are written in place. Every replay writes the outputs to the same
memory.

A compiler relies on schemas: it drops a call that returns nothing and declares no write. Therefore
collectives and operators of other libraries are called between compiled pieces, in the same way as by the
tape. Calls of declared kernels (`graphpact.declare_kernel`) are compiled if their schemas mark all writes.

Equal layers of a model are compiled once and called with different inputs, see `graphpact_cpu_graph.blocks`.

Does not: run on a GPU, freeze or pack weights, or detect wrong use (the tape's strict mode does).
"""

import functools
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch

from graphpact.errors import CaptureError, EngineError, GraphpactError
from graphpact.graphs import Graph
from graphpact.graphs.segments import EagerCall
from graphpact.tensors import storage_id
from graphpact_cpu_graph.fx_graph import SegmentGraph
from graphpact_cpu_graph.pieces import outliving_of, pieces_of
from graphpact_cpu_graph.shared_library import Code, compiled
from graphpact_tape.host_guard import HostReadGuard
from graphpact_tape.host_tensors import HostMemory, plain_tensors
from graphpact_tape.nodes import make_node
from graphpact_tape.recorder import RecordedCall, Recorder, Recording, RecordingDriver
from graphpact_tape.trees import tensors_of

__tracebackhide__ = True  # so that a message names the line of the region


@functools.cache
def missing_compiler() -> str | None:
    """Return what torch's CPU compiler lacks on this machine, or None. It is checked once per process.

    The C++ compiler is the one that torch uses: the program in ``CXX``, otherwise ``g++``.
    """
    fault = _missing_program()
    if fault is not None:
        return fault
    include = sysconfig.get_path("include")
    if sys.platform == "linux" and not Path(include, "Python.h").exists():
        return f"no Python.h in {include}: install the headers of Python (python3-dev)"
    return None


def _missing_program() -> str | None:
    """Return why no C++ compiler can be run, or None.

    Importing inductor takes more than a second, and only its configuration names other compilers, or lets it
    install one. So without that the compiler is called here, as inductor does.
    """
    asked: tuple[str | None, ...]
    if "torch._inductor" in sys.modules or os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        from torch._inductor import config, cpp_builder, exc  # noqa: PLC0415  heavy to import

        asked = config.cpp.cxx if isinstance(config.cpp.cxx, tuple) else (config.cpp.cxx,)
        with suppress(exc.InvalidCxxCompiler, RuntimeError, OSError, subprocess.SubprocessError):
            cpp_builder.get_cpp_compiler()
            return None
    else:
        name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
        asked = (name,)
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.check_output([name, "--version"])
            return None
    names = " or ".join(repr(name) for name in asked if name)
    return f"no C++ compiler: {names} cannot be run; install g++, or set CXX to a compiler"


class InductorGraph(Graph):
    """A graph of compiled segments and the eager calls between them, with the outputs of the region.

    ``num_nodes`` counts the recorded operations before they are fused. ``pool_nbytes`` is the memory that is
    kept between replays. Each replay also allocates and frees temporary memory for its segments.
    """

    def __init__(self, recording: Recording) -> None:
        self.outputs = recording.outputs
        self.num_nodes = recording.num_nodes
        self.num_segments = len(recording.segments)
        self._external = recording.external_tensors()
        kept = tensors_of(self.outputs)
        self._steps: list[Callable[[], object]] = []
        codes: dict[int, Code] = {}  # by the place among the steps
        pieces = pieces_of(recording.parts)
        for piece, outliving in zip(pieces, outliving_of(pieces, recording.outputs), strict=True):
            if isinstance(piece, EagerCall):
                self._steps.append(piece)
                kept += plain_tensors(tensors_of((piece.args, piece.result)))
            elif isinstance(piece, RecordedCall):
                op, args, named = make_node(piece)
                self._steps.append(functools.partial(op, *args, **named))
                kept += piece.tensors()
            elif piece.num_nodes:
                graph = SegmentGraph.of(piece, outliving)
                inputs = graph.finish()
                codes[len(self._steps)] = graph.graph, inputs
                self._steps.append(_replay_of_released)  # until it is compiled
                kept += inputs
        for at, step in zip(codes, _compile([*codes.values()]), strict=True):
            self._steps[at] = step
        storages = {storage_id(t) for t in kept}
        self.pool_nbytes = sum(
            memory.nbytes() for storage, memory in recording.own.items() if storage in storages
        )

    def replay(self) -> None:
        """Run every compiled segment, and the eager calls between them, in order."""
        # Torch runs compiled code in this way too: the casts of autocast were recorded.
        with torch.inference_mode(), torch._C._DisableAutocast():  # noqa: SLF001  no public name
            for step in self._steps:
                step()

    def release(self) -> None:
        """Drop the compiled code and all tensors that only it referenced."""
        self._steps = [_replay_of_released]
        self._external = []
        self.outputs = None
        self.pool_nbytes = 0

    def external_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of operations and outputs in memory that the graph does not own."""
        return list(self._external)


class InductorDriver(RecordingDriver):
    """A driver that compiles recorded regions. Each graph has separate memory."""

    name: ClassVar[str] = "inductor"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why this driver cannot compile for ``device``, or None if it can."""
        if device.type != "cpu":
            return f"it compiles for the CPU, not for {device.type}"
        return missing_compiler()

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> InductorGraph:
        """Run ``fn`` ``warmup`` times, then once more recorded, and compile the recording.

        Raises:
            CaptureError: The region reads a tensor on the host, changes a shape in place, requests the
                address of memory that it allocated, or begins another capture; or inductor cannot compile it.
        """
        self.refuse_nested_capture()
        with torch.inference_mode():
            for _ in range(warmup):
                fn()
            host = HostMemory(self.memory.host)
            recorder = Recorder(HostReadGuard(host, "while a graph is recorded", CaptureError))
            recording = self.record(recorder, fn)
        for line in recording.addressed.values():
            raise CaptureError(
                f"the region asks for the address of memory that it allocated, at {line}",
                hint=(
                    "intermediate results of compiled code have no fixed address: allocate this memory "
                    "before the capture"
                ),
                rule="GP14",
            )
        return InductorGraph(recording)


def _compile(codes: Sequence[Code]) -> list[Callable[[], object]]:
    """Return for each graph a function that runs its compiled code on its inputs.

    Raises:
        CaptureError: Inductor cannot compile it.
        GraphpactError: Other users can change the folder in which torch compiles.
    """
    # The compiler sees shapes and strides of the inputs and assumes separate memory for each. That is true,
    # because inputs that overlap and are written were joined.
    with torch.inference_mode(mode=False), torch.no_grad():
        try:
            return compiled(codes)
        except GraphpactError:
            raise
        except Exception as error:
            raise CaptureError(
                f"inductor cannot compile the region: {type(error).__name__}:"
                f" {str(error).strip().partition(chr(10))[0]}",
                hint='use runner = "cuda_graph", which needs no compiler: on a CPU its driver is the tape',
            ) from error


def _replay_of_released() -> None:
    raise EngineError("a released graph was replayed", hint="capture the shape again")
