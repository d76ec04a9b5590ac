"""The adapter ``sglang``: backends like SGLang's `AttentionBackend`, as its graph runners call them.

    plain_values  what backends are constructed with
    batch         what backends get for each step: modes, inputs of speculation, in our types or the engine's
    runner        the runner's persistent buffers: padding, batches
    readers       what kernels read from SGLang's metadata
    backend       the calls of a capture, a replay and an eager step
    adapter       `Backends`: a factory, and the lanes in which it is checked

Does not: import SGLang.
"""

from graphpact_adapters.kernel_reads import IndexedReads, PagedReads, Part
from graphpact_adapters.sglang.adapter import Backends
from graphpact_adapters.sglang.backend import SglangReader
from graphpact_adapters.sglang.batch import SglangForwardMode
from graphpact_adapters.tasks import KernelTask, Tasks, UpdatableGraph

__all__ = [
    "Backends",
    "IndexedReads",
    "KernelTask",
    "PagedReads",
    "Part",
    "SglangForwardMode",
    "SglangReader",
    "Tasks",
    "UpdatableGraph",
]
