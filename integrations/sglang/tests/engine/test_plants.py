"""Faults planted in the real SGLang: the model answers wrong without a message, and the guard names them."""

from collections.abc import Callable

import pytest
from engines import Run, run_in_child
from plants import REBOUND, STALE, BakedBackend, swapped_metadata, use

from graphpact_sglang.load.in_process import InProcessEngine

WORDS = "tape,guard,contents:1"


@pytest.fixture(scope="module")
def right() -> Run:
    """The run of the engine without a fault."""
    return run_in_child(WORDS)


def _named(run: Run) -> list[tuple[str, str, str]]:
    """Return rule, owner and field of the faults of the first replay."""
    first = run.faults[0][3]
    return [fault[:3] for fault in run.faults if fault[3] == first]


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        pytest.param(
            REBOUND, ("GP01", "PagedAttnBackend", "forward_metadata.kv_indices"), marks=pytest.mark.smoke
        ),
        (STALE, ("GP02", "PagedAttnBackend", "kv_indices")),
        (swapped_metadata, ("GP07", "PagedAttnBackend", "forward_metadata.kv_indptr")),
    ],
    ids=["rebound", "stale", "dtype"],
)
def test_a_backend_with_a_fault_is_named_at_its_first_replay(
    right: Run, plant: Callable[[InProcessEngine], None], named: tuple[str, str, str]
) -> None:
    """The guard names rule, owner and field before the first wrong replay."""
    run = run_in_child(WORDS, plant=plant)
    assert named in _named(run)
    if plant is not swapped_metadata:  # its numbers are right
        assert run.tokens != right.tokens
    silent = run_in_child("tape", plant=plant)
    assert silent.tokens == run.tokens
    assert silent.state["guard"] is None


def test_a_refused_shape_runs_eagerly_from_then_on(right: Run) -> None:
    """With ``eager``, only the first replay of each graph is wrong; later steps of its shape run eagerly."""
    run = run_in_child("tape,guard,contents:1,eager", plant=REBOUND, rounds=2)
    assert run.tokens == right.tokens  # those of the second round
    graphs = run.state["guard"]["graphs"].items()
    assert max(graph["replays"] for name, graph in graphs if name.startswith("Decode")) == 1
    reasons = {each["reason"]: each["steps"] for each in run.state["steps"]["eager"]}
    assert reasons["the guard refused the graph after a fault"] > 20


def test_a_frozen_number_is_named_and_an_eager_run_differs(right: Run) -> None:
    """A host number that the capture read and that grows is a breach; verification sees what it does."""
    run = run_in_child("tape,guard,contents:1,verify:1", plant=None, before=use(BakedBackend))
    assert run.tokens != right.tokens
    rules = {fault[:3] for fault in run.faults}
    assert ("GP08", "BakedBackend", "forward_metadata.max_kv_len") in rules
    assert ("verify", "outputs", "next_token_logits") in rules
