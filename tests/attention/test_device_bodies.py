"""Tests on a CPU of the device code of portable kernels, which reads nothing on the host."""

import pytest
import torch

from graphpact.attention import AttentionBackend
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.draws.lanes import Config
from graphpact_fa3 import FA3Backend
from graphpact_flashinfer import FlashInferBackend
from graphpact_kernels import _library
from graphpact_trtllm_mla import TRTLLMMLABackend
from oracle_kit import hold_to_oracle

pytestmark = pytest.mark.sweep

LANES = [
    pytest.param(backend, config, id=f"{backend.__name__}-{config}")
    for backend in (FlashInferBackend, FA3Backend, TRTLLMMLABackend)
    for config in configs_of(backend.capabilities)
    if config.dtype is torch.float32 and (config.page_size, config.heads.name) in ((16, "gqa"), (64, "mla"))
]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make kernels treat their index tensors as device memory that the host cannot read."""
    monkeypatch.setattr(_library, "may_read", lambda tensor: False)


@pytest.mark.parametrize(("backend", "config"), LANES)
def test_a_lane_answers_what_the_oracle_says(backend: type[AttentionBackend], config: Config) -> None:
    """Every kernel, with work padded to its bounds, gives the oracle's rows and writes no unowned memory."""
    hold_to_oracle(backend, config, strict=False, max_examples=2)
