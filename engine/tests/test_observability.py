"""Tests of traces, metrics and logs: they report what an engine did, and wrap nothing unless asked for."""

import json
import logging
import urllib.request
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from graphpact import ForwardMode, Lane
from graphpact.errors import PactBreach
from graphpact.hookspecs import hookimpl
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.cli.observing import Observation
from graphpact_engine.config import EngineConfig
from graphpact_engine.logs import JsonFormatter, log_to_stderr
from graphpact_engine.metrics import EngineCollector, StepMetrics
from graphpact_engine.phases import Around
from graphpact_engine.timeline import ChromeTrace

MODELS = Path(__file__).parents[2] / "examples/models"
PROMPTS = [[5, 6, 7], [8, 9], [10] * 20]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def build(*overrides: str, observers: Any = ()) -> Engine:
    """Return an engine of the example model with two captured shapes."""
    settings = [
        f'model.path="{MODELS / "tiny-llama"}"',
        'engine.device="cpu"',
        "engine.max_num_seqs=4",
        "engine.max_model_len=64",
        "lanes.decode.batch_sizes=[2, 4]",
        *overrides,
    ]
    return Engine(EngineConfig.load(None, env={}, overrides=settings), observers=observers)


class BreaksPact:
    """An observer that gives the third replay its own metadata."""

    def __init__(self) -> None:
        self.num_calls = 0

    @hookimpl(wrapper=True)
    def init_metadata_replay(self) -> Around:
        """Return an object other than the capture's."""
        metadata = yield
        self.num_calls += 1
        return object() if self.num_calls == 3 else metadata


def generate(engine: Engine, count: int = 5) -> None:
    """Generate ``count`` tokens for each prompt."""
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=count, ignore_eos=True))


# -- traces ----------------------------------------------------------------------------------------

Event = dict[str, Any]


