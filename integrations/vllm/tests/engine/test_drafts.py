"""Drafts of a model in vLLM's engine on a tape: the answers are those of eager runs without drafts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MODEL, Run, requests, run_in_child, sweep_but
from plants import move_slots
from safetensors.torch import load_file, save_file

from graphpact_vllm.load.in_process import InProcessEngine

FULL = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 8, 16, 32]}
FAST, STRICT = "tape,guard,contents:1,verify:1", "tape:strict,guard,contents:1"
LAST = "model.layers.4."
"""The last layer of tiny-llama."""


@pytest.fixture(scope="module")
def eager() -> Run:
    """The run of vLLM's own eager engine."""
    return run_in_child("tape", requests(), runner=1, enforce_eager=True, attention_backend="CPU_ATTN")


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of EAGLE: the last layer of tiny-llama, behind a projection to the target's hidden states."""
    path = tmp_path_factory.mktemp("eagle")
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    width = config["hidden_size"]
    weights = {
        name.replace(LAST, "layers.0."): weight.float()
        for name, weight in load_file(MODEL / "model.safetensors").items()
        if name.startswith(LAST) and "input_layernorm" not in name
    }
    weights["fc.weight"] = torch.cat([torch.zeros(width, width), torch.eye(width)], dim=1)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def run_drafts(
    words: str, runner: int, plant: Callable[[InProcessEngine], None] | None = None, **drafts: Any
) -> Run:
    """Run requests, each with three drafts."""
    return run_in_child(
        words,
        requests(),
        plant,
        runner=runner,
        speculative_config={"num_speculative_tokens": 3, **drafts},
        compilation_config=FULL,
    )


def drafted(run: Run) -> int:
    """Return the replays of graphs of several tokens for each request."""
    graphs = run.state["steps"]["graphs"].items()
    return sum(counts["replays"] for name, counts in graphs if "tokens" in name)


@pytest.mark.parametrize(
    ("method", "words", "runner"),
    sweep_but(
        {("draft_model", FAST, 1), ("draft_model", STRICT, 2), ("eagle", STRICT, 1), ("eagle", FAST, 2)},
        ["draft_model", "eagle"],
        [FAST, STRICT],
        [1, 2],
    ),
)
def test_drafts_of_a_model_give_the_eager_answers(
    eager: Run, eagle: Path, method: str, words: str, runner: int
) -> None:
    """Drafts of tiny-llama itself and of an EAGLE drafter are verified in graphs of four tokens a request.

    Model runner V2 has graphs of EAGLE's own steps too.
    """
    run = run_drafts(words, runner, method=method, model=str(eagle if method == "eagle" else MODEL))
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert drafted(run) > 4
    assert (run.replays("SpeculatorCudaGraphManager") > 4) == (method == "eagle" and runner == 2)


@pytest.mark.parametrize("runner", [1, 2])
def test_slots_of_the_target_in_other_memory_are_named_beside_a_drafter(
    eager: Run, eagle: Path, runner: int
) -> None:
    """A drafter has slots of its own, and those of the target are still held to its capture."""
    run = run_drafts("tape,guard", runner, move_slots, method="eagle", model=str(eagle))
    *named, graph = run.faults[0]
    assert named == ["GP01", "slot mapping", "slot mapping['PagedMetadataBuilder[0]']"]
    assert graph.startswith("CUDAGraphWrapper" if runner == 1 else "ModelCudaGraphManager")
    assert run.tokens != eager.tokens
