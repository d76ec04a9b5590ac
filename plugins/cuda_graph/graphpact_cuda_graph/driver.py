"""The ``cuda`` driver: CUDA graphs through `torch.cuda.CUDAGraph`.

All graphs of a driver share one memory pool and one capture stream. An eager call inside a region ends
one graph and begins the next; what the call reads is computed by replaying the part before it.

Strict, the preparation of a replay runs in torch's sync debug mode, where a wait for the device is an
error, and a graph is asked before each replay whether its inputs are still alive (torch 2.13; not 2.11).

Does not: emulate anything. Where there is no CUDA device it says so and is not selected.
"""

import contextlib
import gc
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, ClassVar, Self

import torch

from graphpact.errors import CaptureError, ReplayError
from graphpact.graphs.driver import Event, Graph, GraphDriver, Ownership, Stream
from graphpact.graphs.segments import EagerCall
from graphpact_cuda_graph.externals import ExternalsWatch
from graphpact_tape.guard import StrictGuard

__tracebackhide__ = True

_LIVENESS = "check_input_liveness"


class CudaGraph(Graph):
    """Captured CUDA graphs, one a segment, and the tensors that their region returned.

    Which tensors they read is in their kernels' arguments, where torch does not look. It is known of the
    operations that torch dispatched while the region was recorded.
    """

    sees = "dispatched"
    num_nodes = -1  # the runtime knows, torch does not say

    def __init__(
        self,
        steps: list[torch.cuda.CUDAGraph | EagerCall],
        outputs: Any,
        pool_nbytes: int,
        externals: ExternalsWatch,
        *,
        watches_inputs: bool,
    ) -> None:
        self.outputs = outputs
        self.pool_nbytes = pool_nbytes
        self._externals: ExternalsWatch | None = externals
        self._graphs = [step for step in steps if isinstance(step, torch.cuda.CUDAGraph)]
        self.num_segments = len(self._graphs)
        self._calls = [s if isinstance(s, EagerCall) else s.replay for s in steps]
        self._watches_inputs = watches_inputs
        if len(self._calls) == 1 and not watches_inputs:
            self.replay = self._calls[0]  # type: ignore[method-assign]  # one call less per step

    def replay(self) -> None:
        """Launch the graphs on the current stream, and make the eager calls between them."""
        with torch.inference_mode():
            try:
                for call in self._calls:
                    call()
            except RuntimeError as error:
                if not self._watches_inputs:
                    raise
                raise ReplayError(
                    f"a replay is refused: {error}",
                    hint="keep what a graph reads for as long as the graph, and copy into it",
                    rule="GP14",
                ) from error

    def release(self) -> None:
        """Free the executable graphs; their pool lives on with its neighbours."""
        self.outputs = self._externals = None
        self.pool_nbytes = 0
        for graph in self._graphs:
            graph.reset()

    def external_tensors(self) -> list[torch.Tensor]:
        """Return what the region's operations took of others' memory, as far as it is alive.

        What kernels read that were launched below torch's dispatcher is not among it.
        """
        return [] if self._externals is None else self._externals.tensors()


