"""The ``tape`` driver: the semantics of CUDA graphs on any device that runs eager torch, CPUs above all.

While recording, every dispatched operation is kept with its tensors by identity and its numbers by
value. A replay runs those operations, in order, on those tensors, and none of the Python between them.
So a tape forgets what a CUDA graph forgets: a new tensor, a changed host number, a branch not taken.

It has two modes. The fast one is a quick CPU graph. The strict one makes wrong use show that on a GPU
would go unseen, whatever it costs: see `graphpact_tape.strict`.

Does not: record by itself; `graphpact_tape.recorder` does.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch

from graphpact.errors import CaptureError, EngineError
from graphpact.graphs.driver import DeclaredMemory, Event, Graph, GraphDriver, Stream
from graphpact_tape.host import HostMemory, HostReadGuard, storage_id, tensors_of
from graphpact_tape.recorder import Node, Recorder
from graphpact_tape.strict import StrictRecorder, StrictShared, StrictTape

_WHEN = "while a graph is recorded"


def _replay_of_released() -> None:
    raise EngineError("a released tape was replayed", hint="capture the shape again")


class Tape(Graph):
    """Recorded operations, and the tensors that the recorded region returned.

    Attributes:
        trace: What was dispatched while it was recorded; None unless the driver was asked for it.
    """

    def __init__(self, recorder: Recorder, outputs: Any) -> None:
        self.outputs = outputs
        self.trace = recorder.trace
        self.num_segments = recorder.num_segments
        self.num_nodes = len(recorder.nodes) - (self.num_segments - 1)
        self._nodes: list[Node] = recorder.nodes
        self._external: list[torch.Tensor] = []
        self.pool_nbytes = self._sort_memory(recorder)

    def _sort_memory(self, recorder: Recorder) -> int:
        """Find the tensors of others, and return the bytes of those of the tape's own."""
        own = recorder.allocated | recorder.results
        pool: dict[int, int] = {}
        external: dict[tuple[Any, ...], torch.Tensor] = {}
        for t in [*recorder.touched, *tensors_of(self.outputs)]:
            storage = own.get(storage_id(t))
            if storage is not None:
                pool[storage_id(t)] = storage.nbytes()
            elif t.numel():
                external[t.device, t.data_ptr(), t.shape, t.stride(), t.dtype] = t
        self._external = list(external.values())
        return sum(pool.values())

    def replay(self) -> None:
        """Run every recorded operation once, in order."""
        with torch.inference_mode():
            for op, args, kwargs in self._nodes:
                op(*args, **kwargs)

    def release(self) -> None:
        """Drop the operations and every tensor that only they held."""
        self._nodes = [(_replay_of_released, (), {})]
        self._external = []
        self.outputs = None
        self.pool_nbytes = 0

    def external_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the recorded operations, and of the outputs, that are not the tape's."""
        return list(self._external)


class TapeDriver(GraphDriver):
    """Records tapes.

    Fast, the memory of a tape is its own, and streams are one: all work is done at once, in order.
    Strict, tapes of one driver spoil each other's memory, and streams are held to their waits.

    Args:
        device: See `GraphDriver`.
        strict: See `GraphDriver`.
        traced: Keep what is dispatched in each capture, as `Tape.trace`; not in strict mode.
    """

    name: ClassVar[str] = "tape"
    has_strict_mode: ClassVar[bool] = True
    repeats_eager_kernels: ClassVar[bool] = True

    def __init__(self, device: torch.device, *, strict: bool = False, traced: bool = False) -> None:
        super().__init__(device, strict=strict)
        self._traced = traced
        self._recorder: Recorder | None = None
        self._shared = StrictShared(device) if strict else None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:  # noqa: ARG003  it runs anywhere
        """Return None: eager torch is all that a tape needs."""
        return None

    def declare(self, memory: DeclaredMemory) -> None:
        """Say what the memory around the graphs is for."""
        super().declare(memory)
        if self._shared is not None:
            self._shared.order.name_of = memory.name_of

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Run ``fn`` ``warmup`` times, then once more while every operation is kept."""
        self.refuse_nested_capture()
        with torch.inference_mode():
            armed = [t.clone() for t in self.memory.workspaces] if self.strict else []
            for _ in range(warmup):
                fn()
            host = HostMemory(self.memory.host, strict=self.strict)
            guard = HostReadGuard(host, _WHEN, CaptureError)
            if self._shared is None:
                recorder = Recorder(guard, traced=self._traced)
                with self._recording(recorder):
                    outputs = fn()
                return Tape(recorder, outputs)
            self._shared.order.synchronize()
            strict = StrictRecorder(guard, self._shared, self.memory)
            with self._shared.watching(guard), strict.recording():
                with self._recording(strict):
                    outputs = fn()
                tape = StrictTape(strict, outputs)
            return self._shared.keep(tape, self.memory, armed)

    @contextlib.contextmanager
    def _recording(self, recorder: Recorder) -> Iterator[None]:
        self._recorder = recorder
        try:
            with self.recorded_run(), recorder.guard, recorder:
                yield
            if recorder.guard.refused is not None:  # and swallowed: a capture does not recover
                raise recorder.guard.refused
        finally:
            self._recorder = None

    def break_graph(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call ``fn(*args)`` now, and at every replay."""
        assert self._recorder is not None  # noqa: S101  it is capturing
        return self._recorder.eager_call(fn, args)

    # -- around the replay -----------------------------------------------------------------------

    @contextlib.contextmanager
    def preparation(
        self, host: Iterable[torch.Tensor] = (), read_only: Iterable[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Strict: refuse host reads of device tensors and stray writes; fast: let everything pass."""
        if self._shared is None:
            yield
            return
        with self._shared.preparation(self.memory, host, read_only):
            yield

    @contextlib.contextmanager
    def unprepared(self, host: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Strict: learn what is made on the host; let everything pass."""
        if self._shared is None:
            yield
            return
        with self._shared.unprepared(self.memory, host):
            yield

    def stream(self) -> Stream:
        """Return a new stream: strict, one whose work is held to its waits."""
        return super().stream() if self._shared is None else self._shared.order.stream()

    def current_stream(self) -> Stream:
        """Return the stream that work is given to now."""
        return super().current_stream() if self._shared is None else self._shared.order.current

    def event(self) -> Event:
        """Return a new event."""
        return super().event() if self._shared is None else self._shared.order.event()

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy host memory: fast, at once; strict, as late as a device may."""
        if self._shared is None:
            target.copy_(source)
        else:
            self._shared.copy_async(target, source, capturing=self.is_capturing)

    def synchronize(self) -> None:
        """Strict: end every copy in flight; fast: nothing is in flight."""
        if self._shared is not None:
            self._shared.order.synchronize()
