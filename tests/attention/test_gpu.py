"""Tests on a GPU: native and portable kernels in CUDA graphs, compared with the oracle."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from graphpact import BackendContext
from graphpact.attention import AttentionBackend, ProviderName
from graphpact_conformance.draws.cases import CASES
from graphpact_conformance.draws.lanes import Config, Heads
from graphpact_cuda_graph.driver import CudaDriver
from graphpact_fa3 import FA3Backend
from graphpact_flashinfer import FlashInferBackend
from graphpact_trtllm_mla import TRTLLMMLABackend
from oracle_kit import hold_to_oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

GPU = torch.device("cuda:0")
HEADS = (
    Heads("mha", 4, 4, 64),
    Heads("gqa", 16, 2, 128),
    Heads("mla", 16, 1, 576, 512),
)


def _configs(backend: type[AttentionBackend]) -> list[Config]:
    """Return the declared configurations of a backend, with sizes that vendors' kernels support."""
    can = backend.capabilities
    found = []
    for case, page_size, heads in product(CASES, (16, 64, 256), HEADS):
        config = Config(
            case,
            page_size,
            heads,
            torch.bfloat16,
            sliding_window=can.sliding_window,
            softcap=False,
            sinks=False,
        )
        asked = {"mode": case.mode, "dtype": config.dtype, "page_size": page_size}
        if not can.missing(config.layers, device=GPU, topk=case.branches, **asked):
            found.append(config)
    return found


@pytest.mark.parametrize("provider", ["native", "portable"])
@pytest.mark.parametrize(
    ("backend", "config"),
    [
        pytest.param(backend, config, id=f"{backend.__name__}-{config}")
        for backend in (FlashInferBackend, FA3Backend, TRTLLMMLABackend)
        for config in _configs(backend)
    ],
)
def test_a_lane_answers_what_the_oracle_says(
    backend: type[AttentionBackend], config: Config, provider: ProviderName
) -> None:
    """In CUDA graphs, live rows equal the oracle's, and unowned memory is not written."""
    reason = _refusal(backend, config) if provider == "native" else None
    if reason is not None:
        pytest.skip(reason)
    hold_to_oracle(backend, config, strict=False, driver=CudaDriver, provider=provider, device=GPU)


def _refusal(backend: type[AttentionBackend], config: Config) -> str | None:
    """Return why the native kernels cannot run this configuration, or None if they can."""
    empty = torch.zeros(0, device=GPU)
    context = BackendContext(
        *(GPU, config.dtype, config.layers, config.backend_limits, empty, None),  # type: ignore[arg-type]
        mode=config.case.lane_mode,
    )
    return backend.providers[0].refusal(replace(context, provider="native"))
