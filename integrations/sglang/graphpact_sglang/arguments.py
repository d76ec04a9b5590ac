"""`LAPTOP` and `GRAPHS`: arguments of SGLang's engine on a laptop.

Does not: start it; `graphpact_sglang.runs.offer` does, in a process of its own.
"""

from typing import Any

LAPTOP: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "grammar_backend": "none",
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "mem_fraction_static": 0.5,
    "skip_server_warmup": True,
    "log_level": "warning",
}
"""Arguments of SGLang's ``Engine`` on a laptop, but for the checkpoint."""
GRAPHS: dict[str, Any] = {
    "cuda_graph_backend_decode": "full",
    "cuda_graph_bs_decode": [1, 2, 4, 8],
    "cuda_graph_backend_prefill": "breakable",
    "cuda_graph_bs_prefill": [16, 32, 64, 128],
}
"""Arguments by which it captures its steps, as it does on a GPU."""
