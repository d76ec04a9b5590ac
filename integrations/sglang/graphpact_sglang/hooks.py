"""`register`: the attention backend and the hooks of the tape, by SGLang's own registries.

Does not: decide what is asked for; `graphpact_guard.settings` does.
"""

from typing import Any

from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from graphpact_guard import Settings
from graphpact_sglang import ATTENTION_BACKEND
from graphpact_sglang.guarding import SglangGuard

_MODE = "sglang.srt.model_executor.forward_batch_info.ForwardMode"
_BREAKABLE = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
_DEFAULTS = "sglang.srt.arg_groups.platform_hook"

GUARDS: list[SglangGuard] = []
"""The guard of this process, if one was asked for."""


def register(settings: Settings) -> None:
    """Register what ``settings`` ask for."""
    if settings.tape is not None:
        _register_tape()
    if settings.guard:
        guard = SglangGuard(settings)
        guard.register()
        GUARDS.append(guard)


def _register_tape() -> None:
    from graphpact_sglang.segments import TapedSegments  # noqa: PLC0415  it needs the tape

    @register_attention_backend(ATTENTION_BACKEND)
    def make(runner: Any) -> Any:
        from graphpact_sglang.attention import PagedAttnBackend  # noqa: PLC0415  it imports SGLang's layers

        return PagedAttnBackend(runner)

    add_attention_backend_choices([ATTENTION_BACKEND])
    HookRegistry.register(f"{_DEFAULTS}.handle_cpu_backends", _choose_attention_backend, HookType.BEFORE)
    HookRegistry.register(f"{_BREAKABLE}.BreakableCUDAGraphCapture", TapedSegments, HookType.REPLACE)
    # On a CPU SGLang asks this one, which knows only decode.
    HookRegistry.register(f"{_MODE}.is_cpu_graph", lambda mode: mode.is_cuda_graph(), HookType.REPLACE)


def _choose_attention_backend(server_args: Any) -> None:
    """Choose a backend that can be recorded, if the user chose none; SGLang would choose its own for CPUs."""
    if resolving_view(server_args).attention_backend is None:
        declare_resolution(server_args, "graphpact", attention_backend=ATTENTION_BACKEND)
