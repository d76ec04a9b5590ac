"""Prometheus metrics of a guard: `GuardMetrics`.

    metrics = GuardMetrics(guard, {"rank": "0"})
    metrics.update_every(5.0)

Engines of several processes serve the metrics of all of them from files (prometheus_client's multiprocess
mode), which shows counters and gauges and no custom collector. So these are counters, and `update` adds what
was counted since the last time. A replay takes no longer. The package prometheus-client is the extra
``graphpact-guard[metrics]``; a process imports this module after its engine has chosen the mode.

Does not: serve metrics; the engine does.
"""

import threading
from collections.abc import Mapping
from typing import TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from graphpact_guard.guard import Guard

M = TypeVar("M", Counter, Gauge)
_GRAPH = ("runner", "shape")
_FAULT = ("rule", "owner", "field")


class GuardMetrics:
    """The metrics of one guard.

    Args:
        guard: The guard.
        labels: Labels of all metrics, such as the rank of the process.
        registry: Where the metrics are registered.

    Raises:
        ValueError: The registry has the metrics of another guard.
    """

    def __init__(
        self,
        guard: Guard,
        labels: Mapping[str, str] | None = None,
        registry: CollectorRegistry | None = REGISTRY,
    ) -> None:
        self._guard = guard
        self._labels = tuple((labels or {}).values())
        self._written: dict[tuple[Counter, tuple[str, ...]], int] = {}
        self._lock = threading.Lock()
        names = tuple(labels or {})

        def counter(name: str, text: str, *own: str) -> Counter:
            return Counter(f"graphpact_{name}", text, (*names, *own), registry=registry)

        self._replays = counter("replays", "Replays of a captured shape.", *_GRAPH)
        self._contents = counter("contents_checks", "Replays whose contents were checked.", *_GRAPH)
        self._verified = counter("verified_replays", "Replays that were compared with an eager run.", *_GRAPH)
        self._faults = counter("faults", "Faults of replays, each time they were found.", *_FAULT)
        self._ignored = counter("faults_ignored", "Faults that the settings ignore.")
        self._refused = Gauge(
            "graphpact_graphs_refused",
            "Graphs that are not replayed any more after a fault.",
            names,
            registry=registry,
            multiprocess_mode="mostrecent",
        )

    def update(self) -> None:
        """Add what was counted since the last update. It may be called from any thread."""
        with self._lock:
            for key, record in list(self._guard.records.items()):
                self._count(self._replays, record.replays, key.runner, key.shape)
                self._count(self._contents, record.contents, key.runner, key.shape)
                self._count(self._verified, record.verified, key.runner, key.shape)
            faults: dict[tuple[str, str, str], int] = {}
            for (rule, owner, field, _), count in list(self._guard.log.counts.items()):
                faults[rule, owner, field] = faults.get((rule, owner, field), 0) + count
            for labels, count in faults.items():
                self._count(self._faults, count, *labels)
            self._count(self._ignored, self._guard.log.num_ignored)
            self._child(self._refused).set(len(self._guard.refused))

    def update_every(self, seconds: float) -> None:
        """Update now, and in a thread until the process ends."""
        self.update()
        pause = threading.Event()

        def work() -> None:
            while not pause.wait(seconds):
                self.update()

        threading.Thread(target=work, name="graphpact-metrics", daemon=True).start()

    def _count(self, counter: Counter, total: int, *labels: str) -> None:
        written = self._written.get((counter, labels), 0)
        if total < written:  # counts begin anew after synthetic steps
            written = 0
        self._child(counter, *labels).inc(total - written)
        self._written[counter, labels] = total

    def _child(self, metric: M, *labels: str) -> M:
        every = (*self._labels, *labels)
        return metric.labels(*every) if every else metric
