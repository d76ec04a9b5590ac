"""``graphpact vllm run``: the arguments of vLLM's runs. No engine starts here."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import graphpact_vllm
from graphpact.engines import EngineAnswer, EngineJob, EngineResult
from graphpact_cli import main
from graphpact_vllm.runs.offer import VllmOffer

MODEL = Path(__file__).parents[3] / "examples/models/tiny-llama"


def test_each_run_gets_arguments_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager run has vLLM's own choice of attention, and no arguments of graphs and drafts."""
    jobs: list[tuple[str, EngineJob]] = []

    def run(offer: VllmOffer, words: str, job: EngineJob) -> EngineResult:
        jobs.append((words, job))
        return EngineResult(answers=[EngineAnswer(text="", token_ids=[1], logprobs=[0.0])], states=[None])

    monkeypatch.setattr(VllmOffer, "unavailable", lambda offer: None)
    monkeypatch.setattr(VllmOffer, "run", run)
    sets = ("block_size=16", "attention_backend=TRITON_ATTN", 'speculative_config={"method": "ngram"}')
    options = [word for text in sets for word in ("--set", text)]
    assert main(["vllm", "run", "--model", str(MODEL), "x", *options]) == 1  # nothing was replayed
    (words, eager), (taped_words, taped) = jobs
    assert (words, taped_words) == ("", "tape,guard")
    assert eager.engine["model"] == taped.engine["model"] == str(MODEL)
    assert (eager.engine["block_size"], eager.engine["enforce_eager"]) == (16, True)
    assert not {"attention_backend", "speculative_config"} & eager.engine.keys()
    assert eager.engine["compilation_config"] == {"custom_ops": ["-rotary_embedding"]}
    assert "enforce_eager" not in taped.engine
    assert taped.engine["attention_backend"] == "TRITON_ATTN"
    assert taped.engine["speculative_config"] == {"method": "ngram"}
    assert taped.engine["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"


def _missing(name: str) -> str:
    raise PackageNotFoundError(name)


def test_without_vllm_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an environment without vLLM the command names the target that makes one."""
    monkeypatch.setattr(graphpact_vllm, "version", _missing)
    assert main(["vllm", "run", "--model", str(MODEL), "x"]) == 2
    assert "`make vllm`, and then .venv-vllm/bin/graphpact vllm run" in capsys.readouterr().err


def test_its_help_names_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """The command group is found by its entry point, and its help is about vLLM."""
    assert main(["vllm", "--help"]) == 0
    assert "Continue prompts greedily with vLLM" in capsys.readouterr().out
