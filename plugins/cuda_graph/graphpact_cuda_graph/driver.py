"""The drivers of devices with graphs like torch's CUDA graphs: ``cuda``, ``xpu``, ``npu`` and ``musa``.

`DEVICES` contains the differences between them as data. Everything else is in one class, `DeviceDriver`,
which uses the torch module of its device: streams, events, the pool, the graph class.

All graphs of a driver share one memory pool and one capture stream. An eager call inside a region ends
one graph and begins the next. During the capture the driver replays the graph before the call, so that the
call reads computed values.

In the strict mode of ``cuda`` the preparation of a replay runs in torch's sync debug mode, in which a wait
for the device is an error. If this torch supports it (2.13 does, 2.11 does not), a replay also checks that
the graph's inputs are alive. The other devices have no strict mode.

Does not: emulate a device (without its device a driver is unavailable), or support tasks, because it does not
use the devices' functions for them.
"""

import contextlib
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from graphpact.errors import CaptureError, EngineError, ReplayError
from graphpact.graphs.driver import Event, Graph, GraphDriver, Ownership, Stream
from graphpact.graphs.segments import EagerCall
from graphpact_cuda_graph.externals import ExternalsWatch
from graphpact_tape.strict_observer import StrictObserver

__tracebackhide__ = True

_LIVENESS = "check_input_liveness"


@dataclass(frozen=True, slots=True)
class Device:
    """What differs between devices.

    Args:
        type: The device type, which is also the name of its module in torch, as in ``torch.cuda``.
        graph: The name of the module's graph class.
        label: The name of the device in messages.
        package: The distribution that adds the module to torch; None if torch contains it.
        empty: The beginning of torch's warning about a segment without work, which is legal; None if unknown.
        has_sync_debug: Whether the module has torch's sync debug mode, so that the driver has a strict mode.
    """

    type: str
    graph: str
    label: str
    package: str | None = None
    empty: str | None = None
    has_sync_debug: bool = False

    @property
    def module(self) -> Any:
        """The module of the device in torch, or None."""
        return getattr(torch, self.type, None)


DEVICES: dict[str, Device] = {
    device.type: device
    for device in (
        Device("cuda", "CUDAGraph", "CUDA", empty="The CUDA Graph is empty", has_sync_debug=True),
        Device("xpu", "XPUGraph", "XPU"),
        Device("npu", "NPUGraph", "NPU", package="torch_npu"),
        Device("musa", "MUSAGraph", "MUSA", package="torch_musa"),
    )
}
"""The devices with graphs like torch's, by type. On ROCm the device is ``cuda``."""


def _replay_of_released() -> None:
    raise EngineError("a released graph was replayed", hint="capture the shape again")


class DeviceGraph(Graph):
    """The captured graphs of a region, one for each segment, with the outputs of the region.

    The tensors that a graph reads are arguments of its kernels, which torch does not report. The driver only
    knows the tensors of operations that torch dispatched during the capture.
    """

    sees = "dispatched"
    num_nodes = -1  # torch does not report it

    def __init__(
        self,
        steps: list[Any],
        outputs: Any,
        pool_nbytes: int,
        externals: ExternalsWatch,
        *,
        watches_inputs: bool,
    ) -> None:
        self.outputs = outputs
        self.pool_nbytes = pool_nbytes
        self._externals: ExternalsWatch | None = externals
        self._graphs = [step for step in steps if not isinstance(step, EagerCall)]
        self.num_segments = len(self._graphs)
        self._calls = [s if isinstance(s, EagerCall) else s.replay for s in steps]
        self._watches_inputs = watches_inputs
        if len(self._calls) == 1 and not watches_inputs:
            self.replay = self._calls[0]  # type: ignore[method-assign]  # saves one call in each step

    def replay(self) -> None:
        """Launch the graphs on the current stream, with the eager calls between them."""
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

    @property
    def is_released(self) -> bool:
        """Whether the executable graphs are freed."""
        return self._externals is None

    def release(self) -> None:
        """Free the executable graphs. The pool is kept, because other graphs share it."""
        for graph in self._graphs:
            graph.reset()
        self.outputs = self._externals = None
        self.pool_nbytes = 0
        self._graphs, self._calls = [], []
        self.replay = _replay_of_released  # type: ignore[method-assign]

    def external_tensors(self) -> list[torch.Tensor]:
        """Return the external tensors of the region's dispatched operations that are still alive.

        Tensors that only kernels below torch's dispatcher use are missing.
        """
        return [] if self._externals is None else self._externals.tensors()


