"""Tests of collectives in regions: two gloo processes capture and replay them with every recording driver."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "models" / "tiny-llama"


@pytest.fixture(scope="module", params=["fast strict", pytest.param("inductor", marks=pytest.mark.sweep)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the outcomes of both ranks for some drivers."""
    folder = tmp_path_factory.mktemp("ranks")
    job = [str(ROOT / "tests" / "graphs" / "ranks.py"), str(MODEL), str(folder), *request.param.split()]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [sys.executable, *launcher, *job],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    ranks = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert all(
        [*rank[part]] == request.param.split() for rank in ranks for part in ("cases", "refused", "model")
    )
    return ranks


def test_replayed_collectives_equal_eager_ones(found: list[dict[str, Any]]) -> None:
    """With two new inputs each collective, blocking or not, gives the eager results on all ranks."""
    for rank in found:
        for driver, cases in rank["cases"].items():
            assert len(cases) == (5 if driver == "inductor" else 22 + (torch.__version__ >= (2, 12)))
            assert {case: outcome for case, outcome in cases.items() if outcome != "equal"} == {}


def test_a_model_split_by_transformers_replays_its_collectives(found: list[dict[str, Any]]) -> None:
    """Replays of a tensor-parallel transformers model equal eager runs, and the logits of one process."""
    for rank in found:
        assert {*rank["model"].values()} == {"equal"}


def test_transfers_and_barriers_are_refused_by_name(found: list[dict[str, Any]]) -> None:
    """A point-to-point transfer or a barrier in a region is refused, with its name and the caller's line."""
    first = {
        "send and recv": ["send", "recv_"],
        "batch_isend_irecv": ["send"] * 2,
        "barrier": ["barrier"] * 2,
    }
    for at, rank in enumerate(found):
        for errors in rank["refused"].values():
            assert errors.keys() == first.keys()
            for what, error in errors.items():
                name = first[what][at]
                assert f"c10d.{name}.default is called while a graph is recorded, at " in error
                assert "ranks.py:" in error


def test_a_trace_names_group_and_reduction(found: list[dict[str, Any]]) -> None:
    """The trace of a collective has the name and size of its group, and the reduction."""
    (call,) = found[0]["trace"]
    assert call[0] == "c10d.allreduce_.default"
    assert call[2:4] == ["group 0 (default_pg), 2 ranks", "MAX"]


def test_what_a_collective_writes_has_to_be_declared(found: list[dict[str, Any]]) -> None:
    """A strict capture refuses a collective that writes undeclared memory; its schema hides the write."""
    assert "c10d._allgather_base_.default writes a tensor of torch.float32 (8,)" in found[0]["undeclared"]
    assert "ranks.py:" in found[0]["undeclared"]
