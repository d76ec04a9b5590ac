"""Compiled kernels for a CPU: C++ with the schemas, arguments and checks of the portable kernels.

    attend.h          attention over the pages of requests: tiles, blocks of keys, vectors, threads
    attention.cpp     its index tensors: FlashInfer's, and FlashAttention's page table; their checks
    indices.cpp       index tensors of a step
    paged_cache.cpp   writes to a paged KV cache
    build             builds the library once, with torch's extension builder, and loads it

The functions of `graphpact_kernels` call them with ``compiled=True``. `CompiledProvider` makes them a
provider of a backend.

Does not: run on a GPU; there, the vendors' kernels are the compiled ones.
"""

import torch

from graphpact import BackendContext
from graphpact.attention import KernelProvider
from graphpact_kernels.compiled.build import cache_folder, load, missing

__all__ = ["CompiledProvider", "cache_folder", "load", "missing"]


class CompiledProvider(KernelProvider):
    """Base class of the providers ``compiled``: they run on a CPU, where a C++ compiler is.

    The kernels are built when a model is first served; later, and in other processes, they are loaded.
    """

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why the kernels cannot run on ``device``: no CPU, or nothing to build them with; or None."""
        if device.type != "cpu":
            return f"they are compiled for a CPU, not for {device.type}"
        return missing()

    @classmethod
    def refusal(cls, context: BackendContext) -> str | None:
        """Return why the kernels cannot serve ``context``, or None; builds and loads them."""
        return super().refusal(context) or load()
