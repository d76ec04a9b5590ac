"""Backends of SGLang for other devices, and of an earlier release.

    sglang_ascend        the Ascend backend, whose lengths the runner updates in the graph
    sglang_fa3_0_5_10    FlashAttention-3 of a release whose captures and replays are a pair of methods

Does not: run a kernel of attention, or hold anything of SGLang.
"""

import functools
import importlib
import os
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphpact.batch import ForwardMode
from graphpact_adapters import stand_ins
from graphpact_adapters.kernel_reads import PagedReads, Part
from graphpact_adapters.sglang import Backends
from graphpact_adapters.sglang.batch import OWN, SglangForwardMode, Speculation
from graphpact_adapters.sglang.plain_values import Given
from graphpact_adapters.tasks import Tasks, UpdatableGraph
from peers import sglang_adapted, sglang_backends, sglang_checks
from peers.wheels import TRITON, Wheel, unpack

SGLANG_0_5_10 = Wheel("sglang", "0.5.10", ("sglang/jit_kernel/csrc/*", "sglang/jit_kernel/include/*"))
_ABSENT = ("torchvision",)


class EarlierEngine:
    """The modes of the release, the adapter's inputs, and the pool that batches of earlier releases carry."""

    def forward_mode(self, mode: SglangForwardMode) -> Any:
        """Return the release's mode of the same name."""
        batch_info = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
        return batch_info.ForwardMode[mode.name]

    def spec_info(self, given: Speculation) -> Any:
        """Return the adapter's own input of speculation."""
        return OWN.spec_info(given)

    def bind(self, batch: Any, model_runner: Any, *, in_capture: bool) -> None:
        """Give a batch the pool of requests, which an eager step reads there."""
        del in_capture
        batch.req_to_token_pool = model_runner.req_to_token_pool

    def running(self) -> AbstractContextManager[None]:
        """Run SGLang's code on a CPU that looks like a GPU to it."""
        return sglang_backends.on_cpu()


@functools.cache
def _prepare(wheel: Wheel) -> None:
    """Make a release importable in this process, once."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    sys.path.append(str(unpack(TRITON)))
    stand_ins.install((*sglang_backends.ABSENT, *_ABSENT), sglang_backends.HEAVY)
    for name in ("sglang", "sglang.srt.configs"):
        stand_ins.package(name, unpack(wheel).joinpath(*name.split(".")))


def _fa3(runner: Given) -> Any:
    _prepare(SGLANG_0_5_10)
    runner.token_to_kv_pool = None
    runner.model_config.is_local_attention_model = False
    runner.server_args.enable_deterministic_inference = False
    with sglang_backends.on_cpu():
        module = importlib.import_module("sglang.srt.layers.attention.flashattention_backend")
        return module.FlashAttentionBackend(runner)


class NpuEngine(sglang_adapted.SglangEngine):
    """SGLang's engine inputs, plus the algorithm field of NPU batches, which is "none" here."""

    def bind(self, batch: Any, model_runner: Any, *, in_capture: bool) -> None:
        """Bind SGLang's inputs and the algorithm."""
        batch.spec_algorithm = None
        super().bind(batch, model_runner, in_capture=in_capture)


# -- the Ascend backend ------------------------------------------------------------------------------------


def _ascend(runner: Given) -> Any:
    """Return the Ascend backend. Its constructor allocates on an NPU, so its attributes are set here."""
    with sglang_backends.ready(runner):
        module = importlib.import_module("sglang.srt.hardware_backend.npu.attention.ascend_backend")
        context = importlib.import_module("sglang.srt.runtime_context")
        made = object.__new__(module.AscendAttnBackend)
        vars(made).update(
            forward_metadata=None,
            device=runner.device,
            is_draft_worker=runner.is_draft_worker,
            speculative_step_id=0,
            speculative_step_offset_npu=torch.tensor(1),
            page_size=runner.page_size,
            use_mla=False,
            graph_metadata={},
            max_context_len=runner.model_config.context_len,
            req_to_token_pool=runner.req_to_token_pool,
            req_to_token=runner.req_to_token_pool.req_to_token,
            graph_mode=False,
            use_fia=False,
            enable_sparsity_driven_kv_offload=False,
            speculative_num_draft_tokens=context.get_spec().speculative_num_draft_tokens,
            is_hybrid_swa=False,
            use_sliding_window_kv_pool=False,
            q_head_num_padding=None,
            is_dllm_model=False,
        )
        return made


@functools.cache
def _prepare_current() -> None:
    """Make the release of `peers.sglang_checks` importable in this process, once."""
    sys.path += [str(unpack(TRITON)), str(unpack(sglang_checks.MSGSPEC))]
    stand_ins.install(("torch_npu", "sgl_kernel_npu"))
    sglang_adapted.install(unpack(sglang_checks.SGLANG))


def _of_current(given: Given) -> Any:
    _prepare_current()
    return sglang_adapted.from_given(_ascend, mla=False)(given)


def _listed(metadata: Any, batch: Any) -> PagedReads:
    """Return the arguments of fused attention in a decode or verify step: lengths are a host list."""
    tokens = len(batch.out_cache_loc)
    width = tokens // batch.batch_size
    on_host = metadata.seq_lens_cpu_int
    lens = metadata.seq_lens_cpu_list if on_host is None else on_host.tolist()
    part = Part(
        seq_lens=tuple(lens),
        block_table=metadata.block_tables,
        query_len=width,
        num_tokens=tokens,
        names={"seq_lens": "actual_seq_lengths_kv", "block_table": "block_tables"},
    )
    return PagedReads((part,), batch.out_cache_loc, tokens)


def _update(graph: UpdatableGraph, batch: Any) -> None:
    """Give all tasks the lengths of the live batch, as SGLang's runner for NPUs does."""
    width = len(batch.input_ids) // batch.batch_size if batch.forward_mode.is_target_verify() else 0
    live = batch.batch_size - batch.num_padding
    lens = (batch.seq_lens_cpu[:live] + width).tolist() + [0] * batch.num_padding
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lens}])


OTHERS: dict[str, Backends] = {
    "sglang_ascend": sglang_checks.Released(
        _of_current,
        read=_listed,
        page_sizes=(16,),
        engine=NpuEngine(),
        modes=frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY}),
        tasks=Tasks(("actual_seq_lengths_kv",), _update),
    ),
    "sglang_fa3_0_5_10": sglang_checks.Released(
        _fa3,
        page_sizes=(1, 16),
        engine=EarlierEngine(),
        modes=frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND}),
    ),
}
"""The backends."""
WHEELS = {"sglang_ascend": sglang_checks.SGLANG, "sglang_fa3_0_5_10": SGLANG_0_5_10}
"""Their wheels."""
