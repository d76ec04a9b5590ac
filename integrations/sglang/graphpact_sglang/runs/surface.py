"""`RELEASES`: what attention backends, graph runners and graphpact build on in SGLang.

Does not: import SGLang; ``graphpact sglang diff`` reads its files.
"""

from graphpact_cli.releases.engine import EngineReleases

_EXECUTOR = "sglang.srt.model_executor"

RELEASES = EngineReleases(
    name="SGLang",
    package="sglang",
    distribution="sglang",
    surface={
        "sglang.srt.layers.attention.base_attn_backend": ("AttentionBackend",),
        "sglang.srt.layers.attention.attention_registry": (
            "attn_backend_wrapper",
            "register_attention_backend",
        ),
        "sglang.srt.mem_cache.memory_pool": ("KVCache", "ReqToTokenPool"),
        "sglang.srt.platforms.interface": ("PlatformCapabilities", "SRTPlatform"),
        "sglang.srt.plugins.hook_registry": ("HookRegistry", "HookType"),
        "sglang.srt.speculative.draft_utils": ("DraftBackendFactory",),
        "sglang.srt.speculative.eagle_draft_cuda_graph_runner": ("EAGLEDraftCudaGraphRunner",),
        "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner": ("EAGLEDraftExtendCudaGraphRunner",),
        "sglang.srt.speculative.spec_info": ("SpecInput",),
        f"{_EXECUTOR}.cuda_graph_buffer_registry": ("build_decode_registry", "build_prefill_registry"),
        f"{_EXECUTOR}.forward_batch_info": ("CaptureHiddenMode", "ForwardBatch", "ForwardMode"),
        f"{_EXECUTOR}.model_runner": ("ModelRunner",),
        f"{_EXECUTOR}.model_runner_components.cuda_graph_setup": ("capture_decode_graph",),
        f"{_EXECUTOR}.runner.base_cuda_graph_runner": ("BaseCudaGraphRunner",),
        f"{_EXECUTOR}.runner.decode_cuda_graph_runner": ("DecodeCudaGraphRunner",),
        f"{_EXECUTOR}.runner.prefill_cuda_graph_runner": ("PrefillCudaGraphRunner",),
        f"{_EXECUTOR}.runner.shape_key": ("ShapeKey",),
        f"{_EXECUTOR}.runner_backend.base_cuda_graph_backend": ("BaseCudaGraphBackend",),
        f"{_EXECUTOR}.runner_backend.breakable_cuda_graph_backend": ("BreakableCudaGraphBackend",),
        f"{_EXECUTOR}.runner_backend.full_cuda_graph_backend": ("FullCudaGraphBackend",),
    },
)
