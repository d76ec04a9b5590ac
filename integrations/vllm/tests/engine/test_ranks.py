"""vLLM's own processes of tensor parallelism on a tape: the answers are those of one process."""

import pytest
from engines import ENGINE, PROMPTS, requests, run_in_child

from graphpact.engines import EngineJob
from graphpact_vllm.offer import VllmOffer

RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def test_two_ranks_give_the_answers_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives inside of graphs are replayed, and no rank has a fault; all verify the same steps."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    one = run_in_child("tape", requests(every=0))
    job = EngineJob(engine=ENGINE | RANKS, prompts=list(PROMPTS), max_new_tokens=16)
    two = VllmOffer().run("tape,guard,contents:1,verify:4", job)
    assert [answer.token_ids for answer in two.answers] == one.tokens
    graphs = []
    for state in two.states:
        assert state["guard"]["faults"] == []
        graphs.append(state["guard"]["graphs"])
    assert graphs[0] == graphs[1]
    assert sum(graph["replays"] for graph in graphs[0].values()) > 10
    assert {state["guard"]["provenance"]["rank"] for state in two.states} == {"0 of 2 (tp0)", "1 of 2 (tp1)"}
