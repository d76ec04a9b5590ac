"""`RankAgreement`: two processes refuse the same graphs after each step."""

from pathlib import Path
from typing import Any

from rank_processes import run_ranks

from graphpact_guard import GraphKey, RankAgreement

SCRIPT = Path(__file__).parent / "agreement_rank.py"


def _run_ranks(folder: Path, *steps: list[str]) -> list[dict[str, Any]]:
    """Run two ranks, which refuse the graphs of ``steps``, one list for each rank; return what they print."""
    return run_ranks(SCRIPT, [[str(rank), str(folder / "store"), *its] for rank, its in enumerate(steps)])


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
