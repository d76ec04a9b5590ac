"""SGLang's own attention backends on a tape: FlashAttention-3 with a modelled kernel, Triton interpreted."""

from typing import Any

import pytest
from engines import PROMPTS, Run, requests, run_in_child

from graphpact_sglang.load.in_process import InProcessEngine

DECODE = {"cuda_graph_backend_prefill": "disabled"}
FA3 = DECODE | {"attention_backend": "fa3"}
TRITON = DECODE | {"attention_backend": "triton", "cuda_graph_bs_decode": [2]}


@pytest.fixture(scope="module")
def eager() -> Run:
    """The run of the eager engine with SGLang's own attention for a CPU."""
    off = {"cuda_graph_backend_decode": "disabled", "attention_backend": "torch_native"}
    return run_in_child("tape", requests(every=0), **DECODE | off)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        pytest.param("tape,guard,contents:1,verify:1", {}, marks=pytest.mark.smoke),
        ("tape:strict,guard,contents:1", {}),
        ("tape,guard,contents:1,verify:1", {"page_size": 16}),
    ],
    ids=["fast", "strict", "pages"],
)
def test_flash_attention_answers_as_the_eager_engine(
    eager: Run, words: str, arguments: dict[str, Any]
) -> None:
    """The released backend, its page tables and its schedule give the eager tokens, without a fault."""
    run = run_in_child(words, rounds=2, **FA3 | arguments)
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert run.replays("DecodeCudaGraphRunner") > 20
    checked = run.state["guard"]["graphs"].values()
    assert all(graph["contents"] == graph["replays"] for graph in checked)


@pytest.mark.parametrize("words", ["tape,guard,contents:1,verify:2", "tape:strict,guard,contents:1"])
def test_triton_answers_as_the_eager_engine(eager: Run, words: str) -> None:
    """The released Triton backend, each launch one node, gives the eager tokens, without a fault."""
    run = run_in_child(words, requests(PROMPTS[:2], max_new_tokens=3, every=1), **TRITON)
    assert run.tokens == [tokens[:3] for tokens in eager.tokens[:2]]
    assert run.faults == []
    assert run.replays("DecodeCudaGraphRunner") >= 2


# -- faults of a plan ----------------------------------------------------------------------------------------


def _long() -> list[Any]:
    """Return requests whose keys need more blocks of a schedule than those of the capture."""
    return requests([" ".join(PROMPTS), " ".join(PROMPTS[2:])], max_new_tokens=20)


def stale_schedule(engine: InProcessEngine) -> None:
    """Leave FlashAttention's schedule as the capture made it."""
    engine.model_runner.attn_backend._compute_scheduler_metadata = lambda *args: None


def stale_schedule_with_an_invariant(engine: InProcessEngine) -> None:
    """The same, and the backend declares what must hold of its schedule."""
    stale_schedule(engine)
    backend = engine.model_runner.attn_backend

    def counts_all_keys(backend: Any, batch: Any) -> bool:
        del batch
        metadata = backend.forward_metadata
        expected = backend._get_scheduler_metadata(
            batch_size=len(metadata.cache_seqlens_int32),
            cache_seqlens=metadata.cache_seqlens_int32,
            cu_seqlens_q=metadata.cu_seqlens_q,
        )
        return bool((metadata.scheduler_metadata[: len(expected)] == expected).all())

    backend.graphpact_invariants = {"the schedule counts all keys": counts_all_keys}


def test_a_plan_that_is_not_renewed_is_seen_by_an_eager_run() -> None:
    """A stale schedule keeps its address and has no known contents: verification shows what it does."""
    right = run_in_child("tape,guard,verify:1", _long(), **FA3)
    assert right.faults == []
    run = run_in_child("tape,guard,contents:1,verify:1", _long(), stale_schedule, **FA3)
    assert run.tokens != right.tokens
    assert {fault[:3] for fault in run.faults} == {("verify", "outputs", "next_token_logits")}


def test_a_declared_invariant_names_the_plan() -> None:
    """A backend may declare predicates of its plan; one that does not hold is named before the replay."""
    run = run_in_child("tape,guard", _long(), stale_schedule_with_an_invariant, **FA3)
    assert ("GP09", "FlashAttentionBackend", "the schedule counts all keys") in {f[:3] for f in run.faults}
