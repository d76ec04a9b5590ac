"""The kernel that writes keys and values to a paged KV cache."""

import torch

from graphpact_kernels._library import declare_compiled

__tracebackhide__ = True  # a driver names the line that calls a kernel

_write = declare_compiled(
    "write_kv_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor out_cache_loc) -> ()"
)


def write_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *,
    compiled: bool = False,
) -> None:
    """Write each token's key and value to its KV slot.

    Args:
        k: ``[T, num_kv_heads, head_dim]``.
        v: ``[T, num_kv_heads, v_head_dim]``.
        k_cache: ``[num_slots, num_kv_heads, head_dim]``.
        v_cache: ``[num_slots, num_kv_heads, v_head_dim]``.
        out_cache_loc: ``[T]`` int64; padding tokens share scratch slot 0, and the last write wins.
        compiled: Whether one C++ kernel writes both, which `graphpact_kernels.compiled.load` has loaded.
    """
    if compiled:
        _write(k, v, k_cache, v_cache, out_cache_loc)
        return
    k_cache.index_copy_(0, out_cache_loc, k)
    v_cache.index_copy_(0, out_cache_loc, v)