def read_trace(path: Path) -> list[Event]:
    """Return the spans of a trace, in the order in which they began; the outer one first."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    return sorted(spans, key=lambda event: (event["ts"], -event["dur"]))


def inside(spans: list[Event], outer: Event) -> list[Event]:
    """Return the spans within ``outer`` that are in no other span of it."""
    end = outer["ts"] + outer["dur"]
    within = [e for e in spans if e is not outer and outer["ts"] <= e["ts"] and e["ts"] + e["dur"] <= end]
    top: list[Event] = []
    for span in within:
        if not top or span["ts"] >= top[-1]["ts"] + top[-1]["dur"]:
            top.append(span)
    return top


def test_a_trace_has_the_phases_of_every_step_in_their_order(tmp_path: Path) -> None:
    """Steps, the steps of lanes in them, and the phases of these nest as they were called."""
    path = tmp_path / "trace.json"
    with ChromeTrace(path) as trace, build(observers=[trace]) as engine:
        generate(engine)
    spans = read_trace(path)
    steps = [span for span in spans if span["name"] == "step"]
    assert len(steps) == 5
    for at, step in enumerate(steps):
        name = "prefill" if at == 0 else "decode"
        parts = inside(spans, step)
        assert [part["name"] for part in parts] == ["schedule", f"lane {name}", "sample", "commit"]
        phases = inside(spans, parts[1])
        assert all(phase["args"]["lane"] == name for phase in phases)
        assert all(phase["args"]["batch_size"] == 3 for phase in phases)
        if at == 0:
            (launch,) = phases
            assert (launch["name"], launch["args"]["reason"]) == ("eager run", "no_graphs")
            continue
        hooks = ["populate", "prepare_replay", "init_metadata_replay"]
        assert [phase["name"] for phase in phases] == [*hooks, "pact check", "replay"]
        assert {phase["args"].get("shape", "decode[bs=4, tokens=4]") for phase in phases} == {
            "decode[bs=4, tokens=4]"
        }
    for one, other in pairwise(steps):
        assert one["ts"] + one["dur"] <= other["ts"]


def test_a_trace_has_every_capture_with_its_hooks(tmp_path: Path) -> None:
    """Each captured shape is a span of its lane, around the hooks that prepared it."""
    path = tmp_path / "trace.json"
    with ChromeTrace(path) as trace, build(observers=[trace]):
        pass
    spans = read_trace(path)
    captures = [span for span in spans if span["name"] == "capture"]
    assert [span["args"]["shape"] for span in captures] == [
        "decode[bs=4, tokens=4]",
        "decode[bs=2, tokens=2]",
    ]
    for capture in captures:
        hooks = inside(spans, capture)
        names = ["populate", "prepare_replay", "init_metadata_capture"]
        assert [hook["name"] for hook in hooks] == names
        assert all(hook["args"] == capture["args"] for hook in hooks)


def test_a_pact_that_is_not_checked_is_no_span(tmp_path: Path) -> None:
    """Spans of pact checks are those that the lane counts, also if only some replays are checked."""
    path = tmp_path / "trace.json"
    with ChromeTrace(path) as trace, build('verify.pact="sampled"', observers=[trace]) as engine:
        generate(engine, 8)
    names = Counter(span["name"] for span in read_trace(path))
    assert names["replay"] == 7
    assert names["pact check"] == engine.lanes[0].stats.pact_checks == 1


def test_a_trace_is_whole_after_an_error_and_names_it(tmp_path: Path) -> None:
    """A run that ends with an error leaves valid JSON; every phase around the error has its name."""
    path = tmp_path / "trace.json"
    with (
        pytest.raises(PactBreach),
        ChromeTrace(path) as trace,
        build(observers=[trace, BreaksPact()]) as engine,
    ):
        generate(engine)
    failed = [(e["name"], e["args"]["error"]) for e in read_trace(path) if "error" in e["args"]]
    assert failed == [(name, "PactBreach") for name in ("step", "lane decode", "pact check")]


def test_a_long_trace_is_written_while_the_run_lasts(tmp_path: Path) -> None:
    """Events do not wait in memory for the end of the run, and none is lost on the way."""
    path = tmp_path / "trace.json"
    with ChromeTrace(path) as trace, build("engine.max_model_len=512", observers=[trace]) as engine:
        generate(engine, 400)
        assert trace.num_events > 2000
    spans = read_trace(path)
    assert len(spans) == trace.num_events - 1  # the other one names the process
    assert Counter(span["name"] for span in spans)["replay"] == 399


def test_without_an_observer_of_phases_nothing_is_wrapped() -> None:
    """An engine calls scheduler and sampler themselves, and its lanes are plain ones."""
    with build() as engine:
        assert [type(lane) for lane in engine.lanes] == [Lane, Lane]
        assert engine._loop._schedule == engine.scheduler.schedule
        assert engine._loop._commit == engine.scheduler.commit
        assert engine._run_step == engine._loop.step


# -- metrics ---------------------------------------------------------------------------------------


def scrape(engine: Engine) -> Samples:
    """Return the samples of an engine in the text format, by name and labels; each has one value."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(EngineCollector(engine))
    samples: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.documentation
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    """Return the value of one sample."""
    return samples[f"graphpact_{name}", frozenset(labels.items())]


def test_metrics_are_what_lanes_and_scheduler_count() -> None:
    """Replays, tokens with and without padding, eager runs by reason, captures, requests and tokens."""
    with build() as engine:
        generate(engine)
        samples = scrape(engine)
        shape = {"lane": "decode", "mode": "decode", "shape": "bs=4,tokens=4"}
        assert value(samples, "replays_total", **shape) == 4
        assert value(samples, "live_tokens_total", **shape) == 12
        assert value(samples, "padded_tokens_total", **shape) == 16
        assert value(samples, "replays_total", **{**shape, "shape": "bs=2,tokens=2"}) == 0
        eager = {"lane": "prefill", "mode": "mixed", "reason": "no_graphs"}
        assert value(samples, "eager_runs_total", **eager) == 1
        assert value(samples, "pact_checks_total", lane="decode") == 4
        (record,) = (one for each, one in engine.lanes[0].captured.items() if each.batch_size == 4)
        assert value(samples, "capture_seconds", **shape) == record.stats.capture_seconds > 0
        assert value(samples, "graph_memory_bytes", **shape) == record.graph.pool_nbytes > 0
        assert value(samples, "graph_nodes", **shape) == record.graph.num_nodes > 0
        assert value(samples, "requests_total") == 3
        assert value(samples, "requests_finished_total", reason="length") == 3
        assert value(samples, "prompt_tokens_total") == sum(map(len, PROMPTS))
        assert value(samples, "generated_tokens_total") == 15
        assert value(samples, "kv_pages", state="used") == 0
    closed = scrape(engine)
    assert ("graphpact_graph_memory_bytes", frozenset(shape.items())) not in closed
    assert value(closed, "replays_total", **shape) == 4


