"""my_attention: an attention backend for graphpact, written outside of it.

Does not: import a kernel library; PyTorch's own attention is the kernel.
"""

from my_attention.backend import MyAttentionBackend, MyAttentionMetadata

__all__ = ["MyAttentionBackend", "MyAttentionMetadata"]
