"""FlashAttention-3 on a CPU: a model of its kernel, so that SGLang's own backend ``fa3`` runs on the tape.

Metadata is made by SGLang's `FlashAttentionBackend`, unedited. The model is our portable kernel. It reads the
page table, the lengths, the offsets and the schedule that FlashAttention's kernel reads, and refuses what
contradicts them. A schedule is acted on: keys in blocks that it does not count are not attended, so a
schedule that was not renewed gives a wrong answer, as on a GPU.

Does not: run features that the portable kernel lacks (appended keys, descaling, rotary); it names them.
"""

from typing import Any

import torch

from graphpact.errors import ConfigError
from graphpact_kernels import (
    PageTableCall,
    PageTableRows,
    ScoreOptions,
    merge_states,
    page_table_attention,
    schedule_attention,
    schedule_size,
)

KERNEL = "sglang.kernels.ops.attention.flash_attention.flash_attn_with_kvcache"
"""The function through which SGLang calls FlashAttention."""
_UNREAD = {"num_splits", "pack_gqa", "sm_margin", "ver", "cu_seqlens_k_new", "max_seqlen_k"}
"""Arguments that change how FlashAttention computes, not what."""


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scheduler_metadata: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    **others: Any,
) -> Any:
    """Attend as FlashAttention-3 does.

    Args:
        q: ``[T, num_q_heads, head_dim]``.
        k_cache: ``[pages, page_size, num_kv_heads, head_dim]``.
        v_cache: ``[pages, page_size, num_kv_heads, v_head_dim]``.
        page_table: ``[bs, pages]`` int32.
        cache_seqlens: ``[bs]`` int32: keys of each request.
        cu_seqlens_q: ``[bs + 1]`` int32: where the queries of each request begin.
        max_seqlen_q: The most queries of a request.
        softmax_scale: Factor on the scores.
        causal: Whether the last query is at the position of the last key.
        window_size: Keys before and after a query that it sees; -1 for all.
        softcap: See `ScoreOptions`.
        scheduler_metadata: ``[>= schedule_size(bs)]`` int32: the schedule, or None.
        sinks: ``[num_q_heads]``, or None.
        return_softmax_lse: Whether to return the log-sum-exp too.
        out: ``[T, num_q_heads, v_head_dim]``, written; None for new memory.
        others: Other arguments of FlashAttention's, at their defaults.

    Returns:
        ``[T, num_q_heads, v_head_dim]``; with ``return_softmax_lse`` a tuple whose second part is
        ``[num_q_heads, T]`` float32.

    Raises:
        ConfigError: An argument asks for what the model lacks.
    """
    asked = [name for name, value in others.items() if name not in _UNREAD and value not in (None, 0, False)]
    if asked:
        raise ConfigError(
            f"the model of FlashAttention-3 has no {', '.join(asked)}",
            hint="choose another model or attention backend for the tape; on a GPU the real kernel runs",
        )
    before, after = window_size
    if after > 0:
        raise ConfigError(f"the model of FlashAttention-3 has no window of {after} keys after a query")
    call = PageTableCall(
        q,
        k_cache.flatten(0, 1),
        v_cache.flatten(0, 1),
        PageTableRows(
            cu_seqlens_q=cu_seqlens_q,
            cache_seqlens=cache_seqlens,
            page_table=page_table,
            page_size=k_cache.shape[1],
            max_seqlen_q=max_seqlen_q,
        ),
        ScoreOptions(softmax_scale, before + 1 if before >= 0 else 0, softcap, sinks, causal or after == 0),
        scheduler_metadata,
        return_softmax_lse,
    )
    result, lse = page_table_attention(call, out=out)
    return (result, lse.T) if lse is not None else result


def get_scheduler_metadata(
    *, batch_size: int, cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Return the schedule of a decode step.

    Args:
        batch_size: Requests.
        cache_seqlens: ``[bs]`` int32: keys of each request.
        cu_seqlens_q: ``[bs + 1]`` int32: where the queries of each request begin.
        options: What else FlashAttention's schedule depends on.
    """
    del options
    schedule = cache_seqlens.new_empty(schedule_size(batch_size))
    schedule_attention(cu_seqlens_q, cache_seqlens, out=schedule)
    return schedule


def merge_state_v2(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention over two sets of keys, and its log-sum-exp; see `merge_states`."""
    return merge_states(out, lse, other, other_lse), torch.logaddexp(lse, other_lse)


def make_backend(runner: Any) -> Any:
    """Return SGLang's backend, whose kernels are the models.

    Raises:
        ConfigError: A real ``sgl_kernel`` is installed, in which no model may be put.
    """
    import sgl_kernel  # noqa: PLC0415  a stand-in
    import sgl_kernel.flash_attn as kernels  # noqa: PLC0415

    from graphpact_sglang.stand_ins import is_stand_in  # noqa: PLC0415

    if not is_stand_in(sgl_kernel):
        raise ConfigError(
            "the attention backend fa3 runs on a CPU only where sgl_kernel is a stand-in",
            hint="uninstall sgl_kernel in this environment, or choose --attention-backend graphpact",
        )
    kernels.flash_attn_with_kvcache = flash_attn_with_kvcache
    kernels.get_scheduler_metadata = get_scheduler_metadata
    from sglang.srt.layers.attention import flashattention_backend  # noqa: PLC0415  it imports sgl_kernel

    flashattention_backend.merge_state_v2 = merge_state_v2  # another backend may have imported it before
    return flashattention_backend.FlashAttentionBackend(runner)
