"""Random programs on the driver `inductor`: compiled replays equal eager runs, except for rounding.

The recorded graphs are also run node by node, without a compiler, and compared bit for bit.
"""

from collections.abc import Callable, Sequence

import pytest

from compiling import interpret
from graphpact.tensors import storage_id
from graphpact_cpu_graph import blocks, fx_graph, inductor, pieces
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_tape.recorder import Segment
from graphpact_tape.trees import tensors_of
from program_operations import CPU, DRAWS
from random_programs import error_of, first_failure, generate, is_failure, operations_of, repeated, run

Seeds = Callable[[int, int], Sequence[int]]

NAMES = operations_of("inductor")
# Compiled code draws the same random numbers as an eager run, but not always for the same elements. The
# driver refuses what inductor cannot compile: operators that return an argument, and the C++ of `signbit` for
# bfloat16.
COMPILED = [name for name in NAMES if name not in DRAWS | {"fill_and_return", "signbit"}]
REPEATS = 4
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
    """Compiled replays of 3 random programs differ from eager runs only by rounding."""
    run(_driver, COMPILED, program_seeds(0, 3), AGAIN.format("compiled"), per_graph=5, is_compiled=True)


@pytest.mark.sweep
def test_compiled_replays_equal_eager_runs_of_many_programs(compiler: None, program_seeds: Seeds) -> None:
    """Compiled replays of 60 programs differ only by rounding; few programs are refused."""
    seeds = program_seeds(1_000, 60)
    run(
        _driver, COMPILED, seeds, AGAIN.format("compiled"), per_graph=15, is_compiled=True
    ).assert_few_refusals()


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Split segments at every block that repeats; return the number of pieces of each segment so far."""
    counts: list[int] = []
    split_at_blocks = blocks.split_at_blocks

    def counted(segment: Segment) -> list[Segment]:
        parts = split_at_blocks(segment)
        counts.append(len(parts))
        return parts

    monkeypatch.setattr(blocks, "LEAST_REPEATS", REPEATS - 1)
    monkeypatch.setattr(blocks, "LEAST_NODES", 1)
    monkeypatch.setattr(blocks, "LEAST_BYTES", 1)
    monkeypatch.setattr(pieces, "split_at_blocks", counted)
    return counts


def test_graphs_of_repeated_blocks_equal_eager_runs(
    interpreted: None, split: list[int], program_seeds: Seeds
) -> None:
    """Graphs of 100 programs whose steps repeat, most of them split at the blocks, equal eager runs.

    The bits are equal. Blocks read results of earlier ones, write them in place, and return views of them.
    """
    seeds = program_seeds(0, 100)
    run(_driver, NAMES, seeds, AGAIN.format("repeated_blocks"), blocks=REPEATS).assert_few_refusals()
    assert sum(count >= REPEATS - 1 for count in split) > len(seeds) // 2


@pytest.mark.sweep
def test_graphs_of_many_repeated_blocks_equal_eager_runs(
    interpreted: None, split: list[int], program_seeds: Seeds
) -> None:
    """Graphs of 3,000 programs whose steps repeat equal eager runs bit for bit."""
    seeds = program_seeds(1_000, 3_000)
    run(_driver, NAMES, seeds, AGAIN.format("many_repeated_blocks"), blocks=REPEATS).assert_few_refusals()


def test_compiled_repeated_blocks_equal_eager_runs(
    compiler: None, split: list[int], program_seeds: Seeds
) -> None:
    """A compiled replay of a program whose steps repeat differs from an eager run only by rounding."""
    again = AGAIN.format("compiled_repeated")
    run(_driver, COMPILED, program_seeds(0, 1), again, is_compiled=True, blocks=REPEATS)


@pytest.mark.sweep
def test_compiled_repeated_blocks_of_many_programs_equal_eager_runs(
    compiler: None, split: list[int], program_seeds: Seeds
) -> None:
    """Compiled replays of 30 programs whose steps repeat differ only by rounding; few are refused."""
    again = AGAIN.format("compiled_repeated_blocks_of_many")
    seeds = program_seeds(1_000, 30)
    run(_driver, COMPILED, seeds, again, is_compiled=True, blocks=REPEATS).assert_few_refusals()


def test_a_fault_between_blocks_is_found(split: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """If results for a later piece are not written to their memory, a program with repeated blocks fails."""
    interpret(monkeypatch)
    outliving_of = pieces.outliving_of
    programs = [repeated(generate(seed, NAMES), REPEATS) for seed in range(60)]

    def only_outputs(parts: Sequence[pieces.Piece], outputs: object) -> list[set[int]]:
        read = {storage_id(t) for t in tensors_of(outputs)}
        return [each & read for each in outliving_of(parts, outputs)]

    with monkeypatch.context() as patch:
        patch.setattr(inductor, "outliving_of", only_outputs)
        found = [program for program in programs if is_failure(error_of([program], _driver))]
    assert found
    assert error_of([found[0]], _driver) is None


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If results are not copied to their memory, one of 300 programs fails; without the fault it passes."""
    interpret(monkeypatch)
    graph_of = fx_graph.SegmentGraph.of
    with monkeypatch.context() as patch:
        patch.setattr(fx_graph.SegmentGraph, "of", lambda segment, outliving: graph_of(segment, set()))
        program = first_failure(_driver, NAMES, range(300))
    assert program is not None
    assert error_of([program], _driver) is None
