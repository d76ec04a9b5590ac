"""The adapter ``vllm``: builders like vLLM's `AttentionMetadataBuilder`, as its model runner V2 calls them.

    common        what builders get for each step
    plain_values  what builders are constructed with
    runner        the model runner's persistent buffers: padding, dummies
    readers       what kernels read from vLLM's metadata
    backend       the calls of a capture, a replay and an eager step
    adapter       `Builders`: a factory, and the lanes in which it is checked

Does not: import vLLM.
"""

from graphpact_adapters.kernel_reads import PagedReads, Part, Reader
from graphpact_adapters.recurrent import RecurrentReads
from graphpact_adapters.tasks import KernelTask, Tasks, UpdatableGraph
from graphpact_adapters.vllm.adapter import Builders
from graphpact_adapters.vllm.common import CommonAttentionMetadata

__all__ = [
    "Builders",
    "CommonAttentionMetadata",
    "KernelTask",
    "PagedReads",
    "Part",
    "Reader",
    "RecurrentReads",
    "Tasks",
    "UpdatableGraph",
]
