"""The ``cuda`` driver: CUDA graphs through `torch.cuda.CUDAGraph`.

Does not: emulate anything. Where there is no CUDA device it says so and is not selected.
"""

import gc
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from graphpact.errors import CaptureError
from graphpact.graphs.driver import Graph, GraphDriver


class CudaGraph(Graph):
    """One captured CUDA graph and the tensors that its region returned.

    Which tensors it reads is in its kernels' arguments, where torch does not look.
    """

    num_nodes = -1  # the runtime knows, torch does not say

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any, pool_nbytes: int) -> None:
        self.outputs = outputs
        self.pool_nbytes = pool_nbytes
        self._graph = graph
        self.replay = graph.replay  # type: ignore[method-assign]  # one call less per step

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Free the executable graph; its pool lives on with its neighbours."""
        self.outputs = None
        self.pool_nbytes = 0
        self._graph.reset()


class CudaDriver(GraphDriver):
    """Captures CUDA graphs that share one memory pool, on one side stream.

    Bytes of a graph's pool are what the allocator reserved while it was captured: a graph that fits into
    what earlier ones left adds none.
    """

    name: ClassVar[str] = "cuda"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why CUDA graphs cannot be had on ``device``, or None."""
        if device.type != "cuda":
            return f"CUDA graphs record work on a CUDA device, not on {device.type}"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        return None

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> CudaGraph:
        """Warm ``fn`` up on the capture stream, then capture one run of it into the shared pool."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(warmup):
                fn()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # A collection during capture may free a tensor with a stream operation, which is illegal there.
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                reserved = torch.cuda.memory_reserved(self.device)  # entering has emptied the cache
                outputs = fn()
                reserved = torch.cuda.memory_reserved(self.device) - reserved
        except RuntimeError as error:
            raise CaptureError(
                f"the region cannot be captured as a CUDA graph: {error}",
                hint="host reads, allocations of the driver and synchronisation are not allowed in it",
            ) from error
        finally:
            if enabled:
                gc.enable()
        # Out of memory, the allocator gives up segments of others: that is no memory of the graph.
        return CudaGraph(graph, outputs, max(reserved, 0))
