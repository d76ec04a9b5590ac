"""What a run of `graphpact bench` found: tables for the terminal, one JSON object, and a picture.

A cell of a printed table is a value of the JSON in the column's format; the JSON contains all that is printed
from a table. The schema of the JSON is ``report.schema.json`` beside this file.

Does not: measure, or decide whether an aim is met.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from graphpact.errors import UsageError
from graphpact_bench.timing import Spread
from graphpact_cli.console import clean, print_table

Value = str | int | float | None
"""The value of a cell; None where there is nothing to say, printed as ``-``."""
PICTURES = (".svg", ".png")
"""The suffixes of a picture."""
_ERROR_BARS = 3  # pixels
_MARKERS = "osD^v"
_LIMITS = ("matrix products", "weights read")  # lines that are limits, not ways


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Column(_Model):
    """One column of a table."""

    key: str = Field(description="The key of the column in each row.")
    heading: str = Field(description="The heading in the printed table, with the unit.")
    format: str = Field(default="", description="How the printed table formats a value: Python's format().")

    @property
    def is_number(self) -> bool:
        """Whether it is aligned to the right."""
        return bool(self.format)

    def text(self, value: Value) -> str:
        """Return the cell of a value."""
        return "-" if value is None else format(value, self.format)


class Skipped(_Model):
    """Something that was not measured."""

    what: str = Field(description="The way, backend, or measurement.")
    reason: str = Field(description="Why it was not measured.")

    def __str__(self) -> str:
        return f"{self.what} is skipped: {self.reason}"


class Chart(_Model):
    """How the picture shows a table: bars, or a line for each series where there is an ``x``."""

    value: str = Field(description="The key of the column with the height; its quartiles are error bars.")
    label: list[str] = Field(description="The keys that name a bar, or a line.")
    x: str | None = Field(default=None, description="The key of the column along the axis of lines.")
    is_shared: bool = Field(
        default=False, description="Whether the tables of this name are drawn together, as one."
    )


class Table(_Model):
    """One table of a measurement."""

    name: str = Field(description="The measurement, as on the command line, and its part.")
    title: str = Field(description="One sentence: what was measured, and how.")
    columns: list[Column] = Field(description="The columns, in the printed order.")
    rows: list[dict[str, Value]] = Field(
        default_factory=list, description="One object for each row, with a value for each column."
    )
    skipped: list[Skipped] = Field(
        default_factory=list, description="What the table lacks on this machine, and why."
    )
    notes: list[str] = Field(default_factory=list, description="Sentences printed below the table.")
    chart: Chart | None = Field(default=None, description="How `--plot` draws the table; null if not drawn.")

    def add(self, **values: Value) -> None:
        """Add a row; it has a value for every column.

        Raises:
            KeyError: A column has no value, or a value no column.
        """
        if given := values.keys() ^ {column.key for column in self.columns}:
            raise KeyError(f"table {self.name!r}: row and columns differ in {sorted(given)}")
        self.rows.append({column.key: values[column.key] for column in self.columns})

    def show(self, console: Console) -> None:
        """Print the table, what it lacks, and its notes."""
        console.print(clean(self.title), soft_wrap=True)
        if self.rows:
            cells = [[column.text(row[column.key]) for column in self.columns] for row in self.rows]
            numbers = {column.heading for column in self.columns if column.is_number}
            print_table(console, [column.heading for column in self.columns], cells, numbers=numbers)
        for line in (*self.skipped, *self.notes):
            console.print(clean(line), soft_wrap=True)
        console.print()


class Machine(_Model):
    """The hardware and software of a run."""

    cpu: str = Field(description="The name of the processor.")
    cores: int = Field(description="The cores that the process may use.")
    cache_mib: float | None = Field(description="The last-level cache, in MiB; null if unknown.")
    device: str = Field(description="The device that the models ran on: a CPU, or the name of the GPU.")
    threads: int = Field(description="CPU threads of torch's operators, and of all that is compared.")
    versions: dict[str, str] = Field(description="Version by distribution.")


class BenchReport(_Model):
    """Everything that one run of `graphpact bench` found."""

    schema_version: Literal[1] = Field(default=1, description="The version of this schema.")
    quick: bool = Field(description="Whether it was a smoke test, whose times mean nothing.")
    dtype: str = Field(description="The dtype of weights and computation.")
    machine: Machine = Field(description="What it ran on.")
    tables: list[Table] = Field(default_factory=list, description="The tables, in the printed order.")

    def to_json(self) -> str:
        """Return the report as JSON, indented."""
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def schema_text() -> str:
        """Return the JSON schema of `to_json`, the content of ``report.schema.json``."""
        return json.dumps(BenchReport.model_json_schema(mode="serialization"), indent=2) + "\n"


def spread_columns(key: str, heading: str, form: str) -> list[Column]:
    """Return the columns of a median, its quartiles and the best.

    Args:
        key: The key of the median, with ``_low`` and ``_high`` for the quartiles, ``_best`` for the best.
        heading: The heading of the median, with the unit.
        form: How a value is formatted.
    """
    return [
        Column(key=key, heading=heading, format=form),
        Column(key=f"{key}_low", heading="25%", format=form),
        Column(key=f"{key}_high", heading="75%", format=form),
        Column(key=f"{key}_best", heading="best", format=form),
    ]


def spread_values(key: str, spread: Spread | None) -> dict[str, Value]:
    """Return the values of `spread_columns`; None for each where nothing was measured."""
    median, low, high, best = spread or (None,) * 4
    return {key: median, f"{key}_low": low, f"{key}_high": high, f"{key}_best": best}


# -- the picture -----------------------------------------------------------------------------------


def require_picture(file: Path) -> None:
    """Check that a picture can be drawn to ``file``, before anything is measured.

    Raises:
        UsageError: matplotlib is not installed, or the suffix is not one of `PICTURES`.
    """
    if file.suffix not in PICTURES:
        raise UsageError(f"--plot {file}: not a file of a picture", hint=f"use {' or '.join(PICTURES)}")
    try:
        import matplotlib as mpl  # noqa: F401, PLC0415  an extra
    except ModuleNotFoundError:
        raise UsageError(
            "--plot needs matplotlib, which is not installed", hint='pip install "graphpact-bench[plot]"'
        ) from None


def draw_charts(report: BenchReport, file: Path) -> bool:
    """Draw every table that has a chart to ``file``, one below the other; return whether there is one.

    Raises:
        UsageError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra; draws without a screen

    tables: list[Table] = []
    for table in report.tables:
        if table.chart is not None and table.rows:
            if table.chart.is_shared and tables and tables[-1].name == table.name:
                rows = [*tables[-1].rows, *table.rows]
                tables[-1] = table.model_copy(update={"rows": rows})
            else:
                tables.append(table)
    if not tables:
        return False
    heights = [_height(table) for table in tables]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    every = figure.subplots(len(tables), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, table in zip(every, tables, strict=True):
        (_draw_lines if table.chart and table.chart.x else _draw_bars)(axes, table)
        axes.set_title(table.title, fontsize=9, loc="left", wrap=True)
    try:
        figure.savefig(file)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be written: {error.strerror or error}", hint="name a path that can be written"
        ) from error
    return True


