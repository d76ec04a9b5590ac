"""`ChromeTrace`: writes the phases of every step to a file that Perfetto and chrome://tracing show.

    with ChromeTrace(Path("trace.json")) as trace, Engine(config, observers=[trace]) as engine:
        engine.generate(prompts)

The file is a JSON object with ``traceEvents``: complete events (``"ph": "X"``) in microseconds since the
trace was opened. They nest as the calls do:

    capture                       one shape, while the engine is built
    step
      schedule
      lane NAME                   one step of a lane; several with [speculative]
        populate, prepare_replay, init_metadata_replay
        pact check                from the end of the hooks to the launch, if a check was due
        replay | eager run
      sample
      wait                        for the tokens, with asynchronous scheduling
      commit

``args`` contains what is known: lane, shape, mode, batch_size, num_tokens, reason (of an eager run), and
error (the type of what the phase raised).

Does not: time a device. On a GPU, a launch lasts until its work is submitted, and sampling waits for the
device.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graphpact.batch import ForwardBatch
from graphpact.errors import GraphpactError
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane, PreparedStep
from graphpact.output_file import OutputFile
from graphpact.shapes import EagerReason, GraphShape
from graphpact_engine.phases import Around, HookObserver, Phase
from graphpact_engine.scheduled import ScheduledBatch

_MOST_KEPT = 1024  # events that are kept before they are written


class ChromeTrace(HookObserver):
    """An observer that writes a Chrome trace; a context manager that opens and closes its file.

    One serves every lane of an engine. Pass it as the first observer: its times include those after it.

    Args:
        path: The file, which is replaced if it exists.
    """

    def __init__(self, path: Path) -> None:
        self.num_events = 0
        self._file = OutputFile(path, "trace", existing="replaced")
        self._kept: list[dict[str, Any]] = []
        self._start = 0
        self._step: dict[str, Any] = {}  # arguments of the lane's step or capture, for the phases in it
        self._checks = 0  # pact checks of the lane before its step
        self._hooks_end: int | None = None  # when the last hook of a step ended, until its launch

    def __enter__(self) -> Self:
        """Open the file.

        Raises:
            UsageError: It cannot be written.
        """
        self._file.open()
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        self._start = time.perf_counter_ns()
        self._put({"name": "process_name", "ph": "M", "args": {"name": "graphpact"}})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the remaining events and close the file, also after an error.

        Raises:
            GraphpactError: The last events cannot be written.
        """
        try:
            self._flush()
            self._file.write("\n]}\n")
            self._file.close()
        except GraphpactError:
            if kind is None:
                raise

    # -- what is observed ------------------------------------------------------------------------

    def around(
        self, hook: str, shape: GraphShape, *, batch: ForwardBatch | None = None, captured: Any = None
    ) -> Around:
        """Write one call of a hook."""
        del batch, captured
        with self._event(hook, **self._step, shape=str(shape)):
            result = yield
        self._hooks_end = time.perf_counter_ns()
        return result

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> Around:
        """Write a step of a lane, and the check of its pact even if that ended the step."""
        self._checks = lane.stats.pact_checks
        self._step = {"lane": lane.name, **_about(batch)}
        self._hooks_end = None
        try:
            with self._event(f"lane {lane.name}", **self._step):
                try:
                    return (yield)
                except BaseException as error:
                    if lane.stats.pact_checks > self._checks:
                        self._put_check(error=type(error).__name__)
                    raise
        finally:
            self._step = {}

    @hookimpl(wrapper=True)
    def launch(self, lane: Lane, prepared: PreparedStep) -> Around:
        """Write a replay or an eager run, and the check of the pact before it."""
        if lane.stats.pact_checks > self._checks:
            self._put_check()
        self._hooks_end = None
        fit = prepared.fit
        if isinstance(fit, EagerReason):
            name, about = "eager run", {"reason": fit.name, "why": fit.text}
        else:
            name, about = "replay", {"shape": str(fit)}
        with self._event(name, **self._step, **about):
            return (yield)

    @hookimpl(wrapper=True)
    def capture(self, lane: Lane, shape: GraphShape) -> Around:
        """Write the capture of a shape."""
        self._step = {"lane": lane.name}
        with self._event("capture", **self._step, shape=str(shape)):
            return (yield)

    @hookimpl(wrapper=True)
    def engine_phase(self, phase: Phase) -> Around:
        """Write a phase of the engine."""
        with self._event(phase) as about:
            result = yield
            about.update(_describe(phase, result))
            return result

    # -- inside ----------------------------------------------------------------------------------

    @contextmanager
    def _event(self, name: str, **about: Any) -> Iterator[dict[str, Any]]:
        """Write an event that lasts as long as the context, which may add to its arguments."""
        start = time.perf_counter_ns()
        try:
            yield about
        except BaseException as error:
            about["error"] = type(error).__name__
            raise
        finally:
            self._put_span(name, start, about)

    def _put_check(self, **about: Any) -> None:
        """Write the check of a pact, which began when the hooks ended."""
        if self._hooks_end is not None:
            self._put_span("pact check", self._hooks_end, {**self._step, **about})

    def _put_span(self, name: str, start: int, about: dict[str, Any]) -> None:
        times = {"ts": (start - self._start) / 1e3, "dur": (time.perf_counter_ns() - start) / 1e3}
        self._put({"name": name, "ph": "X", **times, "args": about})

    def _put(self, event: dict[str, Any]) -> None:
        event |= {"pid": os.getpid(), "tid": threading.get_native_id()}
        self._kept.append(event)
        if len(self._kept) >= _MOST_KEPT:
            self._flush()

    def _flush(self) -> None:
        kept, self._kept = self._kept, []
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in kept)
        if kept:
            self._file.write((",\n" if self.num_events else "\n") + lines)
        self.num_events += len(kept)


def _about(batch: ForwardBatch) -> dict[str, Any]:
    """Return the arguments of an event that describe a batch."""
    return {
        "mode": batch.forward_mode.value,
        "batch_size": batch.batch_size,
        "num_tokens": batch.num_tokens,
    }


def _describe(name: Phase, result: Any) -> dict[str, Any]:
    """Return the arguments of an event that describe the result of its phase."""
    if isinstance(result, ScheduledBatch):
        return _about(result.batch)
    if name in {"step", "commit"}:
        return {"num_requests": len(result)}
    return {"num_tokens": len(result)} if isinstance(result, list) else {}
