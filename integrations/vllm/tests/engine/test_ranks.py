"""vLLM's own processes of tensor and pipeline parallelism on a tape: the answers are those of one process."""

import pytest
from engines import ENGINE, PROMPTS, Run, requests, run_in_child

from graphpact.engines import EngineJob
from graphpact_vllm.runs.offer import VllmOffer


@pytest.fixture(scope="module")
def one() -> Run:
    """The run of one process."""
    return run_in_child("tape", requests(every=0))


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_two_ranks_give_the_answers_of_one(monkeypatch: pytest.MonkeyPatch, one: Run, kind: str) -> None:
    """Collectives inside of graphs are replayed, and no rank has a fault; all verify the same steps.

    Ranks of tensor parallelism compare every step, synthetic ones too, and always take the same graph.
    """
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    ranks = {f"{kind}_parallel_size": 2, "distributed_executor_backend": "mp"}
    job = EngineJob(engine=ENGINE | ranks, prompts=list(PROMPTS), max_new_tokens=16)
    start = 3 if kind == "tensor" else 0
    two = VllmOffer().run(f"tape,guard,contents:1,verify:4,ranks,start:{start}", job)
    assert [answer.token_ids for answer in two.answers] == one.tokens
    graphs = []
    for state in two.states:
        assert state["guard"]["faults"] == []
        graphs.append(state["guard"]["graphs"])
    assert graphs[0] == graphs[1]
    assert min(graph["started"] for graph in graphs[0].values()) == start
    assert sum(graph["replays"] for graph in graphs[0].values()) > 10
    name = {"tensor": "tp", "pipeline": "pp"}[kind]
    found = {state["guard"]["provenance"]["rank"] for state in two.states}
    assert found == {f"0 of 2 ({name}0)", f"1 of 2 ({name}1)"}
