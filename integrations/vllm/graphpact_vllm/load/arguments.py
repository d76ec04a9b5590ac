"""`FEATURES`, `refused`, `variables_of` and `arguments_of`: what a choice of features is for vLLM.

Does not: import vLLM.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphpact.engines import EngineStart, Feature
from graphpact.files import read_file
from graphpact_vllm.arguments import LAPTOP

MAX_LEN = 256
"""The most tokens of a request, if the model can have so many: long ones only take time."""

FEATURES = (
    Feature(name="runner", values=("V1", "V2")),
    Feature(name="cudagraph_mode", values=("FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE")),
    Feature(name="capture_sizes", values=([1, 2, 4, 8], [2, 4], [1, 8], [4, 8, 16, 32], [8, 24, 64])),
    Feature(name="page_size", values=(16, 8, 32, 128)),
    Feature(name="chunk", values=(512, 40, 24, 16)),
    Feature(name="prefix_cache", values=(False, True)),
    Feature(name="drafts", values=(None, "ngram:1", "ngram:3", "draft_model:1", "draft_model:3")),
    Feature(name="async_scheduling", values=(False, True)),
    Feature(name="cache_pages", values=("plenty", "starved")),
    Feature(name="max_requests", values=(8, 3, 16)),
    Feature(name="parallel", values=(1, "dp2", "tp2"), plain_share=0.85),
    Feature(name="backend", values=("GRAPHPACT", "GRAPHPACT_FLASHINFER", "GRAPHPACT_FA3", "CPU_ATTN")),
    Feature(name="pieces", values=("breakable", "compiled")),
)
"""The features, and the values of each; the first ones are the plainest.

Ranks start for each seed, so they are rare.

    runner            vLLM's model runner
    cudagraph_mode    which batches have a graph; see ``CUDAGraphMode``
    capture_sizes     captured numbers of tokens
    page_size         KV slots of a block
    chunk             the most new tokens of a step
    prefix_cache      whether blocks are kept for later requests with the same beginning
    drafts            a method, and the number of drafts of each request; a model drafts for itself
    async_scheduling  whether a step is scheduled before the tokens of the one before are known
    cache_pages       blocks for as many requests as may run, each of the most tokens, or for one
    max_requests      the most requests of a step
    parallel          ranks of data or of tensor parallelism
    backend           the attention backend
    pieces            how a model is cut for graphs of its pieces
