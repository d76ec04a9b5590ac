"""``graphpact sglang run``: the arguments of SGLang's runs. No engine starts here."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from graphpact.engines import EngineAnswer, EngineJob, EngineResult
from graphpact_cli import main
from graphpact_sglang.runs.offer import SglangOffer

MODEL = Path(__file__).parents[3] / "examples/models/tiny-llama"


def test_each_run_gets_arguments_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager run has SGLang's own attention for a CPU, and no arguments of graphs and drafts."""
    jobs: list[tuple[str, EngineJob]] = []

    def run(offer: SglangOffer, words: str, job: EngineJob) -> EngineResult:
        jobs.append((words, job))
        return EngineResult(answers=[EngineAnswer(text="", token_ids=[1], logprobs=[0.0])], states=[None])

    monkeypatch.setattr(SglangOffer, "unavailable", lambda offer: None)
    monkeypatch.setattr(SglangOffer, "run", run)
    sets = ("page_size=16", "attention_backend=fa3", "cuda_graph_bs_decode=[2]", "speculative_num_steps=3")
    options = [word for text in sets for word in ("--set", text)]
    assert main(["sglang", "run", "--model", str(MODEL), "x", *options]) == 1  # nothing was replayed
    (words, eager), (taped_words, taped) = jobs
    assert (words, taped_words) == ("", "tape,guard")
    assert eager.engine["model_path"] == taped.engine["model_path"] == str(MODEL)
    assert (eager.engine["page_size"], eager.engine["attention_backend"]) == (16, "torch_native")
    assert not [key for key in eager.engine if key.startswith(("cuda_graph", "speculative"))]
    assert taped.engine["attention_backend"] == "fa3"
    assert (taped.engine["cuda_graph_bs_decode"], taped.engine["speculative_num_steps"]) == ([2], 3)
    assert taped.engine["cuda_graph_backend_prefill"] == "breakable"


def _missing(name: str) -> str:
    raise PackageNotFoundError(name)


def test_without_sglang_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an environment without SGLang the command names the target that makes one."""
    monkeypatch.setattr("graphpact.engines.offer.version", _missing)
    assert main(["sglang", "run", "--model", str(MODEL), "x"]) == 2
    assert "`make sglang`, and then .venv-sglang/bin/graphpact sglang run" in capsys.readouterr().err
