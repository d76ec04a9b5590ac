"""``graphpact sglang run``: the comparison of two runs, and what it refuses. No engine starts here."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from graphpact import engines
from graphpact.engines import EngineAnswer, EngineJob, EngineResult
from graphpact_cli import main
from graphpact_sglang.offer import SglangOffer

MODEL = Path(__file__).parents[3] / "examples/models/tiny-llama"


def _result(*token_ids: list[int], states: list[dict[str, Any] | None] | None = None) -> EngineResult:
    answers = [EngineAnswer(text=f" {ids}", token_ids=ids, logprobs=[-0.5] * len(ids)) for ids in token_ids]
    return EngineResult(answers=answers, states=states or [None])


def _state(replays: int = 3, faults: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    counts = {
        "capture_seconds": 0.1,
        "nodes": 209,
        "replays": replays,
        "raw": 2 * replays,
        "padded": 4 * replays,
    }
    eager = [{"mode": "extend", "reason": "padding to 16 tokens is too much", "steps": 2}]
    return {
        "steps": {"graphs": {"DecodeCudaGraphRunner[4]": counts}, "eager": eager},
        "guard": {"faults": list(faults)},
    }


FAULT = {
    "rule": "GP01",
    "owner": "AcmeBackend",
    "field": "forward_metadata.kv_indptr",
    "graph": "DecodeCudaGraphRunner[4]",
    "text": "address captured 0x1, got 0x2",
}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, EngineJob]]:
    """The jobs that were run; the results are those of `results`."""
    asked: list[tuple[str, EngineJob]] = []
    monkeypatch.setattr(SglangOffer, "unavailable", lambda offer: None)
    return asked


def _run(
    monkeypatch: pytest.MonkeyPatch,
    jobs: list[tuple[str, EngineJob]],
    results: list[EngineResult],
    *options: str,
) -> int:
    def run(offer: SglangOffer, words: str, job: EngineJob) -> EngineResult:
        jobs.append((words, job))
        return results[len(jobs) - 1]

    monkeypatch.setattr(SglangOffer, "run", run)
    return main(["sglang", "run", "--model", str(MODEL), *options])


def test_two_equal_runs_pass(
    monkeypatch: pytest.MonkeyPatch,
    jobs: list[tuple[str, EngineJob]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Texts go to stdout, the table of replays and eager steps to stderr, both runs to the report."""
    results = [_result([1, 2]), _result([1, 2], states=[_state()])]
    report = tmp_path / "run.json"
    options = ("a prompt", "--set", "page_size=16", "--set", "attention_backend=fa3", "--report", str(report))
    assert _run(monkeypatch, jobs, results, *options) == 0
    out, err = capsys.readouterr()
    assert out == "a prompt [1, 2]\n"
    assert "DecodeCudaGraphRunner[4]        3     6    50.0%   100 ms    209" in err
    assert "extend, eager                   2" in err
    assert "3 replays; 2 eager steps; 0 faults; 1 of 1 answers have the eager tokens" in err
    (words, eager), (taped_words, taped) = jobs
    assert (words, taped_words) == ("", "tape,guard")
    assert (eager.engine["page_size"], eager.engine["attention_backend"]) == (16, "torch_native")
    assert "cuda_graph_bs_decode" not in eager.engine
    assert taped.engine["attention_backend"] == "fa3"
    assert json.loads(report.read_text())["tape"]["answers"][0]["token_ids"] == [1, 2]


@pytest.mark.parametrize(
    ("taped", "message"),
    [
        (
            _result([1, 3], states=[_state()]),
            "the answer to prompt 0 differs: eager ' [1, 2]', tape ' [1, 3]'",
        ),
        (
            _result([1, 2], states=[_state(faults=(FAULT,))]),
            "AcmeBackend.forward_metadata.kv_indptr in DecodeCudaGraphRunner[4]: address captured 0x1",
        ),
        (_result([1, 2], states=[_state(replays=0)]), "nothing was replayed"),
    ],
    ids=["tokens", "fault", "no replay"],
)
def test_a_difference_a_fault_or_no_replay_fails(
    monkeypatch: pytest.MonkeyPatch,
    jobs: list[tuple[str, EngineJob]],
    capsys: pytest.CaptureFixture[str],
    taped: EngineResult,
    message: str,
) -> None:
    """Each gives exit status 1 and says what it is, after the texts and the table."""
    assert _run(monkeypatch, jobs, [_result([1, 2]), taped], "a prompt", "--strict") == 1
    out, err = capsys.readouterr()
    assert message in err
    assert out.startswith("a prompt")
    assert jobs[1][0] == "tape:strict,guard"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "there is no prompt"),
        (("x", "--set", "page_size"), "--set 'page_size' is not KEY=VALUE"),
        (("--file", "missing.txt"), "--file missing.txt: "),
        (("x", "--model", "/nowhere"), "--model /nowhere: there is no config.json"),
    ],
)
def test_wrong_options_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    jobs: list[tuple[str, EngineJob]],
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    """A wrong option gives exit status 2, before an engine starts."""
    assert _run(monkeypatch, jobs, [], *options) == 2
    assert message in capsys.readouterr().err
    assert jobs == []


def _missing(name: str) -> str:
    raise PackageNotFoundError(name)


def test_without_sglang_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an environment without SGLang the command names the target that makes one."""
    monkeypatch.setattr(engines, "version", _missing)
    assert main(["sglang", "run", "--model", str(MODEL), "x"]) == 2
    assert "make sglang" in capsys.readouterr().err


def test_prompts_come_from_a_file_too(
    monkeypatch: pytest.MonkeyPatch, jobs: list[tuple[str, EngineJob]], tmp_path: Path
) -> None:
    """Each non-blank line of the file is a prompt, after those of the arguments."""
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n two\n")
    results = [_result([1], [2], [3]), _result([1], [2], [3], states=[_state()])]
    assert _run(monkeypatch, jobs, results, "zero", "--file", str(file)) == 0
    assert jobs[0][1].prompts == ["zero", "one", " two"]
