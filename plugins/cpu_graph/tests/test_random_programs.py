"""Random programs on the driver `inductor`: compiled replays equal eager runs, except for rounding.

The recorded graphs are also run node by node, without a compiler, and compared bit for bit.
"""

from collections.abc import Callable, Sequence

import pytest

from compiling import interpret
from graphpact_cpu_graph import fx_graph
from graphpact_cpu_graph.inductor import InductorDriver
from program_operations import CPU, DRAWS
from random_programs import error_of, first_failure, operations_of, run

Seeds = Callable[[int, int], Sequence[int]]

NAMES = operations_of("inductor")
# Compiled code draws the same random numbers as an eager run, but not always for the same elements. The
# driver refuses what inductor cannot compile: operators that return an argument, and the C++ of `signbit` for
# bfloat16.
COMPILED = [name for name in NAMES if name not in DRAWS | {"fill_and_return", "signbit"}]
AGAIN = "plugins/cpu_graph/tests/test_random_programs.py -k {}"


def _driver() -> InductorDriver:
    return InductorDriver(CPU)


def test_graphs_equal_eager_runs(interpreted: None, program_seeds: Seeds) -> None:
    """Recorded graphs of 300 random programs, run node by node, equal eager runs bit for bit."""
    run(_driver, NAMES, program_seeds(0, 300), AGAIN.format("graphs_equal")).assert_few_refusals()


@pytest.mark.sweep
def test_graphs_equal_eager_runs_of_many_programs(interpreted: None, program_seeds: Seeds) -> None:
    """Graphs of 3,000 programs equal eager runs; every operation of the table was replayed."""
    seeds = program_seeds(1_000, 3_000)
    tally = run(_driver, NAMES, seeds, AGAIN.format("graphs_equal"))
    tally.assert_few_refusals()
    if len(seeds) == 3_000:  # a share of them need not have every operation
        tally.assert_all_ran(NAMES)


def test_compiled_replays_equal_eager_runs(compiler: None, program_seeds: Seeds) -> None:
    """Compiled replays of 5 random programs differ from eager runs only by rounding."""
    run(_driver, COMPILED, program_seeds(0, 5), AGAIN.format("compiled"), per_graph=5, is_compiled=True)


@pytest.mark.sweep
def test_compiled_replays_equal_eager_runs_of_many_programs(compiler: None, program_seeds: Seeds) -> None:
    """Compiled replays of 60 programs differ only by rounding; few programs are refused."""
    seeds = program_seeds(1_000, 60)
    run(
        _driver, COMPILED, seeds, AGAIN.format("compiled"), per_graph=15, is_compiled=True
    ).assert_few_refusals()


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If results are not copied to their memory, one of 300 programs fails; without the fault it passes."""
    interpret(monkeypatch)
    graph_of = fx_graph.SegmentGraph.of
    with monkeypatch.context() as patch:
        patch.setattr(fx_graph.SegmentGraph, "of", lambda segment, outliving: graph_of(segment, set()))
        program = first_failure(_driver, NAMES, range(300))
    assert program is not None
    assert error_of([program], _driver) is None
