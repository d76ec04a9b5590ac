"""What ``graphpact generate`` writes besides the answers: a recording, a trace, metrics and logs.

Does not: measure or count; observers, lanes and the scheduler do.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from graphpact.errors import UsageError
from graphpact.files import write_file
from graphpact_cli.console import note

if TYPE_CHECKING:
    from graphpact_engine.config import EngineConfig
    from graphpact_engine.engine import Engine

_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Observation:
    """What to write about a run.

    Args:
        record: Where to write every step, for ``graphpact check --scenario``.
        trace: Where to write a Chrome trace.
        metrics: Where to write metrics, in Prometheus' text format.
        metrics_port: The port of this machine to serve metrics at while the run lasts; 0 for a free one.
        log_format: How to print the engine's events on stderr.
        quiet: Whether to print no messages about these files.
    """

    record: Path | None = None
    trace: Path | None = None
    metrics: Path | None = None
    metrics_port: int | None = None
    log_format: Literal["text", "json"] | None = None
    quiet: bool = False

    @contextmanager
    def observers(self, settings: "EngineConfig") -> Iterator[list[object]]:
        """Yield the observers of the engine; open and close their files, and print the engine's events.

        Raises:
            UsageError: A file cannot be written, or a package is not installed.
        """
        from graphpact_engine.logs import log_to_stderr  # noqa: PLC0415  not for --help
        from graphpact_engine.recording import StepRecorder  # noqa: PLC0415  slow: torch
        from graphpact_engine.timeline import ChromeTrace  # noqa: PLC0415

        observers: list[object] = []
        with ExitStack() as stack:
            if self.log_format is not None:
                stack.enter_context(log_to_stderr(self.log_format))
            if self.trace is not None:
                trace = stack.enter_context(ChromeTrace(self.trace))
                observers.append(trace)
            if self._has_metrics and "metrics" not in settings.engine.observers:
                observers.append(_step_metrics())
            if self.record is not None:
                recorder = stack.enter_context(StepRecorder(self.record))
                observers.append(recorder)
            yield observers
        if self.record is not None and not self.quiet:
            note(f"{recorder.num_steps} steps written to {self.record}")
        if self.trace is not None and not self.quiet:
            note(f"{trace.num_events} events written to {self.trace}, for https://ui.perfetto.dev")

    @contextmanager
    def exported(self, engine: "Engine") -> Iterator[None]:
        """Serve the metrics of ``engine``; write them now and at the end of the run, even if it failed.

        Raises:
            UsageError: The file cannot be written, or the port is taken.
        """
        if not self._has_metrics:
            yield
            return
        from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415  an extra

        from graphpact_engine.metrics import EngineCollector  # noqa: PLC0415

        registry = CollectorRegistry()
        registry.register(EngineCollector(engine))

        def write() -> None:
            if self.metrics is not None:
                write_file(self.metrics, generate_latest(registry).decode())

        write()  # fails before the run if the path cannot be written
        with ExitStack() as stack:
            if self.metrics_port is not None:
                stack.enter_context(self._served(registry, self.metrics_port))
            stack.callback(write)
            yield

    @property
    def _has_metrics(self) -> bool:
        return self.metrics is not None or self.metrics_port is not None

    @contextmanager
    def _served(self, registry: object, port: int) -> Iterator[None]:
        from prometheus_client import start_http_server  # noqa: PLC0415  an extra

        try:
            server, thread = start_http_server(port, _ADDRESS, registry)  # type: ignore[arg-type]
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"metrics cannot be served at port {port}: {reason}",
                hint="name a free port, or 0 for any free one",
            ) from error
        if not self.quiet:
            note(f"metrics at http://{_ADDRESS}:{server.server_port}/metrics")
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _step_metrics() -> object:
    try:
        from graphpact_engine.metrics import StepMetrics  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise UsageError(
            "metrics need prometheus-client, which is not installed",
            hint='pip install "graphpact-engine[metrics]"',
        ) from error
    return StepMetrics()
