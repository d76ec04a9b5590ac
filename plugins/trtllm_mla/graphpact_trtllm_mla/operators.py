"""The operators of attention over latents, portable and compiled, with the checks of TensorRT-LLM's kernels.

Each is one torch operator, so that a graph records it as one node, like the launch of a kernel.

Arguments are plain tensors and numbers, as torch requires.
"""

import functools

import torch

from graphpact.errors import KernelRefusal
from graphpact_kernels import (
    PageTableCall,
    PageTableRows,
    ScoreOptions,
    define_kernel,
    may_read,
    page_table_attention,
)

__tracebackhide__ = True  # a driver names the line that calls a kernel

BLOCK_KEYS = 128
"""TRT-LLM's block constraint: the keys that a row of the block table can hold are a multiple of this."""

_define = functools.partial(define_kernel, namespace="graphpact_trtllm_mla")


def _check(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cum_seq_lens_q: torch.Tensor,
    max_q_len: int,
    is_uniform: bool,  # noqa: FBT001  operators are called by position
) -> None:
    """Make the checks of TRT-LLM's kernels; contents of tensors are checked on a CPU only."""
    (bs, blocks), page_size = block_tables.shape, kv_cache.shape[1]
    if blocks * page_size % BLOCK_KEYS:
        raise KernelRefusal(
            f"block_tables has {blocks} blocks of {page_size} keys; blocks % ({BLOCK_KEYS} / {page_size})"
            " must be 0",
            rule="GP07",
        )
    for name, tensor in (
        ("block_tables", block_tables),
        ("seq_lens", seq_lens),
        ("cum_seq_lens_q", cum_seq_lens_q),
    ):
        if tensor.dtype is not torch.int32:
            raise KernelRefusal(
                f"{name} is {tensor.dtype}; TRT-LLM reads int32",
                rule="GP07",
            )
    if not is_uniform:
        return
    if q.shape[0] != bs * max_q_len:
        raise KernelRefusal(
            f"q has {q.shape[0]} rows for {bs} requests of {max_q_len} queries: the decode kernel takes"
            f" {max_q_len} queries of each",
            rule="GP05",
        )
    if may_read(q):
        offsets = cum_seq_lens_q.tolist()
        if offsets != [i * max_q_len for i in range(bs + 1)]:
            raise KernelRefusal(
                f"cum_seq_lens_q is {offsets}; the decode kernel takes {max_q_len} queries of each request",
                rule="GP07",
            )


def _attend_latents(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cum_seq_lens_q: torch.Tensor,
    max_q_len: int,
    max_seq_len: int,
    bmm1_scale: float,
    is_uniform: bool,  # noqa: FBT001  operators are called by position
    out: torch.Tensor,
    *,
    compiled: bool = False,
) -> None:
    _check(q, kv_cache, block_tables, seq_lens, cum_seq_lens_q, max_q_len, is_uniform)
    page_size = kv_cache.shape[1]
    latents = kv_cache.view(-1, 1, kv_cache.shape[2])
    rows = PageTableRows(
        cu_seqlens_q=cum_seq_lens_q,
        cache_seqlens=seq_lens,
        page_table=block_tables[:, : -(-max_seq_len // page_size)],
        page_size=page_size,
        max_seqlen_q=max_q_len,
    )
    call = PageTableCall(q, latents, latents[..., : out.shape[2]], rows, ScoreOptions(bmm1_scale))
    page_table_attention(call, out=out, compiled=compiled)


_ARGUMENTS = (
    "(Tensor q, Tensor kv_cache, Tensor block_tables, Tensor seq_lens, Tensor cum_seq_lens_q, int max_q_len,"
    " int max_seq_len, float bmm1_scale, bool is_uniform, Tensor(a!) out) -> ()"
)
attend_latents = _define("attend_latents" + _ARGUMENTS, _attend_latents)
"""``(q, kv_cache, block_tables, seq_lens, cum_seq_lens_q, max_q_len, max_seq_len, bmm1_scale, is_uniform,
out)``: FlashInfer's ``trtllm_batch_decode_with_kv_cache_mla`` with compact queries, causal, and its checks.
``is_uniform``: every request has ``max_q_len`` queries, as the decode kernel requires."""

attend_latents_compiled = _define(
    "attend_latents_compiled" + _ARGUMENTS, functools.partial(_attend_latents, compiled=True)
)
"""`attend_latents` with the C++ kernel, which `graphpact_kernels.compiled.load` has loaded."""
