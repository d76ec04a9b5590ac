"""Random programs on the driver `inductor`: compiled replays equal eager runs, but for rounding.

The graphs that it compiles are also run node by node, without a compiler, and compared bit for bit.
"""

from collections.abc import Callable, Sequence

import pytest

from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_tape.recorder import Recording
from program_operations import CPU, DRAWS
from random_programs import first_failure, operations_of, run

Seeds = Callable[[int, int], Sequence[int]]

NAMES = operations_of("inductor")
# Compiled code draws the numbers of an eager run, but not always for the same elements.
COMPILED = [name for name in NAMES if name not in DRAWS]
AGAIN = "plugins/cpu_graph/tests/test_random_programs.py -k {}"


def _driver() -> InductorDriver:
    return InductorDriver(CPU)


def test_graphs_equal_eager_runs(interpreted: None, program_seeds: Seeds) -> None:
    """Recorded graphs of 300 random programs, run node by node, give the bits of eager runs."""
    run(_driver, NAMES, program_seeds(0, 300), AGAIN.format("graphs_equal")).assert_few_refusals()


@pytest.mark.sweep
def test_graphs_equal_eager_runs_of_many_programs(interpreted: None, program_seeds: Seeds) -> None:
    """Graphs of 10,000 programs do; every operation of the table was replayed."""
    seeds = program_seeds(1_000, 10_000)
    tally = run(_driver, NAMES, seeds, AGAIN.format("graphs_equal"))
    tally.assert_few_refusals()
    if len(seeds) > 1:
        tally.assert_all_ran(NAMES)


def test_compiled_replays_equal_eager_runs(compiler: None, program_seeds: Seeds) -> None:
    """Compiled replays of 10 random programs differ from eager runs by rounding at most."""
    run(_driver, COMPILED, program_seeds(0, 10), AGAIN.format("compiled"), per_graph=10, is_compiled=True)


@pytest.mark.sweep
def test_compiled_replays_equal_eager_runs_of_many_programs(compiler: None, program_seeds: Seeds) -> None:
    """Compiled replays of 150 programs do; few are refused."""
    seeds = program_seeds(1_000, 150)
    run(
        _driver, COMPILED, seeds, AGAIN.format("compiled"), per_graph=15, is_compiled=True
    ).assert_few_refusals()


FAULTS: dict[str, tuple[object, str, object]] = {
    "results are not copied to their memory": (
        Recording,
        "outliving",
        lambda recording: [set() for _ in recording.segments],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the graphs makes one of 300 programs fail."""
    monkeypatch.setattr(*FAULTS[name])
    assert first_failure(_driver, NAMES, range(300)) is not None
