"""The choice of vLLM's dispatchers for every batch: a table, and a check before vLLM serves."""

from collections.abc import Callable
from typing import Any

import pytest
from divergences import take_decodes_for_prefills, take_for
from engines import NGRAMS, run_in_child, sweep_but

RUNNERS = (1, 2)
OWNERS = {1: "CudagraphDispatcher", 2: "ModelCudaGraphManager"}


WRONG: dict[str, tuple[Callable[[], None], str]] = {
    "size": (take_for(3, instead=2), "decode of 1; it holds 2 tokens, and the batch has 3"),
    "kind": (take_decodes_for_prefills, "it is for requests of 1 tokens each, and the batch is "),
}


@pytest.mark.parametrize(("wrong", "runner"), sweep_but({("size", 1), ("kind", 2)}, WRONG, RUNNERS))
def test_a_wrong_choice_is_named_at_the_start(wrong: str, runner: int) -> None:
    """A graph that is too small for a batch, or of another kind, is named by dispatcher and batch."""
    before, text = WRONG[wrong]
    run = run_in_child("tape,guard", [], before=before, runner=runner)
    found = [fault for fault in run.state["guard"]["faults"] if fault["rule"] == "GP12"]
    assert {fault["owner"] for fault in found} == {OWNERS[runner]}
    assert any(text in fault["text"] for fault in found)
    with pytest.raises(AssertionError, match=rf"GuardError: {OWNERS[runner]}.dispatch in "):
        run_in_child("tape,guard,raise", [], before=before, runner=runner)


RIGHT: dict[str, dict[str, Any]] = {"decodes": {}, "drafts": NGRAMS}


@pytest.mark.parametrize(("right", "runner"), sweep_but({("decodes", 1), ("drafts", 2)}, RIGHT, RUNNERS))
def test_the_choices_of_the_released_dispatchers_are_right(right: str, runner: int) -> None:
    """Without a plant no choice is wrong."""
    run = run_in_child("tape,guard", [], runner=runner, **RIGHT[right])
    assert run.faults == []
