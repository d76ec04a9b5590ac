"""SGLang's own fault: offsets of an embedding model whose prompts are full graphs. The guard names it."""

import importlib
from array import array
from typing import Any

import pytest
import torch
from engines import ENGINE, PROMPTS, in_child, requests
from sglang.srt.layers.attention import flashattention_backend
from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams

from graphpact_kernels import define_kernel
from graphpact_sglang.load.in_process import InProcessEngine

# Then FlashAttention attends to keys that are in no cache.
NO_CACHE = {
    "attention_backend": "fa3",
    "is_embedding": True,
    "chunked_prefill_size": -1,
    "disable_radix_cache": True,
}


def _embed(backend: str) -> tuple[list[tuple[int, list[int]]], list[tuple[str, str, str]]]:
    """Embed a prompt of 20 tokens, and return what the kernel was given, and the faults.

    Returns:
        For each call of the kernel, the rows of queries and their offsets. Rule, owner and field of each
        fault.
    """
    given: list[tuple[int, list[int]]] = []

    def look(q: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
        given.append((len(q), offsets.tolist()))
        out.copy_(q)

    kernel = define_kernel("varlen(Tensor q, Tensor offsets, Tensor(a!) out) -> ()", look, namespace="tests")

    def attend(*, q: torch.Tensor, cu_seqlens_q: torch.Tensor, **others: Any) -> torch.Tensor:
        del others
        out = torch.empty_like(q)
        kernel(q, cu_seqlens_q, out)
        return out

    load_plugins()
    for module in (flashattention_backend, importlib.import_module("sgl_kernel.flash_attn")):
        module.flash_attn_varlen_func = attend
    engine = InProcessEngine(**ENGINE | NO_CACHE | {"cuda_graph_backend_prefill": backend})
    given.clear()
    _run_one(engine, requests(PROMPTS[:1])[0].token_ids)
    from graphpact_sglang.hooks import state

    faults = state()["guard"]["faults"]
    return given, [(each["rule"], each["owner"], each["field"]) for each in faults]


def _run_one(engine: InProcessEngine, token_ids: Any) -> None:
    """Run one request for an embedding."""
    passes = 0

    def receive(local_reqs: Any = ()) -> list[Any]:
        nonlocal passes
        passes += 1
        engine.scheduler.gracefully_exit = passes > 6
        if passes > 1:
            return list(local_reqs)
        params = SamplingParams(max_new_tokens=0)
        params.normalize(None)
        return [
            TokenizedEmbeddingReqInput(
                rid="0",
                input_text="",
                input_ids=array("q", token_ids),
                mm_inputs=None,
                token_type_ids=[],
                sampling_params=params,
            )
        ]

    engine.scheduler.request_receiver.recv_requests = receive
    engine.scheduler.gracefully_exit = False
    engine.scheduler.run_event_loop()


@pytest.mark.parametrize(
    ("backend", "rows", "faults"),
    [
        ("breakable", 20, []),
        ("full", 32, [("GP05", "FlashAttentionBackend", "fa_skip_cu_seqlens_q")]),
    ],
)
def test_offsets_of_a_full_graph_leave_padding_without_an_owner(
    backend: str, rows: int, faults: list[tuple[str, str, str]]
) -> None:
    """A breakable graph gives the kernel live tokens; a full graph gives it padding that no request owns.

    SGLang's own comment says that such offsets corrupt the last token. Its extra request for the padding is
    made when attention runs in Python, and a replay of a full graph runs none.
    """
    given, found = in_child(_embed, backend, words="tape,guard,contents:1")
    assert set(map(str, given)) == {str((rows, [0, 20]))}
    assert found == faults
