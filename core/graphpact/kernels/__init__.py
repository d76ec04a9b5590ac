"""Portable kernels: torch only, one operator each, so that a graph holds each as one node.

Does not: know any backend's metadata object; arguments are plain tensors and numbers.
"""

from graphpact.kernels.paged_attention import paged_attention
from graphpact.kernels.paged_cache import pack_kv_indices, write_kv_cache

__all__ = ["pack_kv_indices", "paged_attention", "write_kv_cache"]
