"""What commands get of SGLang without importing it: whether it can run, and a run in a process of its own."""

import sys
from pathlib import Path

import pytest

from graphpact.engines import EngineJob, EngineResult
from graphpact.errors import EngineError
from graphpact.plugins import Loaded, PluginInfo
from graphpact_cli.survey import describe_plugin
from graphpact_sglang import offer
from graphpact_sglang.offer import SglangOffer

JOB = EngineJob(engine={"page_size": 16}, prompts=["one", "two"], max_new_tokens=3)
_PROGRAM = """#!{python}
import json, os, sys
asked, result = sys.argv[3:]
print("graphpact guard: GP01 Acme.kv in Decode[1]: a fault")
print("GRAPHPACT is", os.environ["GRAPHPACT"])
job = json.load(open(asked))
if job["max_new_tokens"] == 0:
    sys.exit("CUDA is on fire")
answers = [{{"text": p, "token_ids": [1], "logprobs": [-1.0]}} for p in job["prompts"]]
json.dump({{"answers": answers, "states": [None], "stood_in": []}}, open(result, "w"))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of Python, which answers a job without an engine."""
    path = tmp_path / "python"
    path.write_text(_PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setattr(offer.sys, "executable", str(path))


@pytest.mark.usefixtures("program")
def test_a_job_runs_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """The process gets job and words and writes the result; faults in its log are shown, the rest is not."""
    result = SglangOffer().run("tape,guard", JOB)
    assert isinstance(result, EngineResult)
    assert [answer.text for answer in result.answers] == ["one", "two"]
    assert capsys.readouterr().err == "graphpact guard: GP01 Acme.kv in Decode[1]: a fault\n"


@pytest.mark.usefixtures("program")
def test_a_failed_run_shows_the_end_of_its_log() -> None:
    """The error has the engine's status and its last lines."""
    with pytest.raises(EngineError, match=r"(?s)status 1:.*GRAPHPACT is guard\nCUDA is on fire"):
        SglangOffer().run("guard", EngineJob(engine={}, prompts=[], max_new_tokens=0))


@pytest.mark.parametrize(
    ("installed", "reason"), [("0.5.23", None), ("0.6.0", "SGLang 0.6.0 is none of 0.5.19, 0.5.21, 0.5.23")]
)
def test_the_list_of_plugins_says_whether_it_can_run(
    monkeypatch: pytest.MonkeyPatch, installed: str, reason: str | None
) -> None:
    """`graphpact plugins` shows an engine with the reason why it cannot run here, if it cannot."""
    monkeypatch.setattr(offer, "version", lambda name: installed)
    info = PluginInfo(
        "engine", "sglang", "graphpact-sglang", "0.1.0", "graphpact_sglang.offer:SglangOffer", "1"
    )
    about = describe_plugin(Loaded(info, SglangOffer))
    assert about["unavailable"] == {"SGLang": reason}