"""


def refused(how: EngineStart) -> str | None:
    """Return why vLLM refuses a combination of values, or one with this model, in words; or None."""
    choice = how.choice
    method, _ = drafts_of(choice)
    is_dp = choice["parallel"] == "dp2"
    own_attention = choice["backend"] == "CPU_ATTN"
    reasons = {
        "vLLM: async scheduling is not supported with drafts by n-grams on the host": method == "ngram"
        and choice["async_scheduling"],
        "vLLM: offline data parallel mode is not supported for dense models": is_dp
        and not _has_experts(how.model),
        "vLLM: all drafting layers should belong to the same KV cache group": method == "draft_model"
        and _has_several_groups(how.model),
        "vLLM's model runner V2 ends at the first prompt: its drafter runs one token more of each request"
        " than the number of tokens that it gives to the other ranks": method == "draft_model"
        and choice["runner"] == "V2"
        and is_dp,
        "vLLM: on CPUs experts are compiled with the pieces, and torch cannot compare their sizes with data"
        " parallelism": is_dp and has_pieces(choice) and choice["pieces"] == "compiled",
        "vLLM: CPU_ATTN needs a block size that is a multiple of 32": own_attention
        and choice["page_size"] % 32 != 0,
        "vLLM: CUDAGraphMode.FULL is not supported by CPU_ATTN": own_attention
        and choice["cudagraph_mode"] == "FULL",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def drafts_of(choice: Mapping[str, Any]) -> tuple[str | None, int]:
    """Return the method of drafts and their number; None and 0 without drafts."""
    method, _, count = (choice.get("drafts") or "").partition(":")
    return (method, int(count)) if method else (None, 0)


def variables_of(how: EngineStart) -> dict[str, str]:
    """Return the environment variables of a process in which an engine starts.

    Pieces of a compiled model run on the fast tape always: a piece takes memory of the piece before, which is
    another graph's, and a strict tape refuses that.
    """
    choice = how.choice
    is_compiled = has_pieces(choice) and choice["pieces"] == "compiled"
    tape = "tape:strict" if how.is_strict and not is_compiled else "tape"
    found = {
        "GRAPHPACT": f"{tape},guard,contents:1,verify:1",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(choice["runner"] == "V2")),
        "VLLM_USE_BREAKABLE_CUDAGRAPH": str(int(has_pieces(choice) and choice["pieces"] == "breakable")),
    }
    port, rank = str(how.port), str(how.rank)
    if choice["parallel"] == "dp2":
        found |= {
            "VLLM_DP_SIZE": "2",
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": port,
            "VLLM_DP_RANK": rank,
            "VLLM_DP_RANK_LOCAL": rank,
        }
    elif choice["parallel"] == "tp2":
        found |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
        }
    return found


def has_pieces(choice: Mapping[str, Any]) -> bool:
    """Return whether graphs of pieces of the model are captured."""
    return "PIECEWISE" in choice["cudagraph_mode"]


def max_len_of(how: EngineStart) -> int:
    """Return the most tokens of a request, prompt and answer."""
    if "max_model_len" in how.settings:
        return int(how.settings["max_model_len"])
    return min(MAX_LEN, int(_config(how.model).get("max_position_embeddings", MAX_LEN)))


def _config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(read_file(model / "config.json"))
    return config


def _has_several_groups(model: Path) -> bool:
    """Return whether a model has layers of several kinds, each of which has blocks of its own."""
    config = _config(model)
    is_recurrent = any(name.startswith(("mamba_", "linear_", "conv_L")) for name in config)
    return is_recurrent or len(set(config.get("layer_types") or ())) > 1


def _has_experts(model: Path) -> bool:
    """Return whether a model has experts, by the names of their number in its configuration."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(_config(model).get(name) for name in names)


def arguments_of(how: EngineStart) -> dict[str, Any]:
    """Return the arguments of vLLM's ``EngineArgs``."""
    choice = how.choice
    max_len, max_requests, page_size = max_len_of(how), choice["max_requests"], choice["page_size"]
    requests = max_requests if choice["cache_pages"] == "plenty" else 1
    pages = -(-max_len // page_size) * requests
    if _has_several_groups(how.model):
        pages = 2 * pages + requests  # a window may begin and end within a block, and need one more
    found = LAPTOP | {
        "model": str(how.model),
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,  # a bar has a thread
        "max_model_len": max_len,
        "max_num_seqs": max_requests,
        "max_num_batched_tokens": choice["chunk"],
        "enable_chunked_prefill": True,
        "block_size": page_size,
        "num_gpu_blocks_override": pages + 1,  # the null block is one of them
        "enable_prefix_caching": choice["prefix_cache"],
        "attention_backend": choice["backend"],
        "async_scheduling": choice["async_scheduling"],
        "seed": 0,
    }
    if choice["parallel"] == "dp2":
        found["distributed_executor_backend"] = "uni"
    elif choice["parallel"] == "tp2":
        found |= {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}
    if how.is_eager:
        found |= {"enforce_eager": True}
    else:
        found["compilation_config"] = {
            "mode": 3 if has_pieces(choice) and choice["pieces"] == "compiled" else 0,
            "cudagraph_mode": choice["cudagraph_mode"],
            "cudagraph_capture_sizes": list(choice["capture_sizes"]),
        }
        method, count = drafts_of(choice)
        if method is not None:
            found["speculative_config"] = {"method": method, "num_speculative_tokens": count}
        if method == "ngram":
            found["speculative_config"] |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        elif method == "draft_model":
            found["speculative_config"] |= {"model": str(how.model)}
    return found | dict(how.settings)
