"""Synthetic steps before the engine serves: a right engine is as without them, a wrong graph is refused."""

from collections.abc import Callable
from typing import Any

import pytest
from engines import Run, run_in_child, sweep_but
from plants import Baked, BakedImpl, Rebound, use

WORDS = "tape,guard,contents:1"
RUNNERS = (1, 2)
MIXED = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
}
"""Full graphs of batches with prompts too."""


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fast": ("tape,contents:1,start", {}),
    "strict": ("tape:strict,start", {}),
    "pages": (
        "tape,start:5",
        {"block_size": 32, "max_num_batched_tokens": 512, "async_scheduling": True},
    ),
    "mixed": ("tape,start", MIXED),
}


@pytest.mark.parametrize(
    ("case", "runner"), sweep_but({("fast", 1), ("strict", 2), ("pages", 1), ("mixed", 2)}, CASES, RUNNERS)
)
def test_a_right_engine_is_as_without_synthetic_steps(case: str, runner: int) -> None:
    """Every shape is compared, nothing is found, and answers and counts are those of a run without."""
    words, arguments = CASES[case]
    without = run_in_child(WORDS, runner=runner, **arguments)
    run = run_in_child(words, runner=runner, **arguments)
    assert run.faults == []
    assert run.tokens == without.tokens
    steps = 5 if "5" in words else 3
    started = {name: graph["started"] for name, graph in run.state["guard"]["graphs"].items()}
    assert min(started.values()) >= steps, started
    assert run.replays() == without.replays()
    assert run.state["steps"]["eager"] == without.state["steps"]["eager"]


def _found_at_start(run: Run) -> set[tuple[str, str, str]]:
    """Return rule, owner and field of the faults that were found before the engine served."""
    faults = run.state["guard"]["faults"]
    return {(each["rule"], each["owner"], each["field"]) for each in faults if each["at_start"]}


PLANTS: dict[str, tuple[Callable[[], None], tuple[str, str, str]]] = {
    "number": (use(Baked, BakedImpl), ("GP08", "Baked", "metadata.num_keys")),
    "rebound": (use(Rebound), ("GP01", "Rebound", "metadata.seq_lens")),
}


@pytest.mark.parametrize(("plant", "runner"), sweep_but({("number", 1), ("rebound", 2)}, PLANTS, RUNNERS))
def test_a_wrong_graph_is_named_and_refused_before_the_first_request(plant: str, runner: int) -> None:
    """With ``eager``, every graph is refused at the start, and the answers are the eager ones."""
    before, named = PLANTS[plant]
    eager = run_in_child("tape", before=before, runner=runner, enforce_eager=True)
    wrong = run_in_child("tape", before=before, runner=runner)
    assert wrong.tokens != eager.tokens
    run = run_in_child("tape,start,eager", before=before, runner=runner)
    assert _found_at_start(run) >= {named, ("verify", "outputs", "hidden_states")}
    assert run.tokens == eager.tokens
    assert sum(graph["replays"] for graph in run.state["guard"]["graphs"].values()) == 0


@pytest.mark.parametrize("runner", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_a_wrong_graph_ends_the_start(runner: int) -> None:
    """With ``raise``, the engine does not start, and the error names the field."""
    with pytest.raises(AssertionError, match=r"GuardError: Rebound\.metadata\.seq_lens in "):
        run_in_child("tape,start,raise", [], before=use(Rebound), runner=runner)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "drafts"),
        (
            {"block_size": 128, "max_model_len": 128, "num_gpu_blocks_override": 4},
            "8 requests do not fit into the KV cache",
        ),
    ],
    ids=["drafts", "cache"],
)
def test_what_has_no_synthetic_steps_ends_the_start(arguments: dict[str, Any], what: str) -> None:
    """The error says what there are no steps for, and what to write instead."""
    with pytest.raises(AssertionError, match=rf"ConfigError: GRAPHPACT asks for synthetic steps.*{what}"):
        run_in_child("tape,start", [], **arguments)
