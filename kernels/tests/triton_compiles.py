"""The Triton kernels go through Triton's compiler for GPUs, which needs none; ``test_triton.py`` runs this.

Does not: run them.
"""

import itertools
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphpact_kernels import triton_indices

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
"""By kernel: the arguments that may be None, and the size that is compiled in."""


@pytest.mark.parametrize("capability", [75, 80, 90, 100])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_kernel_compiles(name: str, capability: int) -> None:
    """Triton makes a binary of every form of a kernel, with and without its optional arguments."""
    optional, size = OPTIONS[name]
    options = triton_indices._OPTIONS
    kernel = getattr(triton_indices, name)
    for given in itertools.product((False, True), repeat=len(optional)):
        fixed: dict[str, Any] = {size: 16}
        fixed |= {arg: None for arg, there in zip(optional, given, strict=True) if not there}
        signature = {a: "constexpr" if a in fixed else TYPES.get(a, "i32") for a in kernel.arg_names}
        source = ASTSource(kernel, signature, constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert len(made.asm["cubin"]) > 1000


def test_batches_of_all_sizes_run_the_same_binary() -> None:
    """No argument that changes with the batch is specialised on its value or its alignment."""
    for name, (_, size) in OPTIONS.items():
        by_value = [p.name for p in getattr(triton_indices, name).params if not p.do_not_specialize]
        assert by_value == [size]
