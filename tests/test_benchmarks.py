"""The benchmarks run and their counts are right; their times are not checked."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from compiling import compiler  # noqa: F401  a fixture
from graphpact_cpu_graph import inductor

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run_quick(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines that a quick run of a benchmark prints."""
    monkeypatch.setattr(sys, "argv", [name, "--quick"])
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # as for a script
    runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


@pytest.fixture(params=[pytest.param(None, marks=pytest.mark.sweep), "no C++ compiler here"])
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Return why nothing can be compiled, which is then so; None where a compiler is there."""
    why: str | None = request.param
    if why is None:
        request.getfixturevalue("compiler")
    else:
        monkeypatch.setattr(inductor, "missing_compiler", lambda: why)
    return why


def test_a_fill_is_one_operation_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides leave the same rows; a fill of a lane is one operation, a loop one or two for each slot."""
    lines = run_quick("bench_fill.py", monkeypatch, capsys)
    lanes = [line.split() for line in lines if " lane " in line and line[0] in "dp"]
    assert [(row[0], row[2], row[3] != row[4], *row[-2:]) for row in lanes] == [
        ("decode", "6", True, "1", "12"),
        ("decode", "6", True, "1", "12"),
        ("decode", "6", False, "1", "6"),
        ("prefill", "3", True, "1", "6"),
        ("prefill", "3", False, "1", "3"),
    ]


def test_every_variant_generates_the_same_tokens(
    fault: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All variants generate the same tokens, every row is printed, and a skipped variant has a reason."""
    compiled = fault is None
    lines = run_quick("bench_graphs.py", monkeypatch, capsys)
    assert any("all variants generate the same tokens: 5 per prompt of 4" in line for line in lines)
    assert (f"cpu_graph is skipped: {fault}" in lines) is not compiled
    for size in (1, 8, 32):
        rows = [line for line in lines if re.match(rf" +{size}  [a-z]", line)]
        names = [re.split(r" {2,}", row.strip())[1] for row in rows]
        ways = ["eager", "tape", "tape, strict", "generate"]
        assert names == (ways[:3] + ["cpu_graph"] * compiled + ways[3:])
        measured = [name for name, row in zip(names, rows, strict=True) if "-" not in row]
        assert measured == (names if size == 1 else ways)
    parts = [
        "registry fill",
        "metadata hook, work in the graph",
        "metadata hook, work before the graph",
        *(f"pact check, {mode}" for mode in ("sampled", "always")),
        *(f"Lane.run without the graph, pact {mode}" for mode in ("off", "sampled", "always")),
        "outside the lane: schedule",
        "outside the lane: sample",
        "tape replay by itself",
        "cpu_graph replay by itself",
    ]
    for part in parts:
        assert sum(line.startswith(f"{part}  ") for line in lines) == 1
    captured = [line.split("  ")[0] for line in lines if "decode[bs=" in line]
    assert captured == ["tape"] * 3 + ["tape, strict"] * 3 + ["cpu_graph"] * compiled


def test_a_mixed_load_is_the_same_for_every_way_to_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every way generates the same tokens, and is compared with whole prompts in each time."""
    lines = run_quick("bench_mixed_load.py", monkeypatch, capsys)
    assert any(line.startswith("all ways generate the same tokens") for line in lines)
    assert any("prefill runner eager: 2 requests decode; 2 prompts of 40 tokens" in line for line in lines)
    rows = [re.split(r" {2,}", line.strip()) for line in lines[-9:]]
    ways = ["whole prompts", "chunks", "chunks, mixed"]
    times = ["first token", "between tokens", "the whole load"]
    assert [row[:2] for row in rows] == [[time, way] for time in times for way in ways]
    for at, (*_, median, p95, largest, x_median, x_p95, x_max) in enumerate(rows[:6]):
        assert 0 < float(median) <= float(p95) <= float(largest)
        assert min(map(float, (x_median, x_p95, x_max))) > 0
        assert (x_median == x_p95 == x_max == "1.00") or at % 3


@pytest.mark.sweep
def test_every_way_to_draft_is_measured_on_equal_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All drafts give the tokens of plain decoding; a row's factors belong together; a loss has a reason."""
    lines = run_quick("bench_speculative.py", monkeypatch, capsys)
    assert any(line.startswith("all variants generate the same tokens") for line in lines)
    names = ["plain", *(f"{a}, {s}" for a in ("eagle", "frozen_kv_mtp") for s in ("chain", "tree"))]
    for size in (1, 2):
        rows = [re.split(r" {2,}", line.strip()) for line in lines if re.match(rf" +{size}  [a-z]", line)]
        assert [row[1:3] for row in rows] == [[name, graphs] for name in names for graphs in ("yes", "no")]
        for _, name, graphs, _, speed, accepted, steps, step_time, *parts in rows:
            drafts = name != "plain"
            assert float(speed) * float(steps) * float(step_time) == pytest.approx(
                1, abs=0.02 + 0.01 / float(speed)
            )
            assert (float(accepted) > 1.3, float(steps) < 0.8) == (drafts, drafts)
            assert [part != "-" for part in parts] == [drafts, drafts, name.startswith("eagle"), drafts]
            shares = [int(part.rstrip("%")) for part in parts if part != "-"]
            assert not drafts or (sum(shares) == pytest.approx(100, abs=2) and min(shares) >= 0)
            reason = f"batch {size}, {name}, graphs {graphs}: loses. "
            if drafts and float(speed) != 1:
                assert any(line.startswith(reason) for line in lines) is (float(speed) < 1)


def test_every_way_to_prefill_is_measured_on_equal_tokens(
    fault: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every way has a row for each length, with and without padding, and every skipped way a reason."""
    compiled = fault is None
    lines = run_quick("bench_prefill.py", monkeypatch, capsys)
    assert any("all ways give the same tokens, medians of 1 rounds" in line for line in lines)
    drivers = ["tape", "inductor"][: 1 + compiled]
    broken = [f"{name}, {driver}" for name in ("breakable", "piecewise") for driver in drivers]
    rows = [re.split(r" {2,}", line.strip()) for line in lines if re.match(r" +\d+ +(\d|-)", line)]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (str(length), "-" if way not in broken else str(count), way)
        for length, count in ((4, 4), (5, 8), (8, 8))
        for way in ("eager", *broken, *["torch.compile alone"][: int(compiled)])
    ]
    captures = [
        re.split(r" {2,}", line.strip()) for line in lines if re.match(r"(break|piece)\w+, \w+ ", line)
    ]
    assert [row[:3] for row in captures] == [[way, "2", "2"] for way in broken]
    assert (
        any(line.startswith("torch.compile alone and the driver inductor are") for line in lines)
        is not compiled
    )
