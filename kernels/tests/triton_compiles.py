"""Compile the Triton kernels for GPUs, which needs no GPU; ``test_triton.py`` runs this file.

Does not: run the kernels; see ``triton_properties.py``.
"""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from graphpact_kernels import _triton_indices, schedule_size

TYPES = dict.fromkeys(("req_pool_indices", "kv_lens", "num_q", "seq_lens"), "*i64") | dict.fromkeys(
    (
        *("req_to_token", "kv_indptr", "kv_indices", "kv_last_page_len", "cache_seqlens", "cu_seqlens_k"),
        *("page_table", "cu_seqlens_q", "out"),
    ),
    "*i32",
)
OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "_write_paged_indices": (("num_q", "window"), "page_size"),
    "_write_page_table": (("cu_seqlens_k",), "page_size"),
    "_write_schedule": ((), "block_size"),
}
"""For each kernel, the arguments that may be None, and the size that is compiled in."""


@pytest.mark.parametrize("capability", [75, 80, 90, 100])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_kernel_compiles(name: str, capability: int) -> None:
    """Triton compiles every form of a kernel, with and without its optional arguments."""
    optional, size = OPTIONS[name]
    options = _triton_indices._OPTIONS
    kernel = getattr(_triton_indices, name)
    for given in itertools.product((False, True), repeat=len(optional)):
        fixed: dict[str, Any] = {size: 16}
        fixed |= {arg: None for arg, there in zip(optional, given, strict=True) if not there}
        signature = {a: "constexpr" if a in fixed else TYPES.get(a, "i32") for a in kernel.arg_names}
        source = ASTSource(kernel, signature, constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert len(made.asm["cubin"]) > 1000


class Driver:
    """A stand-in for Triton's GPU driver: it compiles for a GPU, and counts launches."""

    def __init__(self) -> None:
        self.launches = 0
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (object(), 1, 32, 0, 1024),  # module, function, registers, spills, threads
            get_device_properties=lambda _: {"max_shared_mem": 2**20},
        )

    def launcher_cls(self, *_: Any) -> Callable[..., None]:
        """Return the launcher of a binary."""

        def launch(*_: Any) -> None:
            self.launches += 1

        return launch

    def get_current_device(self) -> int:
        """Return the number of the GPU."""
        return 0

    def get_current_stream(self, _: int) -> int:
        """Return the handle of the stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return what to compile for."""
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def gpu() -> Driver:
    """Give Triton a stand-in for a GPU, until the end of the process."""
    made = Driver()
    driver.set_active(made)
    return made


def test_every_call_is_one_launch_and_batches_of_all_sizes_run_the_same_binary(gpu: Driver) -> None:
    """Only the presence of a window, query counts or key offsets needs another binary; sizes do not."""

    def new(*shape: int) -> torch.Tensor:  # not aligned
        return torch.ones(math.prod(shape) + 1, dtype=torch.int32)[1:].view(shape)

    for bs in (1, 3, 16, 17, 64):
        table, rows, lens = new(bs, 64), torch.arange(bs), torch.ones(bs, dtype=torch.int64)
        for window, num_q in itertools.product((0, 9), (None, lens)):
            outputs = new(bs + 1), new(64 * bs), new(bs)
            _triton_indices.fill_paged_indices(table, rows, lens, num_q, 1, window, 16, *outputs)
        for offsets in (None, new(bs + 1)):
            _triton_indices.fill_page_table(table, rows, lens, bs, 16, new(bs), offsets, new(bs, 5))
        _triton_indices.schedule_attention(new(bs + 1), new(bs), new(schedule_size(bs)))
    assert gpu.launches == 5 * (4 + 2 + 1)
    binaries = {name: len(getattr(_triton_indices, name).device_caches[0][0]) for name in OPTIONS}
    assert binaries == {"_write_paged_indices": 4, "_write_page_table": 2, "_write_schedule": 1}
