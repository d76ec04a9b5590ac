"""`LAPTOP`, `EAGER` and `GRAPHS`: arguments of vLLM's engine on a laptop.

Does not: start it; `graphpact_vllm.runs.offer` does, in a process of its own.
"""

from typing import Any

LAPTOP: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "disable_log_stats": True,
}
"""Arguments of vLLM's ``LLM`` on a laptop, but for the checkpoint."""
NATIVE_ROPE = "-rotary_embedding"
"""The word of ``custom_ops`` by which torch computes RoPE.

vLLM's kernel for CPUs takes queries of ``[T, num_heads, head_dim]`` for queries of one head. So it is wrong
for DeepSeek and for LFM2.
"""
EAGER: dict[str, Any] = {"enforce_eager": True, "compilation_config": {"custom_ops": [NATIVE_ROPE]}}
"""Arguments by which it runs without graphs, and right."""
GRAPHS: dict[str, Any] = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    }
}
"""Arguments by which it captures its decode steps, as it does on a GPU."""
