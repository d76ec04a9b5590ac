"""Models of many kinds in vLLM's engine on a tape: their answers are those of its eager runs."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_child
import pytest
import torch
from engines import ROOT, SECONDS, Run, run_in_child, sweep_but
from kinds import KINDS, save_kind
from transformers import AutoModelForCausalLM

from graphpact.engines import PromptRequest

FAST, STRICT = "tape,guard,contents:1,verify:1", "tape:strict,guard,contents:1"
RECURRENT = ("mamba2", "gdn", "convolutions")
"""Kinds with a recurrent state, which a second run of a step would change: the guard does not verify them."""
DTYPES = {"gdn": "bfloat16"}
"""vLLM's kernels of GDN for a CPU take no other dtype."""
_CHOICE = random.Random(0)
PROMPTS = [[_CHOICE.randrange(3, 199) for _ in range(length)] for length in (5, 24, 2, 40)]
LENGTH = 10
"""Tokens of each answer."""


@dataclass(frozen=True)
class Case:
    """A checkpoint, and the runs of vLLM's own eager engine.

    Args:
        kind: One of `KINDS`.
        model: The checkpoint.
        dtype: The dtype that it runs in.
        eager: The run of each model runner. They batch alike, but order the requests of a batch differently.
    """

    kind: str
    model: Path
    dtype: str
    eager: dict[int, Run]


def run_model(model: Path, words: str, runner: int, **arguments: Any) -> Run:
    """Run `PROMPTS`, one before every second step."""
    given = [
        PromptRequest(token_ids=prompt, max_new_tokens=LENGTH, arrives_in=at * 2)
        for at, prompt in enumerate(PROMPTS)
    ]
    length = {"skip_tokenizer_init": True, "max_model_len": 128}
    return run_in_child(words, given, runner=runner, model=str(model), **length | arguments)


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A case of each kind."""
    kind = request.param
    model = save_kind(kind, tmp_path_factory.mktemp("kind"))
    backend, dtype = "CPU_MLA" if kind == "mla" else "CPU_ATTN", DTYPES.get(kind, "float32")
    eager = {
        runner: run_model(model, "tape", runner, dtype=dtype, enforce_eager=True, attention_backend=backend)
        for runner in (1, 2)
    }
    return Case(kind, model, dtype, eager)


def answers_of_transformers(model: Path) -> list[list[int]]:
    """Return the greedy continuations of `PROMPTS`, each alone and without a cache."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(LENGTH):
            with torch.inference_mode():
                logits = loaded(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def test_the_eager_answers_are_right(case: Case) -> None:
    """The eager answers of vLLM, in batches, are those of transformers for each prompt alone."""
    if case.dtype != "float32":
        pytest.skip("rounding in bfloat16 depends on the batch")
    right = forked_child.in_child(answers_of_transformers, case.model, environment={}, seconds=SECONDS)
    assert [case.eager[runner].tokens for runner in (1, 2)] == [right, right]


@pytest.mark.parametrize(("words", "runner"), sweep_but({(FAST, 1), (STRICT, 2)}, [FAST, STRICT], [1, 2]))
def test_a_model_of_each_kind_gives_the_eager_answers(case: Case, words: str, runner: int) -> None:
    """Random weights of a kind give the tokens of vLLM's own eager run, other ones for each prompt."""
    run, eager = run_model(case.model, words, runner, dtype=case.dtype), case.eager[runner]
    assert len({*map(tuple, eager.tokens)}) == len(PROMPTS)
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert eager.replays() == 0
    assert run.replays() > 8
    assert run.verified() == (run.replays() if words == FAST and case.kind not in RECURRENT else 0)


def test_latents_of_any_width_are_served() -> None:
    """The latents of tiny-deepseek, too narrow for vLLM's own kernel for a CPU, give the same on the tape."""
    model = ROOT / "examples/models/tiny-deepseek"
    experts = {"hf_overrides": {"topk_method": "noaux_tc"}}  # vLLM needs it to load their biases
    eager = run_model(model, "tape", 1, enforce_eager=True, **experts)
    run = run_model(model, FAST, 1, **experts)
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert run.verified() == run.replays() > 8
