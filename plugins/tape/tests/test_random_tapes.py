"""Random programs on the tape: replays equal eager runs, and planted faults of the tape are found."""

import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from graphpact.tensors import storage_id
from graphpact_tape import recorder, reuse, rewrites, tape
from graphpact_tape.recorder import RecordedCall, Recorder
from graphpact_tape.tape import TapeDriver
from program_operations import CPU
from random_programs import error_of, first_failure, operations_of, run

Seeds = Callable[[int, int], Sequence[int]]

NAMES = operations_of("fast")
AGAIN = "plugins/tape/tests/test_random_tapes.py -k replays_equal"


def _driver() -> TapeDriver:
    return TapeDriver(CPU)


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


# -- planted faults --------------------------------------------------------------------------------


def _drop(is_dropped: Callable[[Recorder, RecordedCall], bool]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a fault in which the recorder loses some calls."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        add = Recorder.add
        patch.setattr(Recorder, "add", lambda self, call: None if is_dropped(self, call) else add(self, call))

    return plant


def _edit(
    user: Any, function: Callable[..., Any], old: str, new: str
) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a fault in which the module ``user`` calls ``function`` with changed source code."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        text = textwrap.dedent(inspect.getsource(function))
        assert old in text
        names = dict(vars(inspect.getmodule(function)))
        exec(compile(text.replace(old, new), "<planted>", "exec"), names)  # noqa: S102
        patch.setattr(user, function.__name__, names[function.__name__])

    return plant


def _one_place_in_a_storage(patch: pytest.MonkeyPatch) -> None:
    place_in_memory = recorder.place_in_memory
    patch.setattr(recorder, "place_in_memory", lambda t: (place_in_memory(t)[0], *place_in_memory(t)[2:]))


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "recorder: writes in place are lost": _drop(lambda _, call: str(call.op).startswith("aten.add_.")),
    "recorder: calls with out= are lost": _drop(lambda _, call: "out" in call.kwargs),
    "recorder: a constant is not restored": _drop(
        lambda self, call: (
            call.op is torch.ops.aten.clone.default and storage_id(call.args[0]) in self.constants
        )
    ),
    "recorder: an alias of another place": _one_place_in_a_storage,
    "rewrites: concatenated into the wrong slice": _edit(
        rewrites, rewrites._in_slices, "begin += part.shape[dim]", "begin += 0"
    ),
    "rewrites: computed into a slice although read elsewhere": _edit(
        rewrites, rewrites._is_only_for, "uses[storage] == 2", "uses[storage] >= 2"
    ),
    "rewrites: a number is rounded to 16 bits": lambda patch: patch.setattr(
        rewrites, "_FLOATS", (*rewrites._FLOATS, torch.bfloat16)
    ),
    "reuse: memory is shared while it is read": _edit(
        tape, reuse.in_shared_memory, "spans.get(storage, (at, at))[0], at", "spans.get(storage, (at, at))"
    ),
    "reuse: memory of outputs is shared": _edit(
        tape, reuse.private_memory, "== len(held) + 1", ">= len(held) + 1"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in recorder, rewrites or reuse makes one of 300 programs fail that otherwise passes."""
    FAULTS[name](monkeypatch)
    program = first_failure(_driver, NAMES, range(300))
    assert program is not None
    monkeypatch.undo()
    assert error_of([program], _driver) is None
