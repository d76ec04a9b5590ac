"""Prometheus metrics of an engine: `EngineCollector`, and the observer `StepMetrics`.

    engine = Engine(config, observers=[StepMetrics()])
    registry.register(EngineCollector(engine))        # a registry of prometheus_client

When it is scraped, the collector reads counts of lanes, scheduler and verifiers, so a step takes no longer.
The observer measures times, which are counted nowhere else; its plugin name is ``metrics``. The package
prometheus-client is the extra ``graphpact-engine[metrics]``.

Does not: serve metrics (prometheus_client does), or time a device: on a GPU a step of a lane lasts until its
work is submitted, and the phases of the engine include the wait for it.
"""

import time
from collections.abc import Iterator

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphpact.batch import ForwardBatch
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane
from graphpact.shapes import GraphShape
from graphpact_engine.engine import Engine
from graphpact_engine.phases import Around, Phase

_SECONDS = tuple(base * 10.0**power for power in range(-5, 1) for base in (1, 2.5, 5))
"""Bounds of the buckets of times: 10 microseconds to 5 seconds."""

_SHAPE = ("lane", "mode", "shape")


class StepMetrics:
    """An observer that measures the time of every step of a lane, and of the engine's phases.

    One object may serve every lane. `EngineCollector` finds it in the lanes of its engine.
    """

    def __init__(self) -> None:
        self._lanes = Histogram(
            "graphpact_lane_step_seconds",
            "Host time of a step of a lane, by forward mode and by how it ran: replay or eager.",
            ("lane", "mode", "run"),
            buckets=_SECONDS,
            registry=None,
        )
        self._phases = Histogram(
            "graphpact_engine_phase_seconds",
            "Host time of a phase of the engine; step is all of a step.",
            ("phase",),
            buckets=_SECONDS,
            registry=None,
        )

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> Around:
        """Measure a step of a lane. A step that raises is not measured."""
        eager_runs = lane.stats.eager.total()
        start = time.perf_counter()
        outputs = yield
        seconds = time.perf_counter() - start
        run = "eager" if lane.stats.eager.total() > eager_runs else "replay"
        self._lanes.labels(lane.name, batch.forward_mode.value, run).observe(seconds)
        return outputs

    @hookimpl(wrapper=True)
    def engine_phase(self, phase: Phase) -> Around:
        """Measure a phase of the engine. One that raises is not measured."""
        start = time.perf_counter()
        result = yield
        self._phases.labels(phase).observe(time.perf_counter() - start)
        return result

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from self._lanes.collect()
        yield from self._phases.collect()


