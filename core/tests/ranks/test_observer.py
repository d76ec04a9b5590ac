"""`RankObserver` and `RecordedCollectives`: ranks that differ are named before a collective could hang."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from graphpact.ranks import Collective, RecordedCollectives

REDUCE = "allreduce_ of [2, 7] float64 in group tensor, 2 ranks, at "
GATHER = "_allgather_base_ of [4, 7] float64 and [2, 7] float64 in group {}, 2 ranks, at "
OF_TENSOR, ELSEWHERE = GATHER.format("tensor"), GATHER.format("attention")
LINES = {REDUCE: "dist.all_reduce(logits, ", OF_TENSOR: "_gather(gathered, ", ELSEWHERE: "_gather(gathered, "}
DIFFERENCES = {
    "swapped": (f"collective 0: {REDUCE}", f"collective 0: {OF_TENSOR}"),
    "skipped": (f"collective 0: {REDUCE}", f"collective 0: {OF_TENSOR}"),
    "another group": (f"collective 1: {OF_TENSOR}", f"collective 1: {ELSEWHERE}"),
}
"""What each rank was about to call where it differs from the other one, by case."""


@pytest.fixture(scope="module")
def found(start_ranks: Callable[..., Any]) -> list[dict[str, Any]]:
    """Return the errors of both ranks, by case."""
    ranks = start_ranks("observer_rank.py")
    return [ranks.printed_by(rank)[0] for rank in range(2)]


def _same(texts: list[str]) -> str:
    """Return the text that both ranks have."""
    assert len({*texts}) == 1, texts
    return texts[0]


@pytest.mark.parametrize("case", DIFFERENCES)
@pytest.mark.parametrize("action", ["capture", "eager"])
def test_a_different_collective_is_named_with_its_place(
    case: str, action: str, found: list[dict[str, Any]]
) -> None:
    """A swapped, skipped or misdirected collective is one error: each rank, position, operation and line."""
    text = _same([rank[action][case] for rank in found])
    doing = {
        "capture": "capture decode[bs=2, tokens=2] in lane 'decode'",
        "eager": "lane 'decode', an eager step",
    }
    first, second = text.split("; rank 1: ")
    for part, call, rank in (
        (first, DIFFERENCES[case][0], "rank 0: "),
        (f"rank 1: {second}", DIFFERENCES[case][1], "rank 1: "),
    ):
        assert f"{rank}{doing[action]}, {call}" in part
        assert LINES[call.partition(": ")[2]] in part
        assert "observer_rank.py:" in part
    assert "help: call the same collectives, in the same order and groups, on every rank" in text


def test_a_collective_too_many_is_named_with_what_the_other_rank_does(found: list[dict[str, Any]]) -> None:
    """A rank that is done, or already records, is told from one that calls a further collective."""
    eager, capture = (_same([rank[action]["one more"] for rank in found]) for action in ("eager", "capture"))
    assert "rank 0: lane 'decode', an eager step, no further collective, exchange 3; rank 1: " in eager
    assert (
        f"rank 0: capture decode[bs=2, tokens=2] in lane 'decode', recorded collective 0: {REDUCE}" in capture
    )
    for text in (eager, capture):
        assert f", collective 2: {OF_TENSOR}" in text.partition("; rank 1: ")[2]


def test_the_note_of_a_rank_names_its_collective(found: list[dict[str, Any]]) -> None:
    """While a rank waits, `RankWatch` knows the collective of the step, its position and its group."""
    assert found[0]["doing"] == "lane 'decode', an eager decode step, at its end"
    assert found[1]["doing"] == f"lane 'decode', an eager decode step, collective 2: {OF_TENSOR[:-5]}"


def test_equal_sequences_pass(found: list[dict[str, Any]]) -> None:
    """Strict lanes with the same collectives capture, replay and run eagerly, with eager results."""
    for rank in found:
        assert rank["equal"] == [True, True, True]
        assert rank["steps"] == [2, 1]


def test_captures_may_have_exchanges_of_their_own(found: list[dict[str, Any]]) -> None:
    """A capture is compared by the exchanges of captures, at its begin and end; a replay by the others."""
    assert [rank["exchanges"] for rank in found] == [[[0, 2], [1, 2]]] * 2


def test_another_shape_graph_or_eager_run_is_named(found: list[dict[str, Any]]) -> None:
    """Captures of two shapes, replays of two, and a replay beside an eager step are refused by name."""
    shapes = [f"decode[bs={n}, tokens={n}]" for n in (2, 4)]
    expected = {
        "another shape": [f"capture {shape} in lane 'decode'" for shape in shapes],
        "another graph": [f"lane 'decode', replay {shape}" for shape in shapes],
        "no graph": [f"lane 'decode', replay {shapes[0]}", "lane 'decode', an eager step"],
    }
    for case, (first, second) in expected.items():
        text = _same([rank[case] for rank in found])
        assert f"rank 0: {first}, exchange " in text
        assert f"rank 1: {second}, exchange " in text


def test_every_collective_is_recorded_once_and_nothing_else(found: list[dict[str, Any]]) -> None:
    """Blocking, asynchronous and functional collectives are recorded in order, without transfers or waits."""
    expected = [
        "allreduce_ of [2] float32 in group attention, 2 ranks",
        "allgather_ of [2] float32 in group default_pg, 2 ranks",
        "all_reduce of [2] float32 in group tensor, 2 ranks",
        "broadcast_ of [1] float32 in group default_pg, 2 ranks",
    ]
    assert [rank["recorded"] for rank in found] == [expected, expected]


def test_code_inside_still_compiles() -> None:
    """`torch.compile` works while collectives are recorded, so that captures have the compiled kernels."""
    compiled = []

    def backend(module: fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(module)
        return module.forward

    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    calls: list[Collective] = []
    with RecordedCollectives(calls.append):
        assert torch.compile(double, backend=backend)(torch.ones(2)).tolist() == [2, 2]
    assert len(compiled) == 1
    assert calls == []
