"""Tensor parallelism on the tape: two ranks give the answers of one process, and both are under the guard."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from engines import ENGINE, PROMPTS, requests, run_in_child

from graphpact_sglang.runs import Job, Result


def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    """Collectives inside the graphs are replayed; every fourth replay is verified, on both ranks."""
    prompts = list(PROMPTS[:3])
    job = Job(engine=ENGINE | {"tp_size": 2, "log_level": "warning"}, prompts=prompts, max_new_tokens=16)
    asked, result = tmp_path / "job.json", tmp_path / "result.json"
    asked.write_text(json.dumps(asdict(job)))
    words = {"GRAPHPACT": "tape,guard,contents:1,verify:4", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    done = subprocess.run(
        [sys.executable, "-m", "graphpact_sglang.job", str(asked), str(result)],
        check=False,
        env=os.environ | words,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two = Result.load(result)
    one = run_in_child("tape", requests(prompts, max_new_tokens=16, every=0))
    for answer, tokens in zip(two.answers, one.tokens, strict=True):
        assert answer.token_ids == tokens[: len(answer.token_ids)]  # an end token ends the engine's answer
        assert len(answer.token_ids) > 8
    (state,) = two.states
    assert state is not None
    assert state["guard"]["faults"] == []
    assert state["guard"]["provenance"]["rank"] == "0 of 2"
    replayed = [graph for graph in state["guard"]["graphs"].values() if graph["replays"]]
    assert sum(graph["verified"] for graph in replayed) > 2
    announced = [line for line in done.stderr.splitlines() if "graphpact guard: on" in line]
    assert len(announced) == 2  # one for each rank
