"""`RankAgreement`: two processes refuse the same graphs after each step."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from graphpact_guard import GraphKey, RankAgreement

SCRIPT = Path(__file__).parent / "agreement_rank.py"


def _run_ranks(folder: Path, *steps: list[str]) -> list[dict[str, Any]]:
    """Run two ranks, which refuse the graphs of ``steps``, one list for each rank; return what they print."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(folder / "store"), *its],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, its in enumerate(steps)
    ]
    try:
        ended = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], [err for _, err in ended]
    return [json.loads(out) for out, _ in ended]


def test_all_ranks_refuse_what_one_refuses(tmp_path: Path) -> None:
    """After each step all ranks have the same graphs, and they exchange them only if one has a new one."""
    first, second = _run_ranks(tmp_path, ["-", "4", "-", "-", "8"], ["-", "-", "-", "1,2", "16"])
    assert first["seen"] == [[], ["4"], ["4"], ["1", "2", "4"], ["1", "16", "2", "4", "8"]]
    assert second == first
    assert first["exchanges"] == 3


def test_a_process_alone_keeps_its_own() -> None:
    """Without other ranks nothing is exchanged, and no process group is needed."""
    refused = {GraphKey(runner="Decode", shape="4")}
    assert RankAgreement(None).update(refused) == refused
