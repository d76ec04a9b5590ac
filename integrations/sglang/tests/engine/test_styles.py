"""Right backends of every style in the real SGLang: the guard is silent."""

import pytest
from engines import PROMPTS, SECONDS, Run, requests, run_in_child
from plants import use
from styles import STYLES
from test_backends import FA3, TRITON

ARGUMENTS = {"json_model_override_args": '{"num_hidden_layers": 1}', "cuda_graph_backend_prefill": "disabled"}
WORDS = "tape,guard,contents:4,verify:32"


@pytest.fixture(scope="module")
def right() -> Run:
    """The answers of a model of one layer."""
    return run_in_child("tape", **ARGUMENTS)


def _steps(run: Run) -> int:
    return run.replays("DecodeCudaGraphRunner")


@pytest.mark.parametrize("style", STYLES)
def test_a_right_backend_of_any_style_passes_in_silence(right: Run, style: type, steps: int) -> None:
    """However a backend keeps its metadata, its replays are never reported."""
    rounds = -(-steps // _steps(right))
    run = run_in_child(WORDS, before=use(style), rounds=rounds, seconds=SECONDS + steps, **ARGUMENTS)
    assert run.tokens == right.tokens
    assert run.faults == []
    assert _steps(run) >= steps
    checked = run.state["guard"]["graphs"].values()
    assert sum(graph["contents"] for graph in checked) > steps // 8
    assert sum(graph["verified"] for graph in checked) > steps // 64


def test_flash_attention_passes_in_silence(right: Run, steps: int) -> None:
    """SGLang's own backend, which keeps one object for each size and new numbers in it."""
    rounds = -(-steps // _steps(right))
    run = run_in_child(WORDS, rounds=rounds, seconds=SECONDS + steps, **ARGUMENTS | FA3)
    assert run.tokens == right.tokens
    assert run.faults == []
    assert _steps(run) >= steps


def test_triton_passes_in_silence(right: Run, steps: int) -> None:
    """SGLang's own Triton backend, whose kernels are interpreted, in 50 steps at most."""
    steps = min(steps, 50)
    given = requests(PROMPTS[:2], every=1)
    run = run_in_child(WORDS, given, rounds=-(-steps // 15), **ARGUMENTS | TRITON)
    assert run.tokens == right.tokens[:2]
    assert run.faults == []
    assert _steps(run) >= steps
