"""LoRA adapters in vLLM's engine on a tape: the answers are those of merged weights."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MODEL, Run, run_in_child, sweep_but
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest
from vllm.platforms.cpu import CpuPlatform

from graphpact_vllm.load.in_process import InProcessEngine
from graphpact_vllm.tape.platform import TapePlatform

FAST, STRICT = "tape,guard,contents:1,verify:1", "tape:strict,guard,contents:1"
RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
EAGER = {"enforce_eager": True, "attention_backend": "CPU_ATTN"}


@dataclass(frozen=True)
class Adapted:
    """An adapter of tiny-llama, and eager answers.

    Args:
        adapter: The adapter, in the format of PEFT.
        base: The answers of tiny-llama.
        merged: Those of tiny-llama with the adapter merged into its weights.
    """

    adapter: Path
    base: list[list[int]]
    merged: list[list[int]]

    @property
    def mixed(self) -> list[list[int]]:
        """The answers if every second request names the adapter."""
        pairs = zip(self.base, self.merged, strict=True)
        return [merged if at % 2 else base for at, (base, merged) in enumerate(pairs)]

    def name_it(self, engine: InProcessEngine) -> None:
        """Let every second request name the adapter."""
        lora = LoRARequest("adapter", 1, str(self.adapter))
        add: Callable[..., None] = engine.engine.add_request

        def add_request(name: str, *args: Any) -> None:
            is_second = int(name.rpartition("-")[2]) % 2
            add(name, *args, lora_request=lora if is_second else None)

        engine.engine.add_request = add_request


def save_adapter(adapter: Path, merged: Path) -> None:
    """Write a random adapter, and tiny-llama with the adapter in its weights."""
    torch.manual_seed(0)
    parts, weights = {}, {}
    for name, weight in load_file(MODEL / "model.safetensors").items():
        weights[name] = weight.float()
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            down = torch.randn(RANK, weight.shape[1]) * 0.1
            up = torch.randn(weight.shape[0], RANK) * 0.1
            parts[f"base_model.model.{module}.lora_A.weight"] = down
            parts[f"base_model.model.{module}.lora_B.weight"] = up
            weights[name] += up @ down * (ALPHA / RANK)
    save_file(parts, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    shutil.copytree(MODEL, merged)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """An adapter and eager answers."""
    adapter = tmp_path_factory.mktemp("adapter")
    merged = adapter / "merged"
    save_adapter(adapter, merged)
    answers = [run_in_child("tape", runner=1, model=str(model), **EAGER).tokens for model in (MODEL, merged)]
    return Adapted(adapter, *answers)


def run_mixed(
    adapted: Adapted,
    words: str,
    runner: int,
    before: Callable[[], None] | None = None,
    max_loras: int = 1,
    **arguments: Any,
) -> Run:
    """Run requests of which every second names the adapter."""
    return run_in_child(
        words,
        plant=adapted.name_it,
        before=before,
        runner=runner,
        enable_lora=True,
        max_loras=max_loras,
        max_lora_rank=8,
        **arguments,
    )


@pytest.mark.parametrize(("words", "runner"), sweep_but({(FAST, 1), (STRICT, 2)}, [FAST, STRICT], [1, 2]))
def test_requests_with_and_without_an_adapter_replay_one_graph(
    adapted: Adapted, words: str, runner: int
) -> None:
    """Requests with an adapter get the answers of merged weights, others in the batch those of the base."""
    assert all(one != other for one, other in zip(adapted.base, adapted.merged, strict=True))
    run = run_mixed(adapted, words, runner)
    assert run.tokens == adapted.mixed
    assert run.faults == []
    graphs = run.state["steps"]["graphs"].items()
    assert sum(counts["replays"] for name, counts in graphs if "LoRAs" in name) > 8
    assert "strict" in words or run.verified() == run.replays()


def use_own_operations() -> None:
    """Let the tape's platform use vLLM's operations with adapters."""
    TapePlatform.get_punica_wrapper = CpuPlatform.get_punica_wrapper  # type: ignore[method-assign]


@pytest.mark.parametrize("max_loras", [1, 2])
def test_operations_of_vllm_need_a_place_without_an_adapter(adapted: Adapted, max_loras: int) -> None:
    """In vLLM's own eager run a request without an adapter gets the only one, unless a place is free."""
    run = run_mixed(adapted, "tape", 1, use_own_operations, max_loras, **EAGER)
    assert run.tokens[1::2] == adapted.mixed[1::2]
    assert (run.tokens[::2] == adapted.mixed[::2]) == (max_loras == 2)
