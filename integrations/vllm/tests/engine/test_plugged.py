"""graphpact's attention backends served inside the real vLLM by name: its eager answers, and a silent guard."""

import pytest
from engines import Run, requests, run_in_child

FAST, STRICT = "tape,guard,contents:1,verify:1", "tape:strict,guard,contents:1"
EAGER = {"enforce_eager": True, "attention_backend": "CPU_ATTN"}
PLUGGED = ("GRAPHPACT_FLASHINFER", "GRAPHPACT_FA3", "GRAPHPACT_MY_ATTENTION")
"""Two backends of this repository, and that of a third party, ``examples/third_party``."""


@pytest.fixture(scope="module")
def eager() -> Run:
    """The run of vLLM's own eager engine."""
    return run_in_child("tape", requests(every=0), runner=1, **EAGER)


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("words", [FAST, STRICT], ids=["fast", "strict"])
@pytest.mark.parametrize("backend", PLUGGED)
def test_a_backend_of_graphpact_gives_the_eager_answers(
    eager: Run, backend: str, words: str, runner: int
) -> None:
    """Its metadata from vLLM's batches, and its attention, give vLLM's eager tokens, and no fault."""
    run = run_in_child(words, rounds=2, runner=runner, attention_backend=backend, block_size=16)
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert run.replays() > 20
    assert run.verified() == (run.replays() if words == FAST else 0)
