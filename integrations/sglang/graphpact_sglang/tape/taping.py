"""`register_tape`: the attention backends and the hooks of the tape, by SGLang's own registries.

The platform does the rest, see `graphpact_sglang.tape.platform`.

Does not: run without the tape and the kernels, or in a release of SGLang that lacks one of these seams.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_flags

from graphpact_kernels.interpreter import require_interpreter
from graphpact_sglang import ATTENTION_BACKEND
from graphpact_sglang.attention import drafts, fa3
from graphpact_sglang.seams.hooking import register_hook
from graphpact_sglang.seams.steps import BREAKABLE, FULL, SEGMENTS
from graphpact_sglang.tape import experts
from graphpact_sglang.tape.memory import capture_begins, capture_ended
from graphpact_sglang.tape.segments import TapedSegments

_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_MODE = "sglang.srt.model_executor.forward_batch_info.ForwardMode"
_DEFAULTS = "sglang.srt.arg_groups.platform_hook"
_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"
_HEADS = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head"
_CAPTURE = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph"


def register_tape() -> None:
    """Register the attention backends and the hooks of the tape."""

    @register_attention_backend(ATTENTION_BACKEND)
    def make(runner: Any) -> Any:
        from graphpact_sglang.attention.paged import PagedAttnBackend  # noqa: PLC0415  it imports SGLang's layers

        return PagedAttnBackend(runner)

    @register_attention_backend("fa3")
    def make_fa3(runner: Any) -> Any:
        return fa3.make_backend(runner)

    add_attention_backend_choices([ATTENTION_BACKEND])
    register_hook(fa3.KERNEL, fa3.flash_attn_with_kvcache, HookType.REPLACE)
    register_hook(experts.KERNEL, experts.moe_forward_native, HookType.REPLACE)
    register_hook(f"{drafts.FACTORY}.create_decode_backend", drafts.make_step_backends, HookType.AROUND)
    register_hook(
        f"{drafts.FACTORY}.create_draft_extend_backend", drafts.make_extend_backend, HookType.AROUND
    )
    register_hook(f"{drafts.TREE}.build_tree_kernel_efficient_func", drafts.build_tree, HookType.REPLACE)
    register_hook(f"{drafts.TREE}.verify_tree_greedy_func", drafts.verify_tree, HookType.REPLACE)
    register_hook(f"{_DEFAULTS}.handle_cpu_backends", _choose_attention_backend, HookType.BEFORE)
    register_hook(SEGMENTS, TapedSegments, HookType.REPLACE)
    register_hook(_CAPTURE, _open_the_gate, HookType.BEFORE)
    for graph_backend in (FULL, BREAKABLE):
        register_hook(f"{graph_backend}.capture_one", capture_begins, HookType.BEFORE)
        register_hook(f"{graph_backend}.capture_one", capture_ended, HookType.AFTER)
    # They are registered as operators of other devices; what they call is recorded as a collective.
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        register_hook(f"{_GROUP}.{name}", _without_operator(f"_{name}"), HookType.REPLACE)
    register_hook(f"{_BATCH}.prepare_mlp_sync_batch", _pin_no_memory, HookType.BEFORE)
    register_hook(_HEADS, _share_without_cuda, HookType.AROUND)
    # On a CPU SGLang asks this one, which knows only decode.
    register_hook(f"{_MODE}.is_cpu_graph", lambda mode: mode.is_cuda_graph(), HookType.REPLACE)


def _without_operator(name: str) -> Callable[[Any, torch.Tensor, torch.Tensor], None]:
    """Return a collective of SGLang's groups that calls its method ``name``, instead of an operator."""

    def collective(group: Any, output: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002  SGLang's name
        getattr(group, name)(output, input)

    return collective


def _pin_no_memory(batch: Any, *args: Any, **kwargs: Any) -> None:
    """Let batches pin no memory: SGLang does not ask the platform for those of data parallel attention."""
    del args, kwargs
    type(batch).use_pin_memory = _NEVER


_NEVER = property(lambda batch: False, lambda batch, value: None)  # noqa: ARG005  the signature of properties


def _share_without_cuda(original: Callable[..., None], worker: Any) -> None:
    """Let a draft take the embedding of its target: most heads call ``torch.cuda.synchronize`` there."""
    wait = torch.cuda.synchronize
    torch.cuda.synchronize = lambda device=None: None  # noqa: ARG005  torch's signature
    try:
        original(worker)
    finally:
        torch.cuda.synchronize = wait


def _open_the_gate(**kwargs: Any) -> None:
    """Let decode graphs be captured unless they are disabled. On a CPU, SGLang wants ``torch.compile``."""
    del kwargs
    is_disabled = check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
    get_flags().capture.enable_torch_compile = not is_disabled


def _choose_attention_backend(server_args: Any) -> None:
    """Choose a backend that can be recorded, if the user chose none; SGLang would choose its own for CPUs."""
    view = resolving_view(server_args)
    if view.attention_backend is None:
        declare_resolution(server_args, "graphpact", attention_backend=ATTENTION_BACKEND)
    if "triton" in (view.attention_backend, view.prefill_attention_backend, view.decode_attention_backend):
        require_interpreter("the attention backend 'triton'")
