"""Faults planted in the real vLLM: the model answers wrong without a message, and the guard names them."""

from collections.abc import Callable

import pytest
from engines import Run, run_in_child, sweep_but
from plants import Baked, BakedImpl, OtherDtype, Rebound, Stale, declare_cpu_attention, use

WORDS = "tape,guard,contents:1"
RUNNERS = (1, 2)


@pytest.fixture(scope="module")
def right() -> Run:
    """The run of the engine without a fault."""
    return run_in_child(WORDS)


def _named(run: Run) -> list[tuple[str, str, str]]:
    """Return rule, owner and field of the faults of the first replay that has one."""
    first = run.faults[0][3] if run.faults else ""
    return [fault[:3] for fault in run.faults if fault[3] == first]


PLANTS: dict[str, tuple[Callable[[], None], tuple[str, str, str]]] = {
    "rebound": (use(Rebound), ("GP01", "Rebound", "metadata.seq_lens")),
    "stale": (use(Stale), ("GP02", "Stale", "block_table")),
    "dtype": (use(OtherDtype), ("GP07", "OtherDtype", "metadata.seq_lens")),
    "number": (use(Baked, BakedImpl), ("GP08", "Baked", "metadata.num_keys")),
}


@pytest.mark.parametrize(
    ("plant", "runner"),
    [
        *(pytest.param("rebound", runner, marks=pytest.mark.smoke) for runner in RUNNERS),
        *sweep_but({("stale", 2), ("dtype", 1), ("number", 1)}, [*PLANTS][1:], RUNNERS),
    ],
)
def test_a_builder_with_a_fault_is_named_at_its_first_replay(right: Run, plant: str, runner: int) -> None:
    """The guard names rule, owner and field before the first wrong replay."""
    before, named = PLANTS[plant]
    run = run_in_child(WORDS, before=before, runner=runner)
    assert named in _named(run)
    if named[0] != "GP07":  # its numbers are right
        assert run.tokens != right.tokens
    silent = run_in_child("tape", before=before, runner=runner)
    assert silent.tokens == run.tokens
    assert silent.state["guard"] is None


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_backend_for_cpus_is_no_backend_for_graphs(right: Run, runner: int) -> None:
    """VLLM's own backend, declared to support graphs, is named by its field in the first replay."""
    run = run_in_child(WORDS, before=declare_cpu_attention, runner=runner, attention_backend="CPU_ATTN")
    assert ("GP01", "CPUAttentionMetadataBuilder", "metadata.scheduler_metadata") in _named(run)
    assert run.tokens != right.tokens


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_refused_shape_runs_eagerly_from_then_on(right: Run, runner: int) -> None:
    """With ``eager``, only the first replay of each graph is wrong; later steps of its shape run eagerly."""
    run = run_in_child("tape,guard,contents:1,eager", before=use(Rebound), rounds=2, runner=runner)
    assert run.tokens == right.tokens  # those of the second round
    assert max(graph["replays"] for graph in run.state["guard"]["graphs"].values()) == 1
    reasons = {each["reason"]: each["steps"] for each in run.state["steps"]["eager"]}
    assert reasons["the guard refused the graph after a fault"] > 20
