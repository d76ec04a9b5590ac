"""SGLang's real scheduler and runners on a tape: the answers are those of its eager runs."""

from typing import Any

import pytest
from engines import PROMPTS, Run, requests, run_in_child

EAGER = {
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "attention_backend": "torch_native",
}


@pytest.fixture(scope="module")
def eager() -> Run:
    """The run of SGLang's own eager engine: no graph, and its own attention."""
    return run_in_child("tape", requests(every=0), **EAGER)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        pytest.param("tape,guard,contents:1,verify:1", {}, marks=pytest.mark.smoke),
        pytest.param("tape:strict,guard,contents:1", {}, marks=pytest.mark.smoke),
        ("tape,guard,contents:1,verify:1", {"page_size": 16}),
        ("tape,guard,contents:1", {"disable_overlap_schedule": True}),
        ("tape,guard,contents:1", {"chunked_prefill_size": 8}),
        ("tape,guard,contents:1", {"disable_radix_cache": True, "cuda_graph_bs_decode": [8]}),
    ],
    ids=["fast", "strict", "pages", "no overlap", "chunks", "one size"],
)
def test_answers_on_a_tape_are_the_eager_ones(eager: Run, words: str, arguments: dict[str, Any]) -> None:
    """Requests that come one after another, in batches of 1 to 8, give SGLang's eager tokens, and no fault.

    The second round finds every prompt in the prefix cache.
    """
    assert eager.replays() == 0
    run = run_in_child(words, rounds=2, **arguments)
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert run.replays("DecodeCudaGraphRunner") > 20
    assert run.reasons == ["length"] * len(PROMPTS)


def test_an_aborted_request_leaves_the_others_alone(eager: Run) -> None:
    """Aborts in the queue and in a running batch change no other answer."""
    given = requests()
    given[2].aborted_in, given[6].aborted_in = 9, 13
    run = run_in_child("tape,guard,contents:1,verify:4", given)
    assert [run.reasons[2], run.reasons[6]] == ["abort", "abort"]
    others = [at for at in range(len(given)) if at not in (2, 6)]
    assert [run.tokens[at] for at in others] == [eager.tokens[at] for at in others]
    assert run.faults == []


def test_the_breakable_decode_backend_cannot_capture() -> None:
    """SGLang has a fault that the page describes: its breakable decode backend captures no model."""
    with pytest.raises(AssertionError, match="Unsupported BCG output type"):
        run_in_child("tape", cuda_graph_backend_decode="breakable")
