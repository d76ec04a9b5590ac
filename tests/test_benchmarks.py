"""The benchmarks run, and what they count is right; what they time is not looked at."""

import runpy
import sys
from pathlib import Path

import pytest

BENCH_FILL = Path(__file__).parents[1] / "benchmarks/bench_fill.py"


def test_a_fill_is_one_operation_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides leave the same rows; a fill of a lane is one operation, a loop two for each slot."""
    monkeypatch.setattr(sys, "argv", ["bench_fill.py", "--quick"])
    runpy.run_path(str(BENCH_FILL), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    lanes = [line.split() for line in lines if " lane " in line and line[0] in "dp"]
    assert [(row[0], row[2], row[3] != row[4], *row[-2:]) for row in lanes] == [
        ("decode", "6", True, "1", "12"),
        ("decode", "6", True, "1", "12"),
        ("decode", "6", False, "1", "6"),
        ("prefill", "3", True, "1", "6"),
        ("prefill", "3", False, "1", "3"),
    ]
