"""Random programs on the tape: replays in fast mode equal eager runs, and faults of the tape are found."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphpact.tensors import storage_id
from graphpact_tape import recorder, reuse, rewrites, tape
from graphpact_tape.recorder import RecordedCall, Recorder
from graphpact_tape.tape import TapeDriver
from program_operations import CPU
from random_programs import failures, operations_of, run

NAMES = operations_of("fast")


def _driver() -> TapeDriver:
    return TapeDriver(CPU)


def test_replays_equal_eager_runs(program_seeds: Callable[[int, int], range]) -> None:
    """Replays of 300 random programs have the bits of eager runs, on new inputs; few are refused."""
    run(_driver, NAMES, program_seeds(0, 300)).check_refusals()


@pytest.mark.sweep
def test_replays_equal_eager_runs_of_many_programs(program_seeds: Callable[[int, int], range]) -> None:
    """Replays of 20,000 programs do, and every operation is in one that is not refused."""
    tally = run(_driver, NAMES, program_seeds(1_000_000, 20_000))
    tally.check_refusals()
    tally.check_coverage(NAMES)


# -- planted faults --------------------------------------------------------------------------------


def _edited(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return ``function`` with a part of its text replaced."""
    text = textwrap.dedent(inspect.getsource(function))
    assert old in text
    names: dict[str, Any] = {}
    exec(compile(text.replace(old, new), "<planted>", "exec"), inspect.getmodule(function).__dict__, names)  # noqa: S102
    edited: Callable[..., Any] = names[function.__name__]
    return edited
