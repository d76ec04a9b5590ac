"""`TapePlatform`: vLLM's platform whose device is a CPU, and whose graphs are tapes.

vLLM runs unedited: both of its model runners dispatch, capture and replay as on a GPU, with a driver of
graphpact in the place of CUDA's graphs.

vLLM imports this module while it is itself half imported, so it imports little.

Does not: run models faster; a tape repeats what eager torch does.
"""

from typing import Any, ClassVar

from vllm.platforms.cpu import CpuPlatform

from graphpact.errors import ConfigError
from graphpact_vllm import ATTENTION_BACKEND, PLUGGED
from graphpact_vllm.arguments import NATIVE_ROPE


class TapePlatform(CpuPlatform):
    """A CPU with graph capture.

    Attributes:
        schedules_ahead: Whether vLLM may schedule asynchronously, if it was asked to; its platform for CPUs
            never does.
    """

    schedules_ahead: ClassVar[bool] = False
    simple_compile_backend: str = "eager"  # of small functions: Inductor asks Triton's driver for a compiler

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Keep what was asked of graphs and of pieces, which vLLM's platform for CPUs clears.

        RoPE is left to torch, unless ``custom_ops`` say something of it; see `NATIVE_ROPE`.
        """
        from vllm.config import CompilationMode  # noqa: PLC0415  it asks for a platform

        compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
        names = ("mode", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
        asked = {name: getattr(compilation, name) for name in names}
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "graphpact_vllm.tape.worker.TapeWorker"
        is_async = vllm_config.scheduler_config.async_scheduling
        super().check_and_update_config(vllm_config)
        if cls.schedules_ahead:
            vllm_config.scheduler_config.async_scheduling = is_async
        for name, value in asked.items():
            setattr(compilation, name, value)
        if not any(word.endswith("rotary_embedding") for word in compilation.custom_ops):
            compilation.custom_ops.append(NATIVE_ROPE)
        if compilation.mode == CompilationMode.VLLM_COMPILE:
            compilation.backend = "eager"  # a tape records what torch dispatches, not compiled kernels

    @classmethod
    def get_compile_backend(cls) -> str:
        """Return the backend from which vLLM derives its settings of a compiled model, as for CUDA."""
        return "inductor"

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Return the path of the backend that was chosen; without a choice, of one that can be recorded."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: PLC0415  as above

        ours = AttentionBackendEnum[ATTENTION_BACKEND]
        if selected_backend is not None and selected_backend.name.startswith(PLUGGED):
            kinds = {"latents (MLA)": attn_selector_config.use_mla, "sparse": attn_selector_config.use_sparse}
            if any(kinds.values()):
                what = " and ".join(kind for kind, is_asked in kinds.items() if is_asked)
                raise ConfigError(
                    f"the attention backend {selected_backend.name} cannot serve this model in vLLM: {what}"
                    " attention is not served by graphpact backends there",
                    hint=f"choose {ATTENTION_BACKEND}, which serves latents, or leave the backend out",
                )
        if attn_selector_config.use_sparse:
            return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))
        if attn_selector_config.use_mla and selected_backend in (None, ours):
            return "graphpact_vllm.attention.latents.LatentBackend"
        return str((selected_backend or ours).get_path())

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Return True, as for CUDA: a compiled model is split at attention."""
        return True

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """Return the path of operations with LoRA adapters that can be recorded."""
        return "graphpact_vllm.tape.adapters.AdapterOperations"

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Return whether graphs are captured."""
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """Return the path of the wrapper for GPUs."""
        return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

    @classmethod
    def graph_pool_handle(cls) -> tuple[int, int]:
        """Return the handle of the only pool."""
        return (0, 0)
