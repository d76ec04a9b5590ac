"""The ``cuda`` driver: CUDA graphs through `torch.cuda.CUDAGraph`.

All graphs of a driver share one memory pool and one capture stream. An eager call inside a region ends
one graph and begins the next. During the capture the driver replays the graph before the call, so that the
call reads computed values.

In strict mode the preparation of a replay runs in torch's sync debug mode, where a wait for the device is an
error. A replay also checks that the graph's inputs are alive, if this torch can (2.13 can, 2.11 cannot).

Does not: emulate anything. Without a CUDA device the driver is unavailable.
"""

import contextlib
import gc
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self

import torch

from graphpact.errors import CaptureError, EngineError, ReplayError
from graphpact.graphs.driver import Event, Graph, GraphDriver, Ownership, Stream
from graphpact.graphs.segments import EagerCall
from graphpact_cuda_graph.externals import ExternalsWatch
from graphpact_tape.guard import StrictGuard

__tracebackhide__ = True

_LIVENESS = "check_input_liveness"


def _replay_of_released() -> None:
    raise EngineError("a released graph was replayed", hint="capture the shape again")


class CudaGraph(Graph):
    """Captured CUDA graphs, one for each segment, with the outputs of the region.

    The tensors that a graph reads are arguments of its kernels, which torch does not report. The driver knows
    them only for operations that torch dispatched during the capture.
    """

    sees = "dispatched"
    num_nodes = -1  # torch does not report it

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
            self.replay = self._calls[0]  # type: ignore[method-assign]  # saves one call in each step

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
                    hint="keep the tensors that a graph reads for as long as the graph, and copy into them",
                    rule="GP14",
                ) from error

    def release(self) -> None:
        """Free the executable graphs; the pool stays, because other graphs share it."""
        for graph in self._graphs:
            graph.reset()
        self.outputs = self._externals = None
        self.pool_nbytes = 0
        self._graphs, self._calls = [], []
        self.replay = _replay_of_released  # type: ignore[method-assign]

    def external_tensors(self) -> list[torch.Tensor]:
        """Return the external tensors of the region's dispatched operations that are still alive.

        Tensors of kernels that were launched below torch's dispatcher are not among them.
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

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().__exit__(*exc)

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for the work that ``event`` marks."""
        assert isinstance(event, CudaEvent)  # noqa: S101  streams take events of their own driver
        self.stream.wait_event(event.event)

    def wait_stream(self, stream: Stream) -> None:
        """Make later work of this stream wait for all work that ``stream`` was given so far."""
        assert isinstance(stream, CudaStream)  # noqa: S101  as above
        self.stream.wait_stream(stream.stream)

    def synchronize(self) -> None:
        """Make the host wait for all work of this stream."""
        self.stream.synchronize()


class CudaEvent(Event):
    """A CUDA event, without timing."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event()
        self._device = device

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work that ``stream`` was given so far."""
        assert stream is None or isinstance(stream, CudaStream)  # noqa: S101  as above
        current = torch.cuda.current_stream(self._device)
        self.event.record(current if stream is None else stream.stream)

    def synchronize(self) -> None:
        """Make the host wait for the marked work."""
        self.event.synchronize()


class _Capture:
    """The state of one capture: its segments are captured on the driver's stream, into its pool."""

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
        """End the capture of a region that failed, and keep no graph of it."""
        with contextlib.suppress(RuntimeError):  # the capture is invalid: that is expected here
            self.end()
        for step in (*self.steps, self._graph):  # until reset, torch watches its inputs
            if isinstance(step, torch.cuda.CUDAGraph):
                step.reset()


class CudaDriver(GraphDriver):
    """A driver that captures CUDA graphs into one shared memory pool, on one side stream.

    ``pool_nbytes`` of a graph is the memory that the allocator reserved during its capture. It is 0 for a
    graph that fits into free memory of the pool.
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
        """Return why CUDA graphs are unavailable on ``device``, or None."""
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
                        hint="a region must not read on the host, synchronise, or call cudaMalloc; capture it"
                        " on the strict tape, which names the line",
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
        # When memory is short the allocator frees other segments, so the difference can be negative.
        return CudaGraph(
            capture.steps,
            outputs,
            max(reserved, 0),
            capture.externals,
            watches_inputs=watches,
        )

    def _abandon(self, capture: _Capture) -> None:
        """End a capture that failed, and replace the pool: torch treats it as still in capture."""
        capture.abandon()
        self._pool = torch.cuda.graph_pool_handle()

    def _options(self) -> dict[str, Any]:
        """Return options of torch's capture for strict mode; empty where this torch lacks them (2.11)."""
        known = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
        return {_LIVENESS: True} if self.strict and _LIVENESS in known else {}

    def break_graph(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """End a graph, call ``fn(*args)``, begin another graph, and return the call's result."""
        capture = self._capture
        assert capture is not None  # noqa: S101  it is capturing
        capture.end()
        for step in capture.steps[-1:]:  # the inputs of the call were recorded, but not computed
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
        """In strict mode, turn a wait of the host for the device into an error."""
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
                hint="keep the value in a tensor, or read a host copy of it, such as seq_lens_cpu",
                rule="GP20",
            ) from error
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def stream(self) -> CudaStream:
        """Return a new stream."""
        return CudaStream(torch.cuda.Stream(self.device))

    def current_stream(self) -> CudaStream:
        """Return the stream that new work goes to."""
        return CudaStream(torch.cuda.current_stream(self.device))

    def event(self) -> CudaEvent:
        """Return a new event."""
        return CudaEvent(self.device)

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy pinned host memory to the device in the order of the current stream."""
        target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        """Make the host wait for all work of the device."""
        torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not inside: freeing some objects, such as CUDA graphs, breaks a capture."""
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
