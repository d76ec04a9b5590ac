"""The choice of vLLM's dispatchers for every batch: a table, and a check before vLLM serves."""

from collections.abc import Callable

import pytest
from divergences import take_decodes_for_prefills, take_for
from engines import run_in_child

RUNNERS = (1, 2)
OWNERS = {1: "CudagraphDispatcher", 2: "ModelCudaGraphManager"}
DRAFTS = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [4, 8, 16, 32],
    },
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("before", "text"),
    [
        (take_for(3, instead=2), "decode of 1; it holds 2 tokens, and the batch has 3"),
        (take_decodes_for_prefills, "it is for requests of 1 tokens each, and the batch is "),
    ],
    ids=["size", "kind"],
)
def test_a_wrong_choice_is_named_at_the_start(runner: int, before: Callable[[], None], text: str) -> None:
    """A graph that is too small for a batch, or of another kind, is named by dispatcher and batch."""
    run = run_in_child("tape,guard", [], before=before, runner=runner)
    found = [fault for fault in run.state["guard"]["faults"] if fault["rule"] == "GP12"]
    assert {fault["owner"] for fault in found} == {OWNERS[runner]}
    assert any(text in fault["text"] for fault in found)
    with pytest.raises(AssertionError, match=rf"GuardError: {OWNERS[runner]}.dispatch in "):
        run_in_child("tape,guard,raise", [], before=before, runner=runner)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("arguments", [{}, DRAFTS], ids=["decodes", "drafts"])
def test_the_choices_of_the_released_dispatchers_are_right(runner: int, arguments: dict) -> None:
    """Without a plant no choice is wrong."""
    run = run_in_child("tape,guard", [], runner=runner, **arguments)
    assert run.faults == []
