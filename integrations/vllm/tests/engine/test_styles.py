"""Right builders of every style in the real vLLM: the guard is silent."""

import pytest
from engines import SECONDS, Run, run_in_child
from plants import use
from styles import STYLES, Namespaces, ObjectOfASize, Slots

WORDS = "tape,guard,contents:4,verify:32"


@pytest.fixture(scope="module")
def right() -> Run:
    """The answers without a guard."""
    return run_in_child("tape", runner=1)


@pytest.mark.parametrize("style", STYLES)
def test_a_right_builder_of_any_style_passes_in_silence(right: Run, style: type, steps: int) -> None:
    """However a builder keeps its metadata, its replays are never reported."""
    rounds = -(-steps // right.replays())
    run = run_in_child(WORDS, before=use(style), rounds=rounds, runner=1, seconds=SECONDS + steps)
    assert run.tokens == right.tokens
    assert run.faults == []
    assert run.replays() >= steps
    checked = run.state["guard"]["graphs"].values()
    assert sum(graph["contents"] for graph in checked) > steps // 8
    assert run.verified() > steps // 64


@pytest.mark.parametrize(
    "style", [ObjectOfASize, *(pytest.param(each, marks=pytest.mark.sweep) for each in (Namespaces, Slots))]
)
def test_they_pass_in_the_other_model_runner_too(right: Run, style: type) -> None:
    """The same in the model runner V2, whose own kernels the interpreter runs slowly."""
    run = run_in_child(WORDS, before=use(style))
    assert run.tokens == right.tokens
    assert run.faults == []
    assert run.replays() > 20
    assert sum(graph["contents"] for graph in run.state["guard"]["graphs"].values()) > 2
