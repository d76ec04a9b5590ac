"""The commands of the pages about vLLM, as they stand there."""

import re
import shlex
from pathlib import Path

import pytest
from engines import MODEL, ROOT
from page_commands import commands, get, parts, run, serving

LAPTOP = ROOT / "docs/how-to/vllm-laptop.md"
GUARD = ROOT / "docs/how-to/vllm-guard.md"
MANY = ROOT / "docs/how-to/vllm-many-machines.md"
RUNS = commands(LAPTOP, ".venv-vllm/bin/graphpact vllm run")


def test_the_page_has_four_commands() -> None:
    """The page shows a run on the tape, a strict one, piecewise graphs in V1, and a third party's backend."""
    fast, strict, pieces, plugged = RUNS
    assert "attention_backend=GRAPHPACT_MY_ATTENTION" in plugged
    assert shlex.split(strict) == [*shlex.split(fast), "--strict"]
    assert parts(pieces)[0] == {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@pytest.mark.parametrize(
    ("command", "graph", "answers"),
    [
        (RUNS[1], "ModelCudaGraphManager[8]", 6),
        pytest.param(RUNS[2], "CUDAGraphWrapper[6][1]", 1, marks=pytest.mark.sweep),
        (RUNS[3], "ModelCudaGraphManager[1]", 1),
    ],
    ids=["strict", "pieces", "third party"],
)
def test_a_command_compares_the_engine_with_itself(command: str, graph: str, answers: int) -> None:
    """The real engine, in processes of its own, gives its eager answers on the tape."""
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert f"{answers} of {answers} answers have the eager tokens" in done.stderr
    assert "; 0 faults;" in done.stderr
    assert re.search(rf"^{re.escape(graph)} +[1-9]", done.stderr, re.MULTILINE)


def test_a_command_writes_the_choice_for_each_batch() -> None:
    """Decodes take full graphs, a batch with a prefill none, and no choice is wrong."""
    (command,) = commands(MANY, ".venv-vllm/bin/graphpact vllm dispatch")
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ModelCudaGraphManager +decode of 1 +5 to 8 +FULL\[8\]", done.stdout, re.MULTILINE)
    assert re.search(r"^ModelCudaGraphManager +with a prefill +1 to 9 +eager", done.stdout, re.MULTILINE)
    assert "0 of their graphs are wrong; 1 ranks" in done.stderr


def test_a_server_is_guarded_as_the_page_says(tmp_path: Path) -> None:
    """The words of both commands, the counts for developers, and the last line of a worker that has time."""
    (by_hand,) = commands(LAPTOP, "api_server")
    guarded, _records = commands(GUARD, "api_server")
    settings, command = parts(by_hand.replace(f"{MODEL.relative_to(ROOT)}", str(MODEL)))
    settings["GRAPHPACT"] += f",{parts(guarded)[0]['GRAPHPACT']}"
    settings |= {"VLLM_SERVER_DEV_MODE": "1"}
    with serving(tmp_path, settings, [*command, "--shutdown-timeout", "30"]) as (address, log):
        asked = {"model": str(MODEL), "prompt": "The ", "max_tokens": 12, "temperature": 0}
        assert get(f"{address}/v1/completions", asked)["usage"]["completion_tokens"] == 12
        (state,) = get(f"{address}/collective_rpc", {"method": "graphpact_state"})["results"]
    assert "graphpact guard: on" in log.read_text()
    graph = state["guard"]["graphs"]["ModelCudaGraphManager[1]"]
    assert graph["replays"] == 11
    assert graph["verified"] == 1
    assert state["guard"]["faults"] == []
    assert (
        "graphpact guard: 11 replays of 4 graphs; contents checked in 1; 1 verified; 0 faults"
        in log.read_text()
    )
