"""What a run draws: the page counts it from a run, and each dimension of scale shows bugs of its own."""

import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from graphpact.plugins import PluginCatalog
from graphpact_conformance import suite
from graphpact_conformance.draws.choice import combinations
from graphpact_conformance.draws.coverage import joined
from graphpact_conformance.results import Outcome, Result
from graphpact_conformance.targets import Options, Size, Target

PAGE = Path(__file__).parents[2] / "docs/explanation/conformance.md"
SIZES: tuple[Size, ...] = ("quick", "normal", "thorough")
BACKEND = Target("attention_backend", "flashinfer")


def counted(size: Size) -> dict[str, int]:
    """Return how many lanes ran, and how many values of each dimension they had."""
    catalog = PluginCatalog.scan()
    results: list[Result] = []
    heard = Mock(found=results.append)
    options = Options(size=size, only=frozenset({"GP12"}), examples=1, shrink=False)
    plans = suite.lanes_of(BACKEND, options, catalog)
    # A lane in which an experiment has a verdict has run. One is enough, and one that steps as ranks.
    skip = {f"{plan} :: {name}" for plan in plans for name in ("captures", "dummies", "graph_choice")}
    ranks = replace(options, only=frozenset({"GP17"}), lanes=("*-page16-gqa-float32*",))
    runs = [suite.examine(BACKEND, options, heard, skip=skip), suite.examine(BACKEND, ranks, heard)]
    drawn = joined(run.drawn for run in runs)
    assert {result.outcome for result in results} <= {Outcome.PASS, Outcome.UNSUPPORTED}
    lanes = {result.lane for result in results if result.outcome is Outcome.PASS}
    plans = [plan for plan in plans if str(plan) in lanes]
    pairs = {pair for plan in plans for pair in combinations(plan.lane.config)}
    return {
        "lanes": len(lanes),
        "lanes with all experiments": sum(plan.is_full for plan in plans),
        "pairs of values of two dimensions": len(pairs),
        **{name: len(values) for name, values in drawn.items() if name != "experiments"},
    }


def told(size: Size) -> dict[str, int]:
    """Return the column of the page's table for a size."""
    column = SIZES.index(size) + 1
    table = PAGE.read_text(encoding="utf-8").partition("| drawn of `flashinfer` |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    return {re.sub(" *<br>.*", "", row[0]): int(row[column]) for row in rows}


@pytest.mark.sweep
@pytest.mark.parametrize("size", SIZES)
def test_the_table_of_dimensions_is_counted_from_a_run(size: Size) -> None:
    """The page says how many lanes, and how many values of each dimension, a run really has."""
    assert told(size) == counted(size)


def test_longer_runs_draw_no_less() -> None:
    """Each row of the table grows from left to right, or stays."""
    quick, normal, thorough = map(told, SIZES)
    assert quick.keys() == normal.keys() == thorough.keys()
    assert len(quick) > 12
    assert all(quick[name] <= normal[name] <= thorough[name] for name in quick)
