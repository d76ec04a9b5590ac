"""`register`: the attention backend and the hooks of the tape, by SGLang's own registries.

Does not: decide what is asked for; `graphpact_guard.settings` does.
"""

from typing import Any

from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_flags

from graphpact_guard import Settings
from graphpact_sglang import ATTENTION_BACKEND
from graphpact_sglang.guarding import SglangGuard
from graphpact_sglang.hooking import register_hook
from graphpact_sglang.steps import SEGMENTS, StepCounts

_MODE = "sglang.srt.model_executor.forward_batch_info.ForwardMode"
_DEFAULTS = "sglang.srt.arg_groups.platform_hook"

_CAPTURE = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph"
_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"


class InProcess:
    """What graphpact has in this process; `register` fills it.

    Attributes:
        counts: The counts of steps.
        guard: The hooks of the guard; None if none was asked for.
    """

    counts = StepCounts()
    guard: SglangGuard | None = None


def register(settings: Settings) -> None:
    """Register what ``settings`` ask for."""
    InProcess.counts.register()
    register_hook(_STATE, _add_state, HookType.AFTER)
    if settings.tape is not None:
        _register_tape()
    if settings.guard:
        InProcess.guard = SglangGuard(settings, InProcess.counts)
        InProcess.guard.register()


def state() -> dict[str, Any]:
    """Return the state of graphpact in this process, ready for JSON."""
    guard = None if InProcess.guard is None else InProcess.guard.guard
    return {"steps": InProcess.counts.summary(), "guard": None if guard is None else guard.summary()}


def _add_state(result: Any, *args: Any) -> None:
    """Add our state to the internal state that a scheduler reports."""
    del args
    result.internal_state["graphpact"] = state()


def _register_tape() -> None:
    from graphpact_sglang import drafts, experts, fa3  # noqa: PLC0415  they need the kernels
    from graphpact_sglang.segments import TapedSegments  # noqa: PLC0415  it needs the tape

    @register_attention_backend(ATTENTION_BACKEND)
    def make(runner: Any) -> Any:
        from graphpact_sglang.attention import PagedAttnBackend  # noqa: PLC0415  it imports SGLang's layers

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
    # On a CPU SGLang asks this one, which knows only decode.
    register_hook(f"{_MODE}.is_cpu_graph", lambda mode: mode.is_cuda_graph(), HookType.REPLACE)


def _open_the_gate(**kwargs: Any) -> None:
    """Let decode graphs be captured unless they are disabled. On a CPU, SGLang wants ``torch.compile``."""
    del kwargs
    is_disabled = check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
    get_flags().capture.enable_torch_compile = not is_disabled


def _choose_attention_backend(server_args: Any) -> None:
    """Choose a backend that can be recorded, if the user chose none; SGLang would choose its own for CPUs."""
    from graphpact_sglang import interpreter  # noqa: PLC0415  it needs the kernels

    view = resolving_view(server_args)
    if view.attention_backend is None:
        declare_resolution(server_args, "graphpact", attention_backend=ATTENTION_BACKEND)
    if "triton" in (view.attention_backend, view.prefill_attention_backend, view.decode_attention_backend):
        interpreter.require_interpreter("the attention backend 'triton'")
