"""Tensor parallelism on the tape: two ranks give the answers of one process, and both are under the guard."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines import ENGINE, requests, run_in_child
from engines import PROMPTS as ALL_PROMPTS

from graphpact_sglang.runs import Job, Result

PROMPTS = [*ALL_PROMPTS[:3]]
FAULTY = """
from typing import Any

from graphpact_sglang.attention import AttentionRows, PagedAttnBackend
from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.runtime_context import get_parallel


class FaultyBackend(PagedAttnBackend):
    def fill_graph_metadata(self, rows: AttentionRows) -> None:
        if get_parallel().tp_rank == 1 and self.forward_metadata is not None:
            self.graph_kv_indices = self.graph_kv_indices.clone()
        super().fill_graph_metadata(rows)


def register() -> None:
    register_attention_backend("faulty")(FaultyBackend)
    add_attention_backend_choices(["faulty"])
"""


def _run(folder: Path, words: str, **arguments: Any) -> tuple[Result, str]:
    """Run two ranks; return the result, and what they logged."""
    job = Job(
        engine=ENGINE | {"tp_size": 2, "log_level": "warning"} | arguments, prompts=PROMPTS, max_new_tokens=16
    )
    asked, result = folder / "job.json", folder / "result.json"
    asked.write_text(json.dumps(asdict(job)))
    variables = {
        "GRAPHPACT": words,
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "graphpact_sglang.job", str(asked), str(result)],
        check=False,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Result.load(result), done.stderr


def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    """Collectives inside the graphs are replayed; every fourth replay is verified, on both ranks."""
    two, log = _run(tmp_path, "tape,guard,contents:1,verify:4")
    one = run_in_child("tape", requests(PROMPTS, max_new_tokens=16, every=0))
    for answer, tokens in zip(two.answers, one.tokens, strict=True):
        assert answer.token_ids == tokens[: len(answer.token_ids)]  # an end token ends the engine's answer
        assert len(answer.token_ids) > 8
    (state,) = two.states
    assert state is not None
    assert state["guard"]["faults"] == []
    assert state["guard"]["provenance"]["rank"] == "0 of 2"
    replayed = [graph for graph in state["guard"]["graphs"].values() if graph["replays"]]
    assert sum(graph["verified"] for graph in replayed) > 2
    announced = [line for line in log.splitlines() if "graphpact guard: on" in line]
    assert len(announced) == 2  # one for each rank


def test_a_fault_on_one_rank_is_reported_with_the_rank(tmp_path: Path) -> None:
    """A third party's backend, found by SGLang's own entry points, is at fault on rank 1 alone."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    folder = tmp_path / "faulty-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaulty = faulty:register\n")
    two, log = _run(tmp_path, "tape,guard", attention_backend="faulty", cuda_graph_backend_prefill="disabled")
    (state,) = two.states
    assert state is not None
    assert state["guard"]["faults"] == []  # those of rank 0
    reports = re.findall(r"graphpact guard: (GP\d\d \S+) in .*\n.*\n +\(.*rank (.*)\)", log)
    assert ("GP01 FaultyBackend.forward_metadata.kv_indices", "1 of 2") in reports
    assert {rank for _, rank in reports} == {"1 of 2"}
