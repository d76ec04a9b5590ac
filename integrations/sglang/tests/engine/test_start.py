"""Synthetic steps before the engine serves: a right engine is as without them, a wrong graph is refused."""

import pytest
from engines import Run, run_in_child
from plants import BakedBackend, StaleBackend, use

from graphpact_sglang.attention.paged import PagedAttnBackend

WORDS = "tape,guard,contents:1"


@pytest.fixture(scope="module")
def right() -> Run:
    """The run of the engine without synthetic steps."""
    return run_in_child(WORDS, rounds=2)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [("tape,contents:1,start", {}), ("tape:strict,start", {}), ("tape,start:5", {"page_size": 16})],
    ids=["fast", "strict", "pages"],
)
def test_a_right_engine_is_as_without_synthetic_steps(
    right: Run, words: str, arguments: dict[str, object]
) -> None:
    """Every shape is compared, nothing is found, and answers and counts are those of a run without."""
    run = run_in_child(words, rounds=2, **arguments)
    assert run.faults == []
    assert run.tokens == right.tokens
    steps = 5 if "5" in words else 3
    for name, graph in run.state["guard"]["graphs"].items():  # prompts of decode steps use prefill graphs too
        assert graph["started"] == steps or (graph["started"] > steps and name.startswith("Prefill")), name
    if not arguments:
        assert run.replays() == right.replays()
        assert run.state["steps"]["eager"] == right.state["steps"]["eager"]


def _found_at_start(run: Run) -> set[tuple[str, str, str]]:
    """Return rule, owner and field of the faults that were found before the engine served."""
    faults = run.state["guard"]["faults"]
    return {(each["rule"], each["owner"], each["field"]) for each in faults if each["at_start"]}


@pytest.mark.parametrize(
    ("backend", "named"),
    [
        (BakedBackend, ("GP08", "BakedBackend", "forward_metadata.max_kv_len")),
        (StaleBackend, ("GP02", "StaleBackend", "kv_indices")),
    ],
)
def test_a_wrong_graph_is_named_and_refused_before_the_first_request(
    backend: type[PagedAttnBackend], named: tuple[str, str, str]
) -> None:
    """With ``eager``, every decode graph is refused at the start, and the answers are the eager ones."""
    eager = run_in_child("tape", before=use(backend), cuda_graph_backend_decode="disabled")
    wrong = run_in_child("tape", before=use(backend))
    assert wrong.tokens != eager.tokens
    run = run_in_child("tape,start,eager", before=use(backend))
    assert _found_at_start(run) >= {named, ("verify", "outputs", "next_token_logits")}
    assert run.tokens == eager.tokens
    assert run.replays("DecodeCudaGraphRunner") == 0
    assert run.replays("PrefillCudaGraphRunner") > 0


def test_a_wrong_graph_ends_the_start() -> None:
    """With ``raise``, the engine does not start, and the error names the field."""
    with pytest.raises(AssertionError, match=r"GuardError: StaleBackend.kv_indices in DecodeCudaGraphRunner"):
        run_in_child("tape,start,raise", [], before=use(StaleBackend))