class CudaStream(Stream):
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._entered: list[Any] = []

    def __enter__(self) -> Self:
        context = torch.cuda.stream(self.stream)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered.pop().__exit__(kind, error, traceback)

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream wait for what ``event`` marked."""
        assert isinstance(event, CudaEvent)  # noqa: S101  a driver's streams know its own events
        self.stream.wait_event(event.event)

    def wait_stream(self, stream: Stream) -> None:
        """Let later work of this stream wait for all that ``stream`` was given."""
        assert isinstance(stream, CudaStream)  # noqa: S101  as above
        self.stream.wait_stream(stream.stream)

    def synchronize(self) -> None:
        """Wait, on the host, for all work of this stream."""
        self.stream.synchronize()


class CudaEvent(Event):
    """A CUDA event, without timing."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event()
        self._device = device

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work that ``stream`` was given so far."""
        assert stream is None or isinstance(stream, CudaStream)  # noqa: S101  one of this driver's
        current = torch.cuda.current_stream(self._device)
        self.event.record(current if stream is None else stream.stream)

    def synchronize(self) -> None:
        """Wait, on the host, for the marked work."""
        self.event.synchronize()


class _Capture:
    """A capture under way: graphs begun and ended on the driver's stream, into its pool."""

    def __init__(self, pool: Any, options: dict[str, Any], device: torch.device) -> None:
        self._pool = pool
        self.options = options
        self.externals = ExternalsWatch(device)
        self.steps: list[torch.cuda.CUDAGraph | EagerCall] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        """Begin a segment."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, **self.options)

    def end(self) -> None:
        """End the segment."""
        if self._graph is not None:
            with warnings.catch_warnings():  # there may be no work between two eager calls
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                self._graph.capture_end()
            self.steps.append(self._graph)
            self._graph = None

    def abandon(self) -> None:
        """End the segment of a region that failed; nothing of it is kept."""
        with contextlib.suppress(RuntimeError):  # the capture is invalid, which is known
            self.end()
        for step in (*self.steps, self._graph):  # reset, torch stops watching its inputs
            if isinstance(step, torch.cuda.CUDAGraph):
                step.reset()


class CudaDriver(GraphDriver):
    """Captures CUDA graphs that share one memory pool, on one side stream.

    Bytes of a graph's pool are what the allocator reserved while it was captured: a graph that fits into
    what earlier ones left adds none.
    """

    name: ClassVar[str] = "cuda"
    has_strict_mode: ClassVar[bool] = True

    def __init__(self, device: torch.device, *, strict: bool = False) -> None:
        super().__init__(device, strict=strict)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._capture: _Capture | None = None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why CUDA graphs cannot be had on ``device``, or None."""
        if device.type != "cuda":
            return f"CUDA graphs record work on a CUDA device, not on {device.type}"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        return None

    def guard(self, ownership: Ownership | None = None) -> object:
        """Return the observer that poisons the slots of a strict lane.

        Raises:
            ConfigError: The driver is not strict.
        """
        return StrictGuard(self, ownership) if self.strict else super().guard(ownership)

    # -- recording -------------------------------------------------------------------------------

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> CudaGraph:
        """Warm ``fn`` up on the capture stream, then capture one run of it into the shared pool."""
        self.refuse_nested_capture()
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        capture = _Capture(self._pool, self._options(), self.device)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for _ in range(warmup):
                fn()
            torch.cuda.synchronize(self.device)
            with _no_garbage_collection():
                torch.cuda.empty_cache()
                reserved = torch.cuda.memory_reserved(self.device)
                self._capture = capture
                try:
                    capture.begin()
                    with self.recorded_run(), capture.externals:
                        outputs = fn()
                    capture.externals.note(outputs)
                    capture.end()
                except RuntimeError as error:
                    self._abandon(capture)
                    raise CaptureError(
                        f"the region cannot be captured as a CUDA graph: {error}",
                        hint="host reads, allocations of the driver and synchronisation are not allowed in"
                        " it; the strict tape names the line",
                        rule="GP20",
                    ) from error
                except BaseException:
                    self._abandon(capture)
                    raise
                finally:
                    self._capture = None
                reserved = torch.cuda.memory_reserved(self.device) - reserved
        current.wait_stream(self._stream)
        watches = bool(capture.options)
        # Out of memory, the allocator gives up segments of others: that is no memory of the graph.
        return CudaGraph(
            capture.steps,
            outputs,
            max(reserved, 0),
            capture.externals,
            watches_inputs=watches,
        )

    def _abandon(self, capture: _Capture) -> None:
        """End a capture that failed, and its pool: torch takes that for recorded into still."""
        capture.abandon()
        self._pool = torch.cuda.graph_pool_handle()

    def _options(self) -> dict[str, Any]:
        """Return what a strict driver asks of torch's capture, where this torch has it (not 2.11)."""
        known = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
        return {_LIVENESS: True} if self.strict and _LIVENESS in known else {}

    def break_graph(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """End a graph before ``fn(*args)``, and begin another after it."""
        capture = self._capture
        assert capture is not None  # noqa: S101  it is capturing
        capture.end()
        for step in capture.steps[-1:]:  # what the call reads was recorded, and not yet computed
            if isinstance(step, torch.cuda.CUDAGraph):
                step.replay()
        with capture.externals.paused():
            result = fn(*args)
        capture.externals.takes_over(result, args)
        capture.steps.append(EagerCall(fn, args, result))
        torch.cuda.synchronize(self.device)
        capture.begin()
        return result

    # -- around the replay -----------------------------------------------------------------------

    @contextlib.contextmanager
    def preparation(
        self, host: Iterable[torch.Tensor] = (), read_only: Iterable[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Strict: a wait for the device is an error in it."""
        del host, read_only
        if not self.strict:
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise ReplayError(
                f"the host waits for the device while a replay is prepared: {error}",
                hint="keep the value in a tensor, or take it from the host's copy, such as seq_lens_cpu",
                rule="GP20",
            ) from error
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def stream(self) -> CudaStream:
        """Return a new stream."""
        return CudaStream(torch.cuda.Stream(self.device))

    def current_stream(self) -> CudaStream:
        """Return the stream that work is given to now."""
        return CudaStream(torch.cuda.current_stream(self.device))

    def event(self) -> CudaEvent:
        """Return a new event."""
        return CudaEvent(self.device)

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy pinned host memory to the device in the order of the current stream."""
        target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        """Wait, on the host, for all work that the device was given."""
        torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect now, and nothing that is alive now before the end: to free some things ends a capture."""
    gc.collect()
    enabled = gc.isenabled()
    frozen_by_others = gc.get_freeze_count()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_by_others:
            gc.unfreeze()
        if enabled:
            gc.enable()
