"""What a guard counted, as Prometheus sees it and as the log says it at the end of a process."""

import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from small_engine import Backend, SmallEngine
from test_guard import _guard, _steps

from graphpact_guard import Guard, Ignored, log_at_exit
from graphpact_guard.closing import closing_line
from graphpact_guard.metrics import GuardMetrics


class Rebound(Backend):
    """Fills new memory in a replay."""

    def prepare(self, lengths: Any, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        super().prepare(lengths, in_capture=in_capture)
        if not in_capture:
            self.forward_metadata.lengths = self.forward_metadata.lengths.clone() + 1


def _run(backend: Callable[..., Backend] = Rebound, **settings: Any) -> Guard:
    guard = _guard(**settings)
    _steps(SmallEngine(backend(4), guard), count=12)
    return guard


def test_metrics_have_what_the_guard_counted() -> None:
    """Replays by graph and faults by rule, owner and field, with the labels of the process."""
    guard, registry = _guard(on_fault="eager"), CollectorRegistry()
    metrics = GuardMetrics(guard, {"tp_rank": "1"}, registry)
    engine = SmallEngine(Rebound(4), guard)
    for _ in range(2):  # the second update adds the difference
        _steps(engine, count=6)
        metrics.update()
    for key, record in guard.records.items():
        labels = {"tp_rank": "1", "runner": key.runner, "shape": key.shape}
        assert registry.get_sample_value("graphpact_replays_total", labels) == record.replays > 0
    fault = next(iter(guard.log.faults.values()))
    labels = {"tp_rank": "1", "rule": fault.rule, "owner": fault.owner, "field": fault.field}
    assert registry.get_sample_value("graphpact_faults_total", labels) == guard.log.counts.total() > 1
    refused = registry.get_sample_value("graphpact_graphs_refused", {"tp_rank": "1"})
    assert refused == len(guard.refused) > 0


def test_counts_that_begin_anew_are_added() -> None:
    """An update while synthetic steps run, and one after them: a counter never goes back."""
    guard, registry = _guard(), CollectorRegistry()
    metrics, engine = GuardMetrics(guard, {}, registry), SmallEngine(Backend(4), guard)
    with guard.starting():
        _steps(engine, count=6)
        metrics.update()
    _steps(engine, count=2)
    metrics.update()
    taken = [
        registry.get_sample_value("graphpact_replays_total", {"runner": key.runner, "shape": key.shape})
        for key in guard.records
    ]
    assert sum(each or 0 for each in taken) == 8


_SCRAPE = """
import os, sys, multiprocessing
sys.path.insert(0, sys.argv[1])
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from test_metrics import _run
from graphpact_guard.metrics import GuardMetrics

def work(rank):
    GuardMetrics(_run(), {"tp_rank": str(rank)}).update_every(60)

if __name__ == "__main__":
    for rank in (0, 1):
        child = multiprocessing.get_context("spawn").Process(target=work, args=(rank,))
        child.start(); child.join()
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
"""


@pytest.mark.sweep
def test_another_process_serves_the_metrics(tmp_path: Path) -> None:
    """In prometheus_client's multiprocess mode, as engines serve them, each process has its samples."""
    script = tmp_path / "scrape.py"
    script.write_text(_SCRAPE)
    (tmp_path / "metrics").mkdir()
    done = subprocess.run(
        [sys.executable, str(script), str(Path(__file__).parent)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")},
    )
    for rank in (0, 1):
        assert f'graphpact_replays_total{{runner="Runner",shape="4",tp_rank="{rank}"}}' in done.stdout
        assert f'graphpact_graphs_refused{{tp_rank="{rank}"}} 0.0' in done.stdout


def test_the_closing_line_has_every_count() -> None:
    """Replays, checks, faults by rule, ignored faults and refused graphs."""
    line = closing_line(_run(on_fault="eager"))
    assert line.startswith(
        "12 replays of 2 graphs; contents checked in 0; 0 verified; 2 faults (GP01 12 times)"
    )
    assert "; refused: Runner[" in line
    ignored = closing_line(_run(ignore=(Ignored("GP01", "*", "a test"),)))
    assert ignored.startswith(
        "12 replays of 2 graphs; contents checked in 0; 0 verified; 0 faults; 12 ignored"
    )


def _child() -> None:
    logging.basicConfig(force=True)  # a forked child has the handlers of pytest
    log_at_exit(_run(Backend))


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_child_of_multiprocessing_logs_at_its_end(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Children leave out ``atexit``; the line is there all the same."""
    child = multiprocessing.get_context(how).Process(target=_child)
    child.start()
    child.join()
    assert "graphpact guard: 12 replays of 2 graphs;" in capfd.readouterr().err
