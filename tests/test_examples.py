"""Tests of the model and the examples that the repository ships."""

import runpy
from pathlib import Path

import pytest
import torch
import transformers

from checkpoints import needs_seam
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples/models/tiny-llama"


def test_the_model_is_small_and_safe() -> None:
    """The shipped model is at most 4 MB, and its weights are safetensors."""
    files = [file for file in MODEL.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 4_000_000
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in files}
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".md"}


@pytest.mark.parametrize("text", ["Return a ", "naïve café ☕\n\ttabs", "", " ", "\x00\x7f"])
def test_the_tokenizer_is_bytes(text: str) -> None:
    """Each token is one byte: decoding gives the encoded text, and no token is put before it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_planted_bugs_are_silent_and_then_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Without checks the three bugs raise nothing and two give wrong answers; with checks each is named."""
    runpy.run_path(str(ROOT / "examples/break_it.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert out.count("unchecked: no error") == 3
    assert out.count("3 of 3 answers wrong") == 2
    assert "NOT CAUGHT" not in out
    for error in (
        "PactBreach: decode[bs=4, tokens=4]: metadata.qo_indptr",
        "PoisonError: graphpact.fill_paged_indices",
        "VerificationError: lane 'decode'",
    ):
        assert error in out
    assert "rows 3:4 of slot 'req_pool_indices' of decode inputs" in out
    assert "first field that differs: metadata.kv_indptr" in out


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("file", "backend"),
    [
        ("demo.toml", "flashinfer"),
        pytest.param("demo.toml", "fa3", marks=pytest.mark.sweep),
        pytest.param("deepseek.toml", "trtllm_mla", marks=needs_seam),
    ],
)
def test_every_backend_by_name_writes_what_transformers_writes(file: str, backend: str) -> None:
    """Greedy tokens of the demo's prompts equal transformers', and every replay is verified."""
    config = EngineConfig.load(
        ROOT / "examples" / file,
        env={},
        overrides=[
            "verify.replay_against_eager=1.0",
            'engine.device="cpu"',
            f"engine.attention_backend={backend}",
        ],
    )
    prompts = (ROOT / "examples/prompts.txt").read_text().splitlines()
    assert len(prompts) >= 4
    assert len({len(prompt) for prompt in prompts}) == len(prompts)
    with Engine(config) as engine:
        done = engine.generate(prompts, SamplingParams(max_new_tokens=24))
        assert engine.lanes[0].stats.replays == engine.verifiers[0].verified > 0
    path = config.model.path
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([list(prompt.encode())])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert completion.token_ids == out[0, ids.shape[1] :].tolist()
