"""my_attention: an attention backend and a runner for graphpact, written outside of it.

Does not: import a kernel library; PyTorch's own attention is the kernel.
"""

from my_attention.backend import MyAttentionBackend, MyAttentionMetadata
from my_attention.prefill import BucketPrefillRunner

__all__ = ["BucketPrefillRunner", "MyAttentionBackend", "MyAttentionMetadata"]
