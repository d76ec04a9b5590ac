"""`BuilderValues`: vLLM's own specs, configurations and batches, for `graphpact check --adapter vllm`.

A configuration is made as vLLM makes it, from the ``config.json`` of a small model with the sizes of a lane.
The process then has vLLM on a CPU with graphs, as on the tape. Layers are given: vLLM's own would choose an
attention backend, and allocate weights.

Does not: start an engine, or load a model.
"""

import functools
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if "vllm" not in sys.modules:  # vLLM chooses its platform while it is imported
    os.environ["GRAPHPACT"] = "tape"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"  # else FlashInfer's builder asks the network for kernels
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model is a folder here

from vllm import config as vllm_configs
from vllm.config import vllm as current_config
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.attention.backend import CommonAttentionMetadata

from graphpact.files import write_file
from graphpact_vllm import installed_release

logging.getLogger("vllm").setLevel(logging.ERROR)  # it advises on sizes, which are those of lanes


class BuilderValues:
    """What vLLM gives to its metadata builders."""

    common = CommonAttentionMetadata
    kernel_libraries = ("flashinfer", "flash_attn", "aiter", "vllm.vllm_flash_attn")
    """Modules of kernels for GPUs, which builders import."""

    @property
    def name(self) -> str:
        """Whose classes these are."""
        return f"vLLM {installed_release()}"

    def kv_cache_spec(self, sizes: Any) -> Any:
        """Return the specification of one group of the KV cache; ``sizes`` are those of the adapter."""
        if sizes.kind == "mamba":
            return specs.MambaSpec(
                block_size=sizes.block_size,
                shapes=sizes.state_shapes,
                dtypes=tuple(sizes.dtype for _ in sizes.state_shapes),
                num_speculative_blocks=sizes.num_speculative_tokens,
            )
        made, more = {
            "full": (specs.FullAttentionSpec, {"head_size_v": sizes.head_size_v}),
            "sliding_window": (
                specs.SlidingWindowSpec,
                {"head_size_v": sizes.head_size_v, "sliding_window": sizes.sliding_window},
            ),
            "mla": (specs.MLAAttentionSpec, {}),
        }[sizes.kind]
        return made(
            block_size=sizes.block_size,
            num_kv_heads=sizes.num_kv_heads,
            head_size=sizes.head_size,
            dtype=sizes.dtype,
            **more,
        )

    def vllm_config(self, sizes: Any, layers: dict[str, Any]) -> Any:
        """Return the configuration of an engine, which is the current one of this process from now on.

        Args:
            sizes: The sizes of a lane.
            layers: The layers by name.
        """
        dtype = str(sizes.dtype).removeprefix("torch.")
        model = vllm_configs.ModelConfig(
            model=_checkpoint(json.dumps(_published(sizes))),
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=sizes.max_model_len,
        )
        parallel = vllm_configs.ParallelConfig()
        drafts = sizes.num_speculative_tokens
        config = vllm_configs.VllmConfig(
            model_config=model,
            cache_config=vllm_configs.CacheConfig(
                block_size=sizes.block_size,
                enable_prefix_caching=False,  # with it, recurrent layers have other block tables
            ),
            parallel_config=parallel,
            scheduler_config=vllm_configs.SchedulerConfig(
                max_num_seqs=sizes.max_num_seqs,
                max_num_batched_tokens=max(sizes.max_num_tokens, sizes.max_model_len),
                max_model_len=sizes.max_model_len,
                is_encoder_decoder=False,
            ),
            compilation_config=vllm_configs.CompilationConfig(mode=0, cudagraph_mode="FULL_DECODE_ONLY"),
            speculative_config=vllm_configs.SpeculativeConfig(
                method="draft_model",
                model=model.model,
                num_speculative_tokens=drafts,
                target_model_config=model,
                target_parallel_config=parallel,
            )
            if drafts
            else None,
        )
        # A lane has sizes that vLLM would round up.
        config.cache_config.block_size = sizes.block_size
        config.cache_config.num_gpu_blocks = sizes.num_blocks or 1 + sizes.max_num_seqs * -(
            -sizes.max_model_len // sizes.block_size
        )
        config.scheduler_config.max_num_batched_tokens = sizes.max_num_tokens
        compilation = config.compilation_config
        compilation.cudagraph_capture_sizes = list(sizes.capture_sizes)
        compilation.max_cudagraph_capture_size = max(sizes.capture_sizes, default=0)
        compilation.static_forward_context.update(layers)
        current_config._current_vllm_config = config  # noqa: SLF001  as while vLLM makes a model
        return config


def _published(sizes: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a model with the sizes of a lane."""
    shared = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": sizes.num_layers,
        "vocab_size": 256,
        "max_position_embeddings": sizes.max_model_len,
    }
    heads = {
        "num_attention_heads": sizes.num_q_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_size,
    }
    if sizes.kind == "mamba":
        return shared | {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "num_heads": sizes.num_q_heads,
            "head_dim": 2 * shared["hidden_size"] // sizes.num_q_heads,
            "expand": 2,
            "n_groups": 1,
            "chunk_size": sizes.chunk_size,
        }
    if sizes.kind == "mla":
        latent = sizes.head_size - sizes.rope_size
        return shared | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_attention_heads": sizes.num_q_heads,
            "num_key_value_heads": sizes.num_q_heads,
            "q_lora_rank": None,
            "kv_lora_rank": latent,
            "qk_nope_head_dim": latent,
            "qk_rope_head_dim": sizes.rope_size,
            "v_head_dim": latent,
        }
    return shared | heads | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@functools.cache
def _checkpoint(published: str) -> str:
    """Return a folder with a ``config.json``, which lasts as long as the process."""
    folder = Path(_scratch().name, str(len(list(Path(_scratch().name).iterdir()))))
    folder.mkdir()
    write_file(folder / "config.json", published)
    return str(folder)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="graphpact-vllm-")
