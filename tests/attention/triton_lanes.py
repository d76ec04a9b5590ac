"""Lanes whose index tensors Triton's interpreter fills; run in a process by ``test_triton_lanes.py``."""

import os
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from graphpact.attention import AttentionBackend
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.draws.lanes import Config
from graphpact_fa3 import FA3Backend
from graphpact_flashinfer import FlashInferBackend
from graphpact_kernels import _triton_indices, define_kernel, indices
from graphpact_trtllm_mla import TRTLLMMLABackend
from oracle_kit import hold_to_oracle

# For each kernel, its names in `indices` (the portable form first) and its schema.
KERNELS = {
    "fill_paged_indices": ("_fill_indices", indices._FILL_INDICES),
    "fill_page_table": ("_fill_table", indices._FILL_TABLE),
    "schedule_attention": ("_schedule", indices._SCHEDULE),
}
LANES = [
    pytest.param(backend, config, kernels, id=f"{backend.__name__}-{config}")
    for backend, kernels in (
        (FlashInferBackend, {"fill_paged_indices"}),
        (FA3Backend, {"fill_page_table", "schedule_attention"}),
        (TRTLLMMLABackend, {"fill_page_table"}),
    )
    for config in configs_of(backend.capabilities)
    if config.dtype is torch.float32 and (config.page_size, config.heads.name) in ((16, "gqa"), (64, "mla"))
]

calls: list[str] = []


def _interpreted(name: str, schema: str) -> Any:
    """Return an operator with this schema that runs the Triton kernel on a CPU."""

    def fill(*args: Any) -> None:
        calls.append(name)
        getattr(_triton_indices, name)(*args)

    return define_kernel(schema, fill, namespace="interpreted")


OPERATORS = {name: _interpreted(name, schema) for name, (_, schema) in KERNELS.items()}


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the Triton kernels fill the index tensors, as on a GPU."""
    for name, (attribute, _) in KERNELS.items():
        _, compiled = getattr(indices, attribute)
        monkeypatch.setattr(indices, attribute, (OPERATORS[name], compiled))
    calls.clear()


@pytest.mark.parametrize(("backend", "config", "kernels"), LANES)
def test_a_lane_answers_what_the_oracle_says(
    backend: type[AttentionBackend], config: Config, kernels: set[str]
) -> None:
    """Eagerly, replayed and on a strict tape, rows equal the oracle's, and unowned memory is not written."""
    hold_to_oracle(backend, config, provider="portable", max_examples=1)
    assert set(calls) == kernels
