"""vLLM's real scheduler and both of its model runners on a tape: the answers are those of eager runs."""

from typing import Any

import pytest
from engines import NGRAMS, PROMPTS, REPEATED, SECONDS, Run, requests, run_in_child, sweep_but

from graphpact.engines import PromptRequest

PIECES = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}}
BREAKABLE = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
RUNNERS = (1, 2)
EAGER = {"enforce_eager": True, "attention_backend": "CPU_ATTN"}
FULL = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@pytest.fixture(scope="module")
def eager() -> Run:
    """The run of vLLM's own eager engine: the model runner V1 with its attention for CPUs."""
    return run_in_child("tape", requests(every=0), runner=1, **EAGER)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fast": ("tape,guard,contents:1,verify:1", {}),
    "strict": ("tape:strict,guard,contents:1", {}),
    "pages": ("tape,guard,contents:1,verify:1", {"block_size": 16}),
    "chunks": ("tape,guard,contents:1", {"max_num_batched_tokens": 8}),
    "no prefix cache": ("tape,guard,contents:1", {"enable_prefix_caching": False}),
    "pieces": ("tape,guard,contents:1,verify:1", PIECES),
}


@pytest.mark.parametrize(
    ("case", "runner"),
    [
        *(
            pytest.param(case, runner, marks=pytest.mark.smoke)
            for case in ("fast", "strict")
            for runner in RUNNERS
        ),
        *sweep_but(
            {("pages", 1), ("chunks", 2), ("no prefix cache", 1), ("pieces", 2)}, [*CASES][2:], RUNNERS
        ),
    ],
)
def test_answers_on_a_tape_are_the_eager_ones(eager: Run, case: str, runner: int) -> None:
    """Requests that come one after another, in batches of 1 to 8, give vLLM's eager tokens, and no fault.

    The second round finds every prompt in the prefix cache.
    """
    words, arguments = CASES[case]
    assert eager.replays() == 0
    run = run_in_child(words, rounds=2, runner=runner, **arguments)
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert run.replays("ModelCudaGraphManager" if runner == 2 else "CUDAGraphWrapper") > 20
    assert run.reasons == ["length"] * len(PROMPTS)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_graph_that_is_broken_at_attention_gives_the_eager_answers(eager: Run, runner: int) -> None:
    """With breakable graphs, batches with a prefill replay too, and attention between their segments."""
    run = run_in_child(
        "tape,guard,contents:1,verify:1", rounds=2, runner=runner, environment=BREAKABLE, **PIECES
    )
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert run.replays("BreakableCUDAGraphWrapper") > 4


@pytest.mark.parametrize("runner", RUNNERS)
def test_drafts_of_ngrams_replay_full_graphs_of_several_tokens(runner: int) -> None:
    """A batch in which each request has its drafts replays a graph of as many tokens, with eager answers."""
    given = requests(REPEATED, 32, every=0)
    eager = run_in_child("tape", given, runner=1, **EAGER)
    run = run_in_child("tape,guard,contents:1,verify:1", given, runner=runner, **NGRAMS)
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert run.replays() > 4
    drafted = [name for name in run.state["steps"]["graphs"] if "requests" in name]
    assert sum(run.state["steps"]["graphs"][name]["replays"] for name in drafted) > 4


@pytest.mark.sweep
@pytest.mark.parametrize("runner", RUNNERS)
def test_the_triton_backend_gives_the_eager_answers(runner: int) -> None:
    """VLLM's own Triton backend, interpreted, gives the tokens of its backend for CPUs."""
    given = [PromptRequest(token_ids=[5, 9, 17, 33, 7][:size], max_new_tokens=6) for size in (5, 3)]
    short = {"max_model_len": 32, "max_num_batched_tokens": 32, "max_num_seqs": 2}
    sizes = FULL | {"cudagraph_capture_sizes": [2]}
    eager = run_in_child("tape", given, runner=1, **EAGER | short)
    run = run_in_child(
        "tape,guard,contents:1,verify:1",
        given,
        runner=runner,
        seconds=3 * SECONDS,
        attention_backend="TRITON_ATTN",
        block_size=16,
        compilation_config=sizes,
        **short,
    )
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert run.verified() == run.replays() > 3


@pytest.mark.parametrize("runner", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_requests_that_are_preempted_give_the_eager_answers(eager: Run, runner: int) -> None:
    """With a cache that is too small for all, requests are preempted, and nothing is wrong."""
    run = run_in_child(
        "tape,guard,contents:1,verify:1",
        requests(every=0),
        runner=runner,
        block_size=16,
        max_model_len=64,
        num_gpu_blocks_override=8,
    )
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert run.preemptions > 0