def _height(table: Table) -> float:
    """Return the inches of a table's chart."""
    return 4.5 if table.chart and table.chart.x else 1.2 + 0.22 * len(table.rows)


def _measured(table: Table, chart: Chart) -> list[dict[str, Any]]:
    return [row for row in table.rows if row[chart.value] is not None]


def _named(row: dict[str, Any], chart: Chart) -> str:
    return ", ".join(str(row[key]) for key in chart.label)


def _errors(rows: Sequence[dict[str, Any]], key: str) -> list[list[float]] | None:
    """Return the distances from each value to its quartiles, or None without quartiles."""
    if not rows or f"{key}_low" not in rows[0]:
        return None
    below = [row[key] - row[f"{key}_low"] for row in rows]
    above = [row[f"{key}_high"] - row[key] for row in rows]
    return [below, above]


def _heading(table: Table, key: str) -> str:
    return next(column.heading for column in table.columns if column.key == key)


def _draw_bars(axes: Any, table: Table) -> None:
    assert table.chart is not None  # noqa: S101  for the type checker
    chart = table.chart
    rows = _measured(table, chart)
    names = [_named(row, chart) for row in rows]
    places = range(len(rows))
    axes.barh(
        places,
        [row[chart.value] for row in rows],
        xerr=_errors(rows, chart.value),
        error_kw={"capsize": _ERROR_BARS},
    )
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(_heading(table, chart.value))


def _draw_lines(axes: Any, table: Table) -> None:
    """Draw a line for each series: its first label is a colour, the others are a marker."""
    assert table.chart is not None  # noqa: S101  for the type checker
    chart = table.chart
    rows = _measured(table, chart)
    colours, markers = _numbers(rows, chart.label[:1]), _numbers(rows, chart.label[1:])
    at = chart.x or ""
    for name in dict.fromkeys(_named(row, chart) for row in rows):
        own = sorted((r for r in rows if _named(r, chart) == name), key=lambda r: float(r[at]))
        first, *others = (own[0][key] for key in chart.label)
        axes.errorbar(
            [row[at] for row in own],
            [row[chart.value] for row in own],
            yerr=_errors(own, chart.value),
            color=f"C{colours[first,]}",
            marker=_MARKERS[markers[tuple(others)] % len(_MARKERS)],
            linestyle="--" if name.startswith(_LIMITS) else "-",
            capsize=_ERROR_BARS,
            label=name,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(_heading(table, at))
    axes.set_ylabel(_heading(table, chart.value))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _numbers(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[tuple[Any, ...], int]:
    """Return a number for each combination of values of some columns, in the order of the rows."""
    found = dict.fromkeys(tuple(row[key] for key in keys) for row in rows)
    return {values: number for number, values in enumerate(found)}
