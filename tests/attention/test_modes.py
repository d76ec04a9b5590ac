"""Every backend in every mode that it declares, through captured graphs, against a float64 oracle.

A backend is one entry of `BACKENDS`; what it declares says which lanes it is held to.
"""

import pytest
import torch

from attention_plain import PlainBackend
from attention_problems import Config, configs_of
from attention_rig import hold_to_oracle
from graphpact.attention import AttentionBackend
from graphpact_fa3 import FA3Backend
from graphpact_flashinfer import FlashInferBackend
from graphpact_trtllm_mla import TRTLLMMLABackend

BACKENDS: tuple[type[AttentionBackend], ...] = (
    PlainBackend,
    FlashInferBackend,
    FA3Backend,
    TRTLLMMLABackend,
)

LANES = [
    pytest.param(backend, config, id=f"{backend.__name__}-{config}")
    for backend in BACKENDS
    for config in configs_of(backend.capabilities)
]


@pytest.mark.parametrize(("backend", "config"), LANES)
def test_a_lane_answers_what_the_oracle_says(
    backend: type[AttentionBackend], config: Config
) -> None:
    """Replayed or run eagerly, real rows are the oracle's, and memory of nobody's is untouched."""
    exact = config.dtype is not torch.bfloat16  # what it rounds away is found in the other lanes
    hold_to_oracle(backend, config, strict=exact, max_examples=3 if exact else 2)