def test_metrics_tell_the_state_of_the_queue_and_of_its_memory() -> None:
    """Requests that run, wait, were preempted or aborted, and the pages that they own."""
    with build("engine.num_pages=5", "engine.max_num_seqs=2", "lanes.decode.batch_sizes=[2]") as engine:
        requests = [engine.add([5] * 20, SamplingParams(max_new_tokens=20, ignore_eos=True)) for _ in "abc"]
        engine.step()
        engine.abort(requests[2])
        samples = scrape(engine)
        assert value(samples, "requests_running") == 2
        assert value(samples, "requests_waiting") == 0
        assert value(samples, "requests_finished_total", reason="abort") == 1
        assert value(samples, "kv_pages", state="used") == 4
        assert value(samples, "kv_pages", state="free") == 1
        while engine.scheduler.has_work:
            engine.step()
        samples = scrape(engine)
        again = requests[1].num_preemptions
        assert value(samples, "preemptions_total") == again == 1
        assert value(samples, "prompt_tokens_total") > 40  # it was computed again
        assert value(samples, "generated_tokens_total") == 40


@pytest.mark.parametrize("selected", [True, False])
def test_the_observer_measures_every_step_and_phase_once(*, selected: bool) -> None:
    """Selected by name, one for each lane, or given as one object: each lane's steps are counted once."""
    overrides = ['engine.observers=["metrics"]'] if selected else []
    with build(*overrides, observers=[] if selected else [StepMetrics()]) as engine:
        generate(engine)
        samples = scrape(engine)
    decode = {"lane": "decode", "mode": "decode", "run": "replay"}
    assert value(samples, "lane_step_seconds_count", **decode) == 4
    assert value(samples, "lane_step_seconds_bucket", **decode, le="+Inf") == 4
    prefill = {"lane": "prefill", "mode": "mixed", "run": "eager"}
    assert value(samples, "lane_step_seconds_count", **prefill) == 1
    spent = {
        phase: value(samples, "engine_phase_seconds_sum", phase=phase)
        for phase in ("step", "schedule", "sample", "commit")
    }
    assert value(samples, "engine_phase_seconds_count", phase="step") == 5
    assert sum(spent.values()) < 2 * spent["step"]


def test_breaches_are_counted_by_rule(caplog: pytest.LogCaptureFixture) -> None:
    """A step that ends because the contract was broken is counted and logged under the rule."""
    with build(observers=[BreaksPact()]) as engine:
        with pytest.raises(PactBreach) as caught, caplog.at_level(logging.INFO, "graphpact_engine"):
            generate(engine)
        rule = str(caught.value.rule)
        assert value(scrape(engine), "pact_breaches_total", rule=rule, error="PactBreach") == 1
    (logged,) = (record for record in caplog.records if record.getMessage() == "pact breach")
    assert json.loads(JsonFormatter().format(logged))["rule"] == rule
    assert logged.levelno == logging.ERROR


def test_metrics_have_the_accepted_tokens_of_drafts() -> None:
    """Drafts and their accepted tokens, by position, are those that speculation counts."""
    eagle = [
        'speculative.algorithm="eagle"',
        f'speculative.draft_model="{MODELS / "tiny-llama-eagle"}"',
    ]
    settings = [f'model.path="{MODELS / "tiny-llama"}"', 'engine.device="cpu"', "engine.max_model_len=64"]
    with Engine(EngineConfig.load(None, env={}, overrides=[*settings, *eagle])) as engine:
        generate(engine, 20)
        samples = scrape(engine)
        assert engine.speculation is not None
        stats = engine.speculation.stats
        assert value(samples, "verifications_total") == stats.verifications > 0
        assert value(samples, "accepted_tokens_total", position="1") == stats.accepted[1] > 0
        # Each verification gives a token besides, except for drafts beyond a request's last token.
        assert value(samples, "generated_tokens_total") == 60