class EngineCollector(Collector):
    """A collector of everything that an engine counts, for a registry of prometheus_client.

    It may be scraped from another thread while the engine runs. The memory of graphs is reported until the
    engine is closed.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine, and those of each `StepMetrics` that observes it."""
        yield from self._of_lanes()
        yield from self._of_requests()
        yield from self._of_speculation()
        yield from self._of_observers()

    def _of_lanes(self) -> Iterator[Metric]:
        replays = _counter("replays", "Replays of a captured shape.", *_SHAPE)
        live = _counter("live_tokens", "Tokens of requests in the replays of a shape.", *_SHAPE)
        # Not only the padding: a difference of two counts may decrease while a step changes them.
        padded = _counter("padded_tokens", "Tokens in the replays of a shape, with padding.", *_SHAPE)
        eager = _counter("eager_runs", "Steps without a graph, by reason.", "lane", "mode", "reason")
        seconds = _gauge("capture_seconds", "Time that the capture of a shape took.", *_SHAPE)
        nodes = _gauge("graph_nodes", "Recorded operations of a graph.", *_SHAPE)
        memory = _gauge("graph_memory_bytes", "Memory that a graph allocated and keeps.", *_SHAPE)
        checks = _counter("pact_checks", "Replays whose pact was checked.", "lane")
        for lane in self._engine.lanes:
            stats, captured = lane.stats, dict(lane.captured)
            checks.add_metric([lane.name], stats.pact_checks)
            for shape, at in list(stats.shapes.items()):
                labels = [lane.name, shape.mode.value, _label(shape)]
                replays.add_metric(labels, at.replays)
                live.add_metric(labels, at.raw_tokens)
                padded.add_metric(labels, at.replays * shape.num_tokens)
                seconds.add_metric(labels, at.capture_seconds)
                if at.num_nodes >= 0:
                    nodes.add_metric(labels, at.num_nodes)
                if shape in captured and captured[shape].graph.pool_nbytes >= 0:
                    memory.add_metric(labels, captured[shape].graph.pool_nbytes)
            for (mode, reason), count in list(stats.eager.items()):
                eager.add_metric([lane.name, mode.value, reason.name], count)
        yield from (replays, live, padded, eager, seconds, nodes, memory, checks)
        verified = _counter("verified_replays", "Replays that were compared with an eager run.", "lane")
        for verifier in self._engine.verifiers:
            if verifier.verified:  # its lane is unknown before its first step
                verified.add_metric([verifier.lane.name], verifier.verified)
        yield verified
        breaches = _counter(
            "pact_breaches", "Steps that ended because the contract was broken, by rule.", "rule", "error"
        )
        for (rule, error), count in list(self._engine.breaches.items()):
            breaches.add_metric([rule, error], count)
        yield breaches

    def _of_requests(self) -> Iterator[Metric]:
        scheduler = self._engine.scheduler
        yield _total("requests", "Requests that were queued.", scheduler.num_added)
        finished = _counter("requests_finished", "Requests that ended, by reason.", "reason")
        for reason, count in list(scheduler.num_finished.items()):
            finished.add_metric([reason], count)
        yield finished
        running = _gauge("requests_running", "Requests that own memory.")
        running.add_metric([], scheduler.num_running)
        waiting = _gauge("requests_waiting", "Requests in the queue, preempted ones too.")
        waiting.add_metric([], scheduler.num_waiting)
        yield from (running, waiting)
        yield _total(
            "prompt_tokens", "Tokens computed in prefill, again after preemption.", scheduler.num_prefilled
        )
        yield _total("generated_tokens", "Tokens that requests received.", scheduler.num_generated)
        yield _total("preemptions", "Requests whose memory was taken.", scheduler.num_preemptions)
        pages = _gauge("kv_pages", "Pages of the KV cache.", "state")
        pool = self._engine.memory.pages
        pages.add_metric(["free"], pool.num_free)
        pages.add_metric(["used"], pool.num_pages - pool.num_free)
        yield pages

    def _of_speculation(self) -> Iterator[Metric]:
        speculation = self._engine.speculation
        if speculation is None:
            return
        stats = speculation.stats
        yield _total(
            "verifications", "Drafts that were verified, one per request and step.", stats.verifications
        )
        accepted = _counter(
            "accepted_tokens", "Accepted tokens of drafts, by position in the draft from 1.", "position"
        )
        for position, count in sorted(stats.accepted.copy().items()):
            accepted.add_metric([str(position)], count)
        yield accepted

    def _of_observers(self) -> Iterator[Metric]:
        """Yield the metrics of the observers; merge metrics of one name from several lanes."""
        found: dict[int, StepMetrics] = {}
        for lane in self._engine.lanes:
            for plugin in lane.hooks.manager.get_plugins():
                if isinstance(plugin, StepMetrics):
                    found[id(plugin)] = plugin
        metrics: dict[str, Metric] = {}
        for observer in found.values():
            for metric in observer.collect():
                first = metrics.setdefault(metric.name, metric)
                if first is not metric:
                    first.samples.extend(metric.samples)
        yield from metrics.values()


def _label(shape: GraphShape) -> str:
    """Return a shape without its mode, because the mode is a separate label."""
    variant = f",{shape.variant}" if shape.variant else ""
    return f"bs={shape.batch_size},tokens={shape.num_tokens}{variant}"


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"graphpact_{name}", text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"graphpact_{name}", text, labels=labels)


def _total(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"graphpact_{name}", text, value=value)
