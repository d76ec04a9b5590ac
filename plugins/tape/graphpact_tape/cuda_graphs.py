"""`TapedCudaGraph` and `taped_graph`: ``torch.cuda.CUDAGraph`` and ``torch.cuda.graph`` over a tape.

Engines that capture in a block call these two by name. `stand_in_for_cuda_graphs` puts them into the modules
of torch that such an engine asks on a machine without a GPU, so that its own code records on a tape.

Does not: stand in for streams, events or memory pools of a GPU.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import torch

from graphpact.errors import EngineError
from graphpact.graphs.driver import DeclaredMemory, Graph
from graphpact_tape.tape import TapeDriver

__tracebackhide__ = True


class TapedCudaGraph:
    """``torch.cuda.CUDAGraph`` over a tape.

    Args:
        keep_graph: As in torch; a tape is never instantiated, so it changes nothing.

    Attributes:
        driver: The driver that records: all graphs of a process share it, as they share a memory pool.
        memory: Returns the memory around the next graph; see `GraphDriver.declare`.
        tape: The recorded graph; None before the capture.
    """

    driver: ClassVar[TapeDriver]
    memory: ClassVar[Callable[[], DeclaredMemory]]

    def __init__(self, keep_graph: bool = False) -> None:  # noqa: FBT001, FBT002  torch's own
        del keep_graph
        self.tape: Graph | None = None
        self._block = contextlib.ExitStack()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Begin to record; `capture_end` ends it."""
        del pool, capture_error_mode
        self._block.enter_context(self.capturing())

    def capture_end(self) -> None:
        """End the recording."""
        self._block.close()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Record the block."""
        self.driver.declare(type(self).memory())
        with self.driver.capturing() as capture:
            yield
        self.tape = capture.graph

    def replay(self) -> None:
        """Run the recorded work once."""
        if self.tape is None:
            raise EngineError("a CUDA graph was replayed before its capture", hint="capture it first")
        self.tape.replay()

    def instantiate(self) -> None:
        """Do nothing: a tape is ready when its capture ends."""

    def reset(self) -> None:
        """Release the recorded work."""
        if self.tape is not None:
            self.tape.release()

    def pool(self) -> tuple[int, int]:
        """Return the handle of the only pool."""
        return _pool_handle()


def _pool_handle() -> tuple[int, int]:
    return (0, 0)


@contextlib.contextmanager
def taped_graph(
    cuda_graph: TapedCudaGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Record the block into ``cuda_graph``, as ``torch.cuda.graph`` does."""
    del pool, stream, capture_error_mode
    with cuda_graph.capturing():
        yield


def stand_in_for_cuda_graphs(
    driver: TapeDriver, device_module: ModuleType, memory: Callable[[], DeclaredMemory] = DeclaredMemory
) -> None:
    """Make ``torch.cuda`` and ``device_module``, such as ``torch.cpu``, record CUDA graphs with ``driver``.

    Sets ``CUDAGraph``, ``graph``, ``graph_pool_handle`` and ``is_current_stream_capturing``.

    Args:
        driver: Records.
        device_module: The other module of torch.
        memory: Is called before each capture, and returns the memory around the graph, by its use. By
            default none is declared, so that a strict driver lets graphs write all memory.

    Raises:
        EngineError: There is a GPU, whose own graphs would be lost.
    """
    if torch.cuda.is_available():
        raise EngineError(
            "a tape cannot stand in for CUDA graphs where a GPU is", hint='use the driver "cuda" there'
        )
    graph_class = type("CUDAGraph", (TapedCudaGraph,), {"driver": driver, "memory": staticmethod(memory)})
    for module in {torch.cuda, device_module}:
        for name, value in (
            ("CUDAGraph", graph_class),
            ("graph", taped_graph),
            ("graph_pool_handle", _pool_handle),
            ("is_current_stream_capturing", lambda: driver.is_capturing),
        ):
            setattr(module, name, value)
