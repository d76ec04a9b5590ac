"""A report's JSON, table and picture have the same values."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from graphpact.errors import UsageError
from graphpact_bench.report import (
    BenchReport,
    Chart,
    Column,
    Machine,
    Skipped,
    Table,
    draw_charts,
    require_picture,
    spread_columns,
    spread_values,
)
from graphpact_bench.timing import Spread

SCHEMA = Path(__file__).parents[1] / "graphpact_bench/report.schema.json"


@pytest.fixture
def table() -> Table:
    """Return a table with two ways, of which one has no ratio, and one that is skipped."""
    made = Table(
        name="decode",
        title="decode steps",
        columns=[
            Column(key="way", heading="way"),
            *spread_columns("step_ms", "step ms", ".2f"),
            Column(key="ratio", heading="x eager", format=".1f"),
        ],
        skipped=[Skipped(what="llama.cpp", reason="not installed")],
        notes=["a note"],
        chart=Chart(value="step_ms", label=["way"]),
    )
    made.add(way="eager", **spread_values("step_ms", Spread(1.234, 1.0, 2.0, 0.5)), ratio=1.0)
    made.add(way="tape", **spread_values("step_ms", Spread(0.5, 0.25, 0.75, 0.125)), ratio=None)
    return made


@pytest.fixture
def report(table: Table) -> BenchReport:
    """Return a report with one table."""
    machine = Machine(
        cpu="a CPU", cores=2, cache_mib=None, device="a CPU", threads=1, versions={"torch": "2"}
    )
    return BenchReport(quick=True, dtype="float32", machine=machine, tables=[table])


def test_the_printed_table_has_the_values_of_the_json(report: BenchReport, table: Table) -> None:
    """Each cell is the JSON's value in the column's format; lines below it list skipped ways and notes."""
    console = Console(file=io.StringIO(), width=200)
    table.show(console)
    title, heading, *lines = console.file.getvalue().splitlines()
    read = json.loads(report.to_json())["tables"][0]
    assert title == read["title"]
    assert re.split(r" {2,}", heading.strip()) == [column["heading"] for column in read["columns"]]
    expected = [
        ["-" if row[c["key"]] is None else format(row[c["key"]], c["format"]) for c in read["columns"]]
        for row in read["rows"]
    ]
    assert [re.split(r" {2,}", line.strip()) for line in lines[:2]] == expected
    assert expected == [
        ["eager", "1.23", "1.00", "2.00", "0.50", "1.0"],
        ["tape", "0.50", "0.25", "0.75", "0.12", "-"],
    ]
    assert lines[2:] == ["llama.cpp is skipped: not installed", "a note", ""]


def test_a_row_has_a_value_for_every_column(table: Table) -> None:
    """A row with a missing or an extra column is refused."""
    with pytest.raises(KeyError, match="ratio"):
        table.add(way="tape", **spread_values("step_ms", None))
    with pytest.raises(KeyError, match="more"):
        table.add(way="tape", **spread_values("step_ms", None), ratio=1, more=1)


def test_the_schema_is_what_the_code_would_write() -> None:
    """report.schema.json is up to date: `python docs/tools/reference.py` would change nothing."""
    assert SCHEMA.read_text(encoding="utf-8") == BenchReport.schema_text()


@pytest.mark.parametrize("x", [None, "width"])
def test_a_picture_has_the_bars_or_lines_of_a_table(
    x: str | None, report: BenchReport, tmp_path: Path
) -> None:
    """Every way is in the picture, as a bar, or as a line where the table has an x axis."""
    (table,) = report.tables
    if x is not None:
        table.columns.append(Column(key="width", heading="width", format="d"))
        table.rows = [{**row, "width": width} for row in table.rows for width in (64, 128)]
        table.chart = Chart(value="step_ms", label=["way"], x="width")
    file = tmp_path / "out.svg"
    assert draw_charts(report, file)
    text = file.read_text(encoding="utf-8")
    assert "<svg" in text
    assert all(f"<!-- {word} -->" in text for word in ("eager", "tape", "step ms"))


def test_a_report_without_a_chart_has_no_picture(report: BenchReport, tmp_path: Path) -> None:
    """No file is written if no table has a chart."""
    report.tables[0].chart = None
    assert not draw_charts(report, tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


def test_a_picture_that_cannot_be_drawn_is_refused_before_a_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A suffix without a picture is refused, and a picture without matplotlib, with the name of the extra."""
    with pytest.raises(UsageError, match="not a file of a picture"):
        require_picture(Path("out.txt"))
    require_picture(Path("out.png"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="needs matplotlib") as error:
        require_picture(Path("out.png"))
    assert error.value.hint == 'pip install "graphpact-bench[plot]"'
