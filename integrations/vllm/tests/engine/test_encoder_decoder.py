"""Whisper in vLLM's engine on a tape: decoder steps are graphs, and steps with new audio are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_child
import numpy as np
import pytest
import torch
from engines import SECONDS, Run, run_in_child, sweep_but
from kinds import save_whisper
from plants import Stale, use
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from graphpact.engines import PromptRequest
from graphpact_vllm.load.in_process import InProcessEngine

FAST, STRICT = "tape,guard,contents:1,verify:1", "tape:strict,guard,contents:1"
RATE = 16000
LENGTH = 10
"""Tokens of each answer."""
_NOISE = np.random.default_rng(0)
AUDIOS = [_NOISE.standard_normal(size).astype(np.float32) for size in (16000, 9000, 3000, 12000)]
PROMPTS = [[3, 50], [3, 51, 70], [3], [3, 52]]
"""What the decoder has from the start."""


def speak(engine: InProcessEngine) -> None:
    """Give each request its audio."""
    add = engine.engine.add_request

    def added(name: str, prompt: dict[str, Any], params: Any) -> None:
        audio = AUDIOS[int(name.rpartition("-")[2])]
        encoder = {"prompt": "", "multi_modal_data": {"audio": (audio, RATE)}}
        add(name, {"encoder_prompt": encoder, "decoder_prompt": prompt}, params)

    engine.engine.add_request = added


def run_whisper(
    model: Path, words: str, runner: int, before: Callable[[], None] | None = None, **arguments: Any
) -> Run:
    """Run `PROMPTS` with `AUDIOS`, one before every second step."""
    given = [
        PromptRequest(token_ids=prompt, max_new_tokens=LENGTH, arrives_in=at * 2)
        for at, prompt in enumerate(PROMPTS)
    ]
    size = {"max_model_len": 64}
    return run_in_child(
        words, given, speak, before=before, runner=runner, model=str(model), **size | arguments
    )


def answers_of_transformers(model: Path) -> list[list[int]]:
    """Return the greedy continuations of `PROMPTS`, each with its audio and without a cache."""
    loaded = WhisperForConditionalGeneration.from_pretrained(model)
    extract = WhisperFeatureExtractor.from_pretrained(model)
    answers = []
    for prompt, audio in zip(PROMPTS, AUDIOS, strict=True):
        features = extract(audio, sampling_rate=RATE, return_tensors="pt").input_features
        tokens = list(prompt)
        for _ in range(LENGTH):
            with torch.inference_mode():
                logits = loaded(features, decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint."""
    return save_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def right(whisper: Path) -> list[list[int]]:
    """The answers of vLLM's own eager runs, which are those of transformers."""
    expected = forked_child.in_child(answers_of_transformers, whisper, environment={}, seconds=SECONDS)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    for runner in (1, 2):
        eager = run_whisper(whisper, "tape", runner, enforce_eager=True, attention_backend="CPU_ATTN")
        assert eager.tokens == expected
        assert eager.replays() == 0
    return expected


@pytest.mark.parametrize(("words", "runner"), sweep_but({(FAST, 1), (STRICT, 2)}, [FAST, STRICT], [1, 2]))
def test_the_decoder_of_whisper_gives_the_eager_answers(
    whisper: Path, right: list[list[int]], words: str, runner: int
) -> None:
    """Steps of decodes are graphs with cross attention; a step with new audio runs eagerly."""
    run = run_whisper(whisper, words, runner)
    assert run.tokens == right
    assert run.faults == []
    assert run.replays() > 8
    assert run.verified() == (run.replays() if words == FAST else 0)
    assert sum(each["steps"] for each in run.state["steps"]["eager"]) == len(PROMPTS)


@pytest.mark.parametrize("runner", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_pages_of_an_encoder_that_are_not_refreshed_are_named(
    whisper: Path, right: list[list[int]], runner: int
) -> None:
    """A builder that keeps an old block table is named for cross attention too."""
    run = run_whisper(whisper, "tape,guard,contents:1", runner, before=use(Stale))
    named = {fault[:3] for fault in run.faults}
    assert ("GP02", "CrossAttentionBuilder", "block_table") in named
    assert run.tokens != right