def test_metrics_are_served_while_the_run_lasts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The port returns current counts; the file has those at the end of the run, also after an error."""
    file = tmp_path / "metrics.prom"
    observation = Observation(metrics=file, metrics_port=0)

    def run(engine: Engine) -> str:
        with observation.exported(engine):
            assert "graphpact_requests_total 0.0" in file.read_text()
            (note,) = (line for line in capsys.readouterr().err.splitlines() if "http://" in line)
            address = note.removeprefix("metrics at ")
            generate(engine)
            with urllib.request.urlopen(address, timeout=30) as answer:  # noqa: S310  an address of ours
                assert b"graphpact_requests_total 3.0" in answer.read()
            engine.add([1, 2])
            raise KeyError(address)

    with build() as engine, pytest.raises(KeyError) as caught:
        run(engine)
    assert "graphpact_requests_total 4.0" in file.read_text()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(caught.value.args[0], timeout=30)  # noqa: S310  an address of ours


# -- logs ------------------------------------------------------------------------------------------


Log = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Log:
    """Return a function that returns the events that were printed as JSON since the last call."""
    return lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def fields(events: list[dict[str, Any]], event: str, *names: str) -> list[tuple[Any, ...]]:
    """Return some fields of each event of a kind."""
    return [tuple(each[name] for name in names) for each in events if each["event"] == event]


def test_logs_tell_the_life_of_an_engine(log: Log) -> None:
    """Captures, the start, each new reason of an eager run once, and the end of each request."""
    with log_to_stderr("json"), build("engine.max_num_seqs=4", "lanes.decode.batch_sizes=[2]") as engine:
        started = log()
        assert fields(started, "shape captured", "lane", "shape") == [("decode", "decode[bs=2, tokens=2]")]
        assert fields(started, "engine started", "device", "lanes", "shapes") == [
            ("cpu", "decode,prefill", 1)
        ]
        generate(engine)
        generate(engine)
        events = log()
    reasons = [("prefill", "mixed", "no_graphs", 3), ("decode", "decode", "over_largest", 3)]
    assert fields(events, "eager run", "lane", "mode", "reason", "batch_size") == reasons
    assert engine.lanes[0].stats.eager.total() == 8
    ends = fields(events, "request finished", "request", "reason", "prompt_tokens", "generated_tokens")
    assert ends == [(str(at), "length", len(PROMPTS[at % 3]), 5) for at in range(6)]
    assert all({"time", "level", "logger"} <= event.keys() for event in events)


def test_logs_tell_preemptions(log: Log) -> None:
    """A request whose memory is taken is logged with its tokens."""
    with (
        log_to_stderr("json"),
        build("engine.num_pages=5", "engine.max_num_seqs=2", "lanes.decode.batch_sizes=[2]") as engine,
    ):
        sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
        engine.generate([[5] * 20, [5] * 20], sampling)
    assert fields(log(), "request preempted", "request", "times") == [("1", 1)]


def test_the_last_reason_of_a_text_is_its_stop_string(
    log: Log,
) -> None:
    """A request that ends by its limit and by a stop string in one token is logged and counted as a stop."""
    with log_to_stderr("json"), build() as engine:
        text = engine.generate(["If "], SamplingParams(max_new_tokens=4))[0].text
        log()
        (answer,) = engine.generate(["If "], SamplingParams(max_new_tokens=4, stop=[text[-1:]]))
        assert fields(log(), "request finished", "reason") == [("stop",)]
        assert answer.finish_reason == "stop"
        assert engine.scheduler.num_finished == {"length": 1, "stop": 1}


def test_events_are_silent_unless_somebody_listens(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a handler no event reaches stderr, not even that of an error."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        with build(observers=[BreaksPact()]) as engine, pytest.raises(PactBreach):
            generate(engine)
    finally:
        root.handlers = handlers
    assert "pact breach" not in capfd.readouterr().err


def test_modes_of_eager_runs_are_logged_each(log: Log) -> None:
    """One reason in two modes of a lane is logged for each mode."""
    with log_to_stderr("json"), build("lanes.decode.capture=false", "engine.mixed=false") as engine:
        generate(engine)
        events = log()
    modes = [(ForwardMode.EXTEND.value,), (ForwardMode.DECODE.value,)]
    assert fields(events, "eager run", "mode") == modes
