"""Random programs on the strict tape: replays equal eager runs, and legal programs are not refused."""

from collections.abc import Callable, Sequence

import pytest

from graphpact_tape.tape import TapeDriver
from program_operations import CPU
from random_programs import operations_of, run

Seeds = Callable[[int, int], Sequence[int]]

NAMES = operations_of("strict")
AGAIN = "plugins/tape/tests/test_random_strict_tapes.py -k replays_equal"


def _driver() -> TapeDriver:
    return TapeDriver(CPU, strict=True)


def test_replays_equal_eager_runs(program_seeds: Seeds) -> None:
    """Replays of 300 random programs equal eager runs bit for bit on new inputs; few programs are refused."""
    run(_driver, NAMES, program_seeds(0, 300), AGAIN).assert_few_refusals()


@pytest.mark.sweep
def test_replays_equal_eager_runs_of_many_programs(program_seeds: Seeds) -> None:
    """Replays of 6,000 programs equal eager runs; every operation of the table was replayed."""
    seeds = program_seeds(1_000, 6_000)
    tally = run(_driver, NAMES, seeds, AGAIN)
    tally.assert_few_refusals()
    if len(seeds) == 6_000:  # a share of them need not have every operation
        tally.assert_all_ran(NAMES)
