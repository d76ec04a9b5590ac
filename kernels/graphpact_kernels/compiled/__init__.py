"""Compiled kernels for a CPU: C++ with the schemas, arguments and checks of the portable kernels.

    attend.h          attention over the pages of requests: tiles, blocks of keys, vectors, threads
    index.h           shared by the kernels that read index tensors and those that fill them
    sums.h            the sums of the numbers of vectors
    text.h            the text of an error, made without streams
    kernels.h         declarations of the kernels
    library.cpp       registers the kernels as operators
    attention.cpp     attention over FlashInfer's index tensors and over a page table, with their checks
    indices.cpp       index tensors of a step
    linear.cpp        the product of rows with a weight
    paged_cache.cpp   writes to a paged KV cache
    build             builds the library once, and loads it
    cache             compiled libraries on disk, of these kernels and of compiled graphs
    ownership         folders and files that other users cannot have changed
    waiting           the message while something is compiled

The functions of `graphpact_kernels` call them with ``compiled=True``; the portable form of `linear` is
torch's own. `CompiledProvider` makes them a provider of a backend.

Does not: run on a GPU; there, the vendors' kernels are the compiled ones.
"""

import sys
from typing import ClassVar

import torch

from graphpact import BackendContext
from graphpact.attention import KernelName, KernelProvider
from graphpact_kernels._library import declare_compiled, define_query
from graphpact_kernels.compiled.build import load, missing, multiplies_pairs
from graphpact_kernels.compiled.cache import LibraryCache, cache_folder
from graphpact_kernels.compiled.ownership import own_folder
from graphpact_kernels.compiled.waiting import announced

__all__ = [
    "CompiledProvider",
    "LibraryCache",
    "announced",
    "cache_folder",
    "linear",
    "load",
    "missing",
    "most_rows",
    "own_folder",
]

linear = declare_compiled("linear(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()")
"""``(x, weight, bias, out)``: write ``x @ weight.T + bias`` to ``out``, an operator.

``x`` is ``[rows, in_features]``, ``weight`` is ``[out_features, in_features]`` as in checkpoints, ``bias`` is
``[out_features]`` or None, ``out`` is ``[rows, out_features]``. All are float32, or all bfloat16 with sums in
float32. ``weight`` and ``out`` must be dense. Call `load` first."""


def most_rows(dtype: torch.dtype) -> int:
    """Return for how many rows `linear` was measured to be faster than torch's product; 0 for none.

    Torch multiplies with MKL or oneDNN. Few rows take as long as reading the weight, which both read slower;
    many rows are multiplied faster with AVX-512, and those of bfloat16 with AVX512_BF16.
    """
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if dtype is torch.float32:
        return sys.maxsize if is_wide else 64
    if dtype is torch.bfloat16:
        return sys.maxsize if multiplies_pairs() else 4
    return 0


define_query("most_rows(ScalarType dtype) -> int", most_rows)  # an engine asks it without this package


class CompiledProvider(KernelProvider):
    """Base class of the providers ``compiled``: kernels in C++, for a CPU and a machine with a compiler.

    The kernels are built when a model is first served; later, and in other processes, they are loaded. A
    subclass inherits from it first, then from the portable provider.
    """

    name: ClassVar[KernelName] = "compiled"
    compiled: ClassVar[bool] = True
    """Whether the provider's kernels are the C++ ones; False for the other providers of a backend."""

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why the kernels cannot run on ``device`` (no CPU, or they cannot be built), or None."""
        if device.type != "cpu":
            return f"they are compiled for a CPU, not for {device.type}"
        return missing()

    @classmethod
    def refusal(cls, context: BackendContext) -> str | None:
        """Build and load the kernels; return why they cannot serve ``context``, or None."""
        return super().refusal(context) or load()
