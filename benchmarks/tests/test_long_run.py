"""A long run records what each decode step had, and finds what the slowest ones have in common."""

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphpact_bench import long_run
from graphpact_bench.long_run import (
    COLLECTED,
    EAGER,
    FIRST_FILL,
    NONE,
    OTHERS,
    PAGE,
    SEEN,
    WAITED,
    DecodeRecord,
    LongRun,
    attribute,
    describe_slowest,
    describe_times,
    measure,
    serve,
)
from graphpact_bench.models import ModelShape, save_model
from graphpact_bench.options import BenchOptions
from graphpact_bench.report import BenchReport
from graphpact_bench.timing import UnavailableWayError
from graphpact_bench.ways.engines import make_engine
from graphpact_cli import main
from graphpact_engine import Engine
from graphpact_engine.request import Request

SHAPE = ModelShape(width=32, layers=1, heads=2, kv_heads=2, intermediate=48)
PAGE_SIZE = 16


def steps(count: int, size: str = "4", seconds: float = 1.0) -> list[DecodeRecord]:
    """Return equal steps without a cause, none of which waited."""
    return [DecodeRecord(size, seconds, seconds, frozenset())] * count


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    """Return a function that makes an engine of up to three requests; it is closed at the end."""
    made: list[Engine] = []

    def make(*overrides: str) -> Engine:
        save_model(tmp_path, SHAPE, 160)
        tape = ('lanes.decode.runner="cuda_graph"', 'lanes.decode.graph_driver="tape"')
        size = f"engine.page_size={PAGE_SIZE}"
        made.append(make_engine(tmp_path, torch.device("cpu"), 3, size, *tape, *overrides))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_quick_run_has_both_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Sixty decode steps are told by captured size; each cause has a row; memory is a note."""
    file = tmp_path / "out.json"
    assert main(["bench", "long-run", "--quick", "--json", str(file)]) == 0
    times, slowest = BenchReport.model_validate_json(file.read_text(encoding="utf-8")).tables
    assert sum(int(row["steps"] or 0) for row in times.rows) == 60
    for row in times.rows:
        x = [float(row[f"x_{key}"] or 0) for key in ("best", "low", "high", "p99", "worst")]
        assert x == sorted(x)
        assert x[1] <= 1 <= x[2]
    assert [each.what for each in times.skipped] == ["cpu_graph"]
    assert [row["cause"] for row in slowest.rows] == [*SEEN, WAITED, NONE]
    assert {row["slowest"] for row in slowest.rows} <= {0, 1}
    assert "tape: resident MiB before, after half and after all: " in capsys.readouterr().out


def test_the_slowest_are_those_furthest_from_the_median_of_their_size() -> None:
    """A step of a large size may take longer than the slowest, which is far from its own size's median."""
    slow = DecodeRecord("1", 0.3, 0.3, frozenset({COLLECTED}))
    records = [*steps(60, "1", 0.1), slow, *steps(39, "8", 1.0)]
    found = attribute(records)
    assert found[COLLECTED].slowest == found[COLLECTED].all == pytest.approx([3.0])
    assert found[NONE].slowest == []
    assert found[NONE].all == pytest.approx([1.0] * 99)


def test_a_step_has_every_cause_that_it_had() -> None:
    """A slow step with two causes counts for both; a fast one with a cause counts among all steps only."""
    slow = DecodeRecord("4", 5.0, 5.0, frozenset({OTHERS, PAGE}))
    fast = DecodeRecord("4", 1.0, 1.0, frozenset({PAGE}))
    found = attribute([*steps(98), slow, fast])
    assert {cause: len(each.slowest) for cause, each in found.items() if each.slowest} == {OTHERS: 1, PAGE: 1}
    assert {cause: len(each.all) for cause, each in found.items() if each.all} == {
        OTHERS: 1,
        PAGE: 2,
        NONE: 98,
    }


@pytest.mark.parametrize(
    ("seconds", "processor", "cause"), [(3.0, 1.9, WAITED), (3.0, 2.1, NONE), (0.9, 0.1, NONE)]
)
def test_a_step_waited_if_most_of_its_time_over_the_median_is_no_processor_time(
    seconds: float, processor: float, cause: str
) -> None:
    """More than half of the time over the median; a step below the median is not slow by waiting."""
    found = attribute([*steps(98), DecodeRecord("4", seconds, processor, frozenset())])
    assert seconds in found[cause].all
    assert len(found[WAITED].all) == (cause == WAITED)


