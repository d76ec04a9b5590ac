"""Tensor parallelism on the tape: two ranks give the answers of one process, and both are under the guard."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import ENGINE, PROMPTS, requests, run_in_child, run_ranks
from plants import swapped_metadata
from sglang.srt.runtime_context import get_parallel

from graphpact.engines import EngineJob, EngineResult
from graphpact.errors import ConfigError
from graphpact.recording import read_recording
from graphpact_sglang.load.in_process import InProcessEngine
from graphpact_sglang.seams.ranks import agreement_of_ranks

ASKED = PROMPTS[:3]
DECODE = {"cuda_graph_backend_prefill": "disabled"}
FAULTY = """
from dataclasses import replace
from typing import Any

from graphpact_sglang.attention.paged import PagedAttnBackend
from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.runtime_context import get_parallel


class FaultyBackend(PagedAttnBackend):
    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        metadata = self.forward_metadata
        if not in_capture and get_parallel().tp_rank == 1:
            self.forward_metadata = replace(metadata, kv_indptr=metadata.kv_indptr.long())


def register() -> None:
    register_attention_backend("faulty")(FaultyBackend)
    add_attention_backend_choices(["faulty"])
"""
"""A third party's plugin of SGLang, whose backend binds metadata of another dtype on the second rank."""


def _run(folder: Path, words: str, **arguments: Any) -> tuple[EngineResult, str]:
    """Run two ranks in SGLang's own processes; return the result, and what they logged."""
    engine = ENGINE | {"tp_size": 2, "log_level": "warning"} | arguments
    job = EngineJob(engine=engine, prompts=list(ASKED), max_new_tokens=16)
    asked, result = folder / "job.json", folder / "result.json"
    job.save(asked)
    variables = {
        "GRAPHPACT": words,
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "graphpact_sglang.runs.job", str(asked), str(result)],
        check=False,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return EngineResult.load(result), done.stderr


def _require_the_tokens_of_one(two: EngineResult) -> None:
    one = run_in_child("tape", requests(ASKED, max_new_tokens=16, every=0))
    for answer, tokens in zip(two.answers, one.tokens, strict=True):
        assert answer.token_ids == tokens[: len(answer.token_ids)]  # an end token ends the engine's answer
        assert len(answer.token_ids) > 8


def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    """Collectives inside the graphs are replayed; both ranks verify steps before serving and after.

    Each rank records its steps in a file of its own; they are the same steps.
    """
    file = tmp_path / "steps.jsonl"
    two, log = _run(tmp_path, f"tape,guard,contents:1,verify:4,start,record:{file}")
    _require_the_tokens_of_one(two)
    (state,) = two.states
    assert state is not None
    assert state["guard"]["faults"] == []
    assert state["guard"]["provenance"]["rank"] == "0 of 2"
    replayed = [graph for graph in state["guard"]["graphs"].values() if graph["replays"]]
    assert sum(graph["verified"] for graph in replayed) > 2
    assert log.count("graphpact guard: on") == 2  # one for each rank
    assert log.count("3 steps of 8 shapes before serving: 0 faults, 0 graphs refused") == 2
    assert not file.exists()
    recorded = read_recording(tmp_path / "steps.tp0.jsonl")
    assert {lane.line.lane for lane in recorded} == {"decode", "extend"}
    assert recorded == read_recording(tmp_path / "steps.tp1.jsonl")


def _rebind_on_the_second(engine: InProcessEngine) -> None:
    """Bind lengths of another dtype, on the second rank alone."""
    if get_parallel().tp_rank == 1:
        swapped_metadata(engine)


def test_ranks_refuse_together_while_they_serve() -> None:
    """What one rank finds in a step, all ranks run eagerly from the next one on, and answer as before."""
    asked = requests(ASKED, every=1)
    (right,) = run_ranks("tape", 1, asked, **DECODE)
    first, second = run_ranks("tape,guard,eager", 2, asked, _rebind_on_the_second, rounds=2, **DECODE)
    assert first.tokens == second.tokens == right.tokens
    assert first.faults == []
    named = ("PagedAttnBackend", "forward_metadata.kv_indptr")  # in other memory, of another dtype
    assert {fault[:3] for fault in second.faults} == {("GP01", *named), ("GP07", *named)}
    assert first.state["guard"]["refused"] == second.state["guard"]["refused"] != []
    assert first.replays() == second.replays() == len(second.state["guard"]["refused"])
    for run in (first, second):
        reasons = {each["reason"]: each["steps"] for each in run.state["steps"]["eager"]}
        assert reasons["the guard refused the graph after a fault"] > 20


@pytest.mark.parametrize("has", ["pp_size", "enable_dp_attention"])
def test_ranks_with_other_steps_cannot_agree(has: str) -> None:
    """Where ranks take steps of their own, ``eager`` ends the start: nothing can be agreed in a step."""
    arguments = SimpleNamespace(pp_size=2 if has == "pp_size" else 1, enable_dp_attention=has != "pp_size")
    with pytest.raises(ConfigError, match="cannot agree in a step"):
        agreement_of_ranks(arguments)


def test_a_fault_on_one_rank_is_reported_with_the_rank(tmp_path: Path) -> None:
    """What the second rank alone finds has its rank, and both refuse the graph: their collectives must meet.

    The backend is a third party's, found by SGLang's own entry points.
    """
    (tmp_path / "faulty.py").write_text(FAULTY)
    folder = tmp_path / "faulty-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaulty = faulty:register\n")
    two, log = _run(tmp_path, "tape,start:1,eager", **DECODE, attention_backend="faulty")
    _require_the_tokens_of_one(two)
    (state,) = two.states
    assert state is not None
    assert state["guard"]["faults"] == []  # those of the first rank
    assert len(state["guard"]["refused"]) == 4
    reports = re.findall(r"graphpact guard: (GP\d\d \S+) in .*\n.*\n +\(.*rank (.*)\)", log)
    assert ("GP07 FaultyBackend.forward_metadata.kv_indptr", "1 of 2, before serving") in reports
    assert {rank.partition(",")[0] for _, rank in reports} == {"1 of 2"}
