"""vLLM's data parallelism on a tape: experts are split over two ranks, which step together, idle or not."""

import random
from pathlib import Path
from typing import Any

import pytest
from divergences import diverge, take_for
from engines import Run, run_in_child, run_in_ranks
from kinds import save_kind

from graphpact.engines import PromptRequest

WORDS = "tape,guard,contents:1,verify:1,ranks"
RUNNERS = (1, 2)
GRAPH = {1: "FULL", 2: "ModelCudaGraphManager"}
_CHOICE = random.Random(0)
PROMPTS = [[_CHOICE.randrange(3, 199) for _ in range(length)] for length in (5, 24, 2, 40)]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments for a small model with experts."""
    model: Path = save_kind("moe", tmp_path_factory.mktemp("experts"))
    return {"model": str(model), "skip_tokenizer_init": True, "max_model_len": 128}


def _requests(prompts: list[list[int]], max_new_tokens: int) -> list[PromptRequest]:
    return [PromptRequest(token_ids=prompt, max_new_tokens=max_new_tokens) for prompt in prompts]


@pytest.fixture(scope="module")
def eager(experts: dict[str, Any]) -> Run:
    """The eager run of one process with all experts."""
    return run_in_child("tape", _requests(PROMPTS, 10), runner=1, enforce_eager=True, **experts)


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_idle_rank_replays_the_graphs_of_the_others(
    eager: Run, experts: dict[str, Any], runner: int
) -> None:
    """Two ranks with half of each expert give the tokens of one process, and an idle one replays with them.

    The second rank ends after three tokens. Without the collectives of the other, no token would be right.
    """
    given = _requests(PROMPTS, 10), _requests(PROMPTS[1:2], 3)
    runs = []
    for run, error in run_in_ranks(WORDS, given, runner=runner, **experts):
        assert run is not None, error
        runs.append(run)
    busy, idle = runs
    assert busy.tokens == eager.tokens
    assert idle.tokens == [eager.tokens[1][:3]]
    for run in runs:
        assert run.faults == []
        assert run.replays() == 9
    assert [run.verified() for run in runs] == [9, 2]  # a batch of an idle rank has no row to compare
    graphs = [run.state["steps"]["graphs"] for run in runs]
    assert [sum(graph["raw"] for graph in its.values()) for its in graphs] == [36, 2]
    ranks = [run.state["guard"]["provenance"]["rank"] for run in runs]
    assert ranks == ["0 of 2 (dp0)", "1 of 2 (dp1)"]


@pytest.mark.parametrize(
    ("graph_tokens", "took", "runner"),
    [
        (0, "runs 1 tokens eagerly", 1),
        pytest.param(0, "runs 1 tokens eagerly", 2, marks=pytest.mark.sweep),
        pytest.param(8, "replays {}[8]", 1, marks=pytest.mark.sweep),
        (8, "replays {}[8]", 2),
    ],
)
def test_an_idle_rank_that_takes_another_graph_is_named(
    experts: dict[str, Any], graph_tokens: int, took: str, runner: int
) -> None:
    """Before a collective hangs or mixes tokens, both ranks end with a message of what each of them took."""
    given = _requests(PROMPTS, 10), []
    ended = run_in_ranks(
        "tape,ranks", given, (None, diverge(graph_tokens)), runner=runner, seconds=120, **experts
    )
    other = f"dp1: {took.format(GRAPH[runner])}"
    for run, error in ended:
        assert run is None
        assert "ranks take different graphs" in error
        assert other in error
        assert f"dp0: replays {GRAPH[runner]}[4]" in error


def test_without_the_word_no_rank_is_named(experts: dict[str, Any]) -> None:
    """The same fault then ends in the transport, whose message has sizes and no rank."""
    ended = run_in_ranks(
        "tape,guard", (_requests(PROMPTS, 10), []), (None, diverge(0)), seconds=120, **experts
    )
    for run, error in ended:
        assert run is None
        assert "ranks take different graphs" not in error


@pytest.mark.parametrize("runner", RUNNERS)
def test_ranks_with_different_dispatchers_end_at_the_start(experts: dict[str, Any], runner: int) -> None:
    """A rank that would take a larger graph than the other for the same batch is named before it serves."""
    ended = run_in_ranks(
        "tape,guard", ([], []), (None, take_for(3, instead=8)), runner=runner, seconds=120, **experts
    )
    for run, error in ended:
        assert run is None
        assert "ranks would take different graphs for 3 tokens, 3 requests, decode of 1: " in error
        assert "dp0: FULL[4]" in error
        assert "dp1: FULL[8]" in error
