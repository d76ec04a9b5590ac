"""`RELEASES`: what attention backends, graph runners and graphpact build on in vLLM.

Does not: import vLLM; ``graphpact vllm diff`` reads its files.
"""

from graphpact_cli.releases.engine import EngineReleases

RELEASES = EngineReleases(
    name="vLLM",
    package="vllm",
    distribution="vllm",
    surface={
        "vllm.v1.attention.backend": (
            "AttentionBackend",
            "AttentionCGSupport",
            "AttentionImpl",
            "AttentionLayer",
            "AttentionMetadataBuilder",
            "CommonAttentionMetadata",
            "MLAAttentionImpl",
        ),
        "vllm.v1.attention.backends.registry": ("AttentionBackendEnum", "register_backend"),
        "vllm.v1.attention.selector": ("AttentionSelectorConfig", "get_attn_backend"),
        "vllm.v1.kv_cache_interface": ("AttentionSpec", "FullAttentionSpec", "KVCacheSpec", "MambaSpec"),
        "vllm.v1.worker.utils": ("AttentionGroup",),
        "vllm.v1.worker.gpu.attn_utils": ("build_attn_metadata", "init_attn_backend"),
        "vllm.v1.worker.gpu.model_states.interface": ("ModelState",),
        "vllm.v1.worker.gpu.input_batch": ("InputBatch", "InputBuffers"),
        "vllm.v1.worker.gpu.cudagraph_utils": (
            "BatchExecutionDescriptor",
            "CudaGraphManager",
            "ModelCudaGraphManager",
            "prepare_inputs_to_capture",
        ),
        "vllm.v1.worker.gpu.dp_utils": ("dispatch_cg_and_sync_dp", "sync_cudagraph_and_dp_padding"),
        "vllm.v1.worker.gpu.model_runner": ("GPUModelRunner",),
        "vllm.v1.core.sched.output": ("CachedRequestData", "NewRequestData", "SchedulerOutput"),
        "vllm.v1.cudagraph_dispatcher": ("CudagraphDispatcher",),
        "vllm.compilation.cuda_graph": ("CUDAGraphEntry", "CUDAGraphWrapper"),
        "vllm.compilation.breakable_cudagraph": (
            "BreakableCUDAGraphCapture",
            "BreakableCUDAGraphWrapper",
            "is_breakable_cudagraph_enabled",
        ),
        "vllm.forward_context": (
            "BatchDescriptor",
            "ForwardContext",
            "create_forward_context",
            "get_forward_context",
            "is_forward_context_available",
            "override_forward_context",
            "set_forward_context",
        ),
        "vllm.config": ("CUDAGraphMode",),
        "vllm.platforms.interface": ("Platform",),
        "vllm.v1.worker.cpu_worker": ("CPUWorker",),
        "vllm.v1.worker.cpu_model_runner": ("CPUModelRunner",),
        "vllm.v1.worker.workspace": ("init_workspace_manager",),
    },
)