class DeviceStream(Stream):
    """A stream of a device; ``module`` is the device's module in torch."""

    def __init__(self, module: Any, stream: Any) -> None:
        self.stream = stream
        self._module = module
        self._entered: list[Any] = []

    def __enter__(self) -> Self:
        context = self._module.stream(self.stream)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().__exit__(*exc)

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for the work that ``event`` marks."""
        assert isinstance(event, DeviceEvent)  # noqa: S101  a stream takes only events of its driver
        self.stream.wait_event(event.event)

    def wait_stream(self, stream: Stream) -> None:
        """Make later work of this stream wait for all work submitted so far to ``stream``."""
        assert isinstance(stream, DeviceStream)  # noqa: S101  as above
        self.stream.wait_stream(stream.stream)

    def synchronize(self) -> None:
        """Make the host wait for all work of this stream."""
        self.stream.synchronize()


class DeviceEvent(Event):
    """An event of a device, without timing; ``module`` is the device's module in torch."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.event = module.Event()
        self._module, self._device = module, device

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work submitted so far to ``stream``."""
        assert stream is None or isinstance(stream, DeviceStream)  # noqa: S101  as above
        current = self._module.current_stream(self._device)
        self.event.record(current if stream is None else stream.stream)

    def synchronize(self) -> None:
        """Make the host wait for the marked work."""
        self.event.synchronize()


class _Capture:
    """The state of one capture. Its segments are captured on the driver's stream, into the driver's pool."""

    def __init__(self, kind: Device, pool: Any, options: dict[str, Any], device: torch.device) -> None:
        self._kind = kind
        self._pool = pool
        self.options = options
        self.externals = ExternalsWatch(device)
        self.steps: list[Any] = []  # graphs, and eager calls between them
        self._graph: Any = None

    def begin(self) -> None:
        """Begin a segment."""
        self._graph = getattr(self._kind.module, self._kind.graph)()
        self._graph.capture_begin(pool=self._pool, **self.options)

    def end(self) -> None:
        """End the segment."""
        if self._graph is not None:
            with warnings.catch_warnings():  # there may be no work between two eager calls
                if self._kind.empty is not None:
                    warnings.filterwarnings("ignore", self._kind.empty)
                self._graph.capture_end()
            self.steps.append(self._graph)
            self._graph = None

    def abandon(self) -> None:
        """End the capture of a region that failed, and discard its graphs."""
        with contextlib.suppress(RuntimeError):  # the capture is invalid, which is expected here
            self.end()
        for step in (*self.steps, self._graph):  # torch watches the graph's inputs until it is reset
            if step is not None and not isinstance(step, EagerCall):
                step.reset()


class DeviceDriver(GraphDriver):
    """A driver that captures graphs of a device into one shared memory pool, on one side stream.

    ``pool_nbytes`` of a graph is the memory that the allocator reserved during its capture. It is 0 if the
    graph fits into free memory of the pool.

    A subclass for one device in `DEVICES` sets `kind`, which also sets ``name``.
    """

    kind: ClassVar[Device]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls):
            cls.name, cls.has_strict_mode = cls.kind.type, cls.kind.has_sync_debug

    def __init__(self, device: torch.device, *, strict: bool = False) -> None:
        super().__init__(device, strict=strict)
        self._torch = self.kind.module
        self._pool = self._torch.graph_pool_handle()
        self._in_pool: weakref.WeakSet[DeviceGraph] = weakref.WeakSet()
        self._stream = self._torch.Stream(device)
        self._capture: _Capture | None = None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why graphs of this device are unavailable on ``device``, or None."""
        kind = cls.kind
        if device.type != kind.type:
            return f"{kind.label} graphs record work on a {kind.label} device, not on {device.type}"
        if not hasattr(kind.module, kind.graph):
            how = f": it comes with {kind.package}" if kind.package else ""
            return f"this torch has no torch.{kind.type}.{kind.graph}{how}"
        if not kind.module.is_available():
            return f"torch sees no {kind.label} device"
        return None

    def strict_observer(self, ownership: Ownership | None = None) -> object:
        """Return the observer that poisons the slots of a strict lane.

        Raises:
            ConfigError: The driver is not strict.
        """
        return StrictObserver(self, ownership) if self.strict else super().strict_observer(ownership)

    # -- recording -------------------------------------------------------------------------------

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> DeviceGraph:
        """Warm up ``fn`` on the capture stream, then capture one run of it into the shared pool."""
        self.refuse_nested_capture()
        current = self._torch.current_stream(self.device)
        self._stream.wait_stream(current)
        if all(graph.is_released for graph in self._in_pool):
            self._new_pool()  # torch refuses a pool whose graphs were all freed
        capture = _Capture(self.kind, self._pool, self._options(), self.device)
        with torch.inference_mode(), self._torch.stream(self._stream):
            for _ in range(warmup):
                fn()
            self._torch.synchronize(self.device)
            with _no_garbage_collection():
                self._torch.empty_cache()
                reserved = self._torch.memory_reserved(self.device)
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
                        f"the region cannot be captured as a {self.kind.label} graph: {error}",
                        hint=(
                            "a region must not read tensors on the host, synchronise, or allocate outside "
                            "torch; capture it with the strict tape, which names the line"
                        ),
                        rule="GP20",
                    ) from error
                except BaseException:
                    self._abandon(capture)
                    raise
                finally:
                    self._capture = None
                reserved = self._torch.memory_reserved(self.device) - reserved
        current.wait_stream(self._stream)
        watches = bool(capture.options)
        # If memory is short, the allocator frees other segments, so the difference can be negative.
        graph = DeviceGraph(
            capture.steps,
            outputs,
            max(reserved, 0),
            capture.externals,
            watches_inputs=watches,
        )
        self._in_pool.add(graph)
        return graph

    def _abandon(self, capture: _Capture) -> None:
        """End a failed capture, and replace the pool, which torch treats as still in capture."""
        capture.abandon()
        self._new_pool()

    def _new_pool(self) -> None:
        """Let later captures use a new pool. Graphs of the old one keep it alive."""
        self._pool = self._torch.graph_pool_handle()
        self._in_pool.clear()

    def _options(self) -> dict[str, Any]:
        """Return the options of torch's capture for strict mode; empty if this torch lacks them (2.11)."""
        known = inspect.signature(getattr(self._torch, self.kind.graph).capture_begin).parameters
        return {_LIVENESS: True} if self.strict and _LIVENESS in known else {}

    def break_graph(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """End a graph, call ``fn(*args)``, begin another graph, and return the call's result."""
        capture = self._capture
        assert capture is not None  # noqa: S101  it is capturing
        capture.end()
        for step in capture.steps[-1:]:  # the computation of the call's inputs was recorded, but has not run
            if not isinstance(step, EagerCall):
                step.replay()
        with capture.externals.paused():
            result = fn(*args)
        capture.externals.takes_over(result, args)
        capture.steps.append(EagerCall(fn, args, result))
        self._torch.synchronize(self.device)
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
        before = self._torch.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            self._torch.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise ReplayError(
                f"the host waits for the device while a replay is prepared: {error}",
                hint="keep the value in a tensor, or read a host copy such as seq_lens_cpu",
                rule="GP20",
            ) from error
        finally:
            self._torch.set_sync_debug_mode(before)

    def stream(self) -> DeviceStream:
        """Return a new stream."""
        return DeviceStream(self._torch, self._torch.Stream(self.device))

    def current_stream(self) -> DeviceStream:
        """Return the stream to which new work goes."""
        return DeviceStream(self._torch, self._torch.current_stream(self.device))

    def event(self) -> DeviceEvent:
        """Return a new event."""
        return DeviceEvent(self._torch, self.device)

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from or to pinned host memory as work of the current stream."""
        target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        """Make the host wait for all work of the device."""
        self._torch.synchronize(self.device)


class CudaDriver(DeviceDriver):
    """The driver of CUDA graphs, or on ROCm of HIP graphs: `torch.cuda.CUDAGraph`."""

    kind = DEVICES["cuda"]


class XpuDriver(DeviceDriver):
    """The driver of XPU graphs: `torch.xpu.XPUGraph`."""

    kind = DEVICES["xpu"]


class NpuDriver(DeviceDriver):
    """The driver of NPU graphs: ``torch.npu.NPUGraph``."""

    kind = DEVICES["npu"]


class MusaDriver(DeviceDriver):
    """The driver of MUSA graphs: ``torch.musa.MUSAGraph``."""

    kind = DEVICES["musa"]


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not in the context, because freeing some objects breaks a capture."""
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