def test_the_tables_count_and_divide() -> None:
    """Shares are those of the slowest 1% and of all steps; eager steps are a size of their own, the last."""
    slow = [DecodeRecord("8", 4.0, 1.0, frozenset({OTHERS}))] * 2
    other = [DecodeRecord("8", 2.0, 2.0, frozenset({OTHERS}))] * 2
    eager = [DecodeRecord(EAGER, 9.0, 9.0, frozenset({EAGER}))] * 4
    runs = {
        "tape": LongRun([*eager, *steps(180, "8", 2.0), *slow, *other, *steps(12, "16", 3.0)], "no memory")
    }
    times = describe_times("a run", runs)
    assert [(row["size"], row["steps"], row["median_ms"], row["x_worst"]) for row in times.rows] == [
        ("8", 184, 2000, 2),
        ("16", 12, 3000, 1),
        (EAGER, 4, 9000, 1),
    ]
    assert [row["x_processor_worst"] for row in times.rows] == [1, 1, 1]  # those that waited computed less
    assert times.notes[0] == "tape: no memory"
    rows = {row.pop("cause"): row for row in describe_slowest("a run", runs).rows}
    assert rows[OTHERS] == {
        "graphs": "tape",
        "slowest": 2,
        "slowest_share": 1.0,
        "slowest_x": 2.0,
        "all": 4,
        "all_share": 0.02,
        "all_x": 1.5,
    }
    assert (rows[WAITED]["slowest"], rows[EAGER]["slowest"], rows[EAGER]["all"]) == (2, 0, 4)
    assert rows[COLLECTED]["slowest_x"] is None


def test_what_a_step_had_is_what_happened_in_it(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other batches, pages, eager runs and collections are those of the steps as the engine ran them."""
    expected: list[set[str]] = []
    step, before = Engine.step, list[Request]()

    def watched(self: Engine) -> list[Request]:
        counts = self.lanes[0].stats.eager.total() + self.lanes[0].stats.replays
        planned = self.scheduler.schedule()  # planning a step again is free
        assert planned is not None
        is_decode, requests = planned.batch.forward_mode.is_decode, planned.requests
        pages = any(request.num_computed % PAGE_SIZE == 0 for request in requests)
        collects = len(expected) % 7 == 3
        if collects:
            gc.collect()
        got = step(self)
        assert (self.lanes[0].stats.eager.total() + self.lanes[0].stats.replays > counts) is is_decode
        if is_decode:
            is_eager = len(requests) == 3
            had = {OTHERS: requests != before, PAGE: pages, EAGER: is_eager, COLLECTED: collects}
            expected.append({cause for cause, has in had.items() if has})
            before[:] = requests
        return got

    monkeypatch.setattr(Engine, "step", watched)
    gc.disable()
    try:
        records = list(serve(engine("lanes.decode.batch_sizes=[1, 2]"), 256, 80))
    finally:
        gc.enable()
    assert [set(record.seen) for record in records] == expected
    assert set().union(*expected) == {OTHERS, PAGE, EAGER, COLLECTED}
    assert {record.size for record in records} == {"1", "2", EAGER}


def test_the_first_fill_of_its_counts_is_a_cause_once(engine: Callable[..., Engine]) -> None:
    """One request in a graph of three rows is filled by a plan of its own, made in its first step alone."""
    made = engine("lanes.decode.batch_sizes=[3]")
    firsts = [FIRST_FILL in record.seen for record in serve(made, 256, 60)]
    registry = made.lanes[0].registry
    assert registry is not None
    assert sum(firsts) == len(registry._plans) - 1 > 0  # the capture made the plan of a full graph
    assert firsts[0]


def test_times_are_those_of_the_step_alone(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall time and the processor time of a step are what two clocks went on by in it."""
    step, wall, processor = Engine.step, [0], [0]

    def slow(self: Engine) -> list[Request]:
        wall[0] += 5
        processor[0] += 3
        return step(self)

    def read(clock: list[int]) -> int:
        clock[0] += 1
        return clock[0]

    clocks = SimpleNamespace(perf_counter=lambda: read(wall), thread_time=lambda: read(processor))
    monkeypatch.setattr(long_run, "time", clocks)
    monkeypatch.setattr(Engine, "step", slow)
    records = list(serve(engine("lanes.decode.batch_sizes=[1, 2, 3]"), 256, 40))
    assert {(record.seconds, record.processor) for record in records} == {(6, 4)}


def test_a_gpu_has_no_long_run() -> None:
    """It compares with processor time, so another device is refused with that reason."""
    with pytest.raises(UnavailableWayError, match="time of a processor"):
        next(measure(BenchOptions(device=torch.device("cuda"))))
