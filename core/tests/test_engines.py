"""`ProcessOffer`: an engine whose runs are processes, here of a program that answers without an engine."""

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import ClassVar

import pytest

from graphpact.engines import EngineAnswer, EngineJob, EngineResult, ProcessOffer
from graphpact.errors import EngineError

JOB = EngineJob(engine={"page_size": 16}, prompts=["one", "two"], max_new_tokens=3)
_PROGRAM = """#!{python}
import json, os, sys
assert sys.argv[1:3] == ["-m", "graphpact_acme.job"]
asked, result = sys.argv[3:]
print("graphpact guard: GP01 Acme.kv in Decode[1]: a fault")
print("GRAPHPACT is", os.environ["GRAPHPACT"])
job = json.load(open(asked))
if job["max_new_tokens"] == 0:
    sys.exit("CUDA is on fire")
if job["max_new_tokens"] == 1:
    sys.exit(0)
answers = [{{"text": p, "token_ids": [1], "logprobs": [-1.0]}} for p in job["prompts"]]
json.dump({{"answers": answers, "states": [None], "stood_in": [os.environ["ACME"]]}}, open(result, "w"))
"""


class AcmeOffer(ProcessOffer):
    """An engine of a third party."""

    name: ClassVar[str] = "Acme"
    distribution: ClassVar[str] = "acme-cpu"
    supported: ClassVar[tuple[str, ...]] = ("1.0", "1.1")
    job_module: ClassVar[str] = "graphpact_acme.job"
    make_target: ClassVar[str] = "acme"

    def environment(self, words: str) -> dict[str, str]:
        """Return the environment variables of a run, with one of the engine's own."""
        return super().environment(words) | {"ACME": "serial"}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of Python, which answers a job without an engine."""
    path = tmp_path / "python"
    path.write_text(_PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.usefixtures("program")
def test_a_job_runs_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """The process gets job and words and writes the result; faults in its log are shown, the rest is not."""
    result = AcmeOffer().run("tape,guard", JOB)
    assert [answer.text for answer in result.answers] == ["one", "two"]
    assert result.stood_in == ["serial"]
    assert capsys.readouterr().err == "graphpact guard: GP01 Acme.kv in Decode[1]: a fault\n"


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("max_new_tokens", "log"),
    [(0, "Acme ended with status 1:.*GRAPHPACT is guard\nCUDA is on fire"), (1, "Acme ended with status 0:")],
    ids=["status", "no result"],
)
def test_a_failed_run_shows_the_end_of_its_log(max_new_tokens: int, log: str) -> None:
    """The error has the engine's status and its last lines, also if it ends without a result."""
    with pytest.raises(EngineError, match=f"(?s){log}"):
        AcmeOffer().run("guard", EngineJob(engine={}, prompts=[], max_new_tokens=max_new_tokens))


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ("1.1", None),
        ("2.0", "Acme 2.0 is none of 1.0, 1.1"),
        (None, "Acme is not installed in this environment; `make acme` makes one for it"),
    ],
)
def test_an_engine_says_why_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, reason: str | None
) -> None:
    """It can run if a release that the integration knows is installed; the version is its distribution's."""

    def version(name: str) -> str:
        assert name == "acme-cpu"
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("graphpact.engines.offer.version", version)
    assert AcmeOffer().unavailable() == reason


def test_jobs_and_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    """The process of a run reads the job that was saved, and the command the result that it saved."""
    JOB.save(tmp_path / "job.json")
    assert EngineJob.load(tmp_path / "job.json") == JOB
    answers = [EngineAnswer(text=" a", token_ids=[1, 2], logprobs=[-0.5, -0.25])]
    result = EngineResult(answers=answers, states=[{"guard": None}, None], stood_in=["decord"])
    result.save(tmp_path / "result.json")
    assert EngineResult.load(tmp_path / "result.json") == result
