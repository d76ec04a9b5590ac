"""my_attention: an attention backend and a runner for graphpact, as a third party writes them.

Does not: import a kernel library; its kernel is PyTorch's attention.
"""

from my_attention.backend import MyAttentionBackend, MyAttentionMetadata
from my_attention.prefill import BucketPrefillRunner

__all__ = ["BucketPrefillRunner", "MyAttentionBackend", "MyAttentionMetadata"]
