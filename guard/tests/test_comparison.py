"""`RankComparison`: all ranks learn what each one chose, where the choices differ."""

from pathlib import Path

from rank_processes import run_ranks

from graphpact_guard import RankComparison, describe_ranks

SCRIPT = Path(__file__).parent / "comparison_rank.py"


def test_ranks_that_differ_learn_the_choice_of_each(tmp_path: Path) -> None:
    """Equal choices give None; other ones give the same line on all ranks, with the rarest first."""
    steps = [["a", "4", "b"], ["a", "8", "b"], ["a", "4", "b"]]
    found = run_ranks(SCRIPT, [[str(at), "3", str(tmp_path / "store"), *its] for at, its in enumerate(steps)])
    assert found == [[None, "dp1: replays 8; dp0, dp2: replays 4", None]] * 3


def test_a_process_alone_differs_from_none() -> None:
    """Without other ranks nothing is exchanged, and no process group is needed."""
    assert RankComparison(None, "dp0").differing("a", "a") is None


def test_a_rank_among_many_is_named_alone() -> None:
    """One rank of sixteen is named, and the others are counted."""
    said = {f"dp{rank // 8}.tp{rank % 8}": "replays X[8]" for rank in range(16)}
    said["dp0.tp7"] = "runs 5 tokens eagerly"
    line = "dp0.tp7: runs 5 tokens eagerly; 15 ranks from dp0.tp0 to dp1.tp7: replays X[8]"
    assert describe_ranks(said) == line
