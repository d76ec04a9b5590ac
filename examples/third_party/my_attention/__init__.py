"""my_attention: an attention backend and a runner for graphpact, as a third party would write them.

The kernel is PyTorch's attention, so no kernel library is needed.
"""

from my_attention.backend import MyAttentionBackend, MyAttentionMetadata
from my_attention.prefill import BucketPrefillRunner

__all__ = ["BucketPrefillRunner", "MyAttentionBackend", "MyAttentionMetadata"]
