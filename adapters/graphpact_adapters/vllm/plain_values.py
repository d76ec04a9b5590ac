"""The plain values with which a vLLM builder of any author is constructed.

A builder is constructed with a KV cache spec, the names of its layers, a configuration and a device.
:func:`kv_cache_spec` and :func:`vllm_config` return the first and the third as namespaces. These have the
names that builders read, with the values for a single GPU without quantization and the sizes of the lane
under test. No engine is imported.

A namespace is strict: to read a name that it lacks raises :class:`NotGivenError`, an ``AttributeError`` with
the path. So an error shows which new name a release of the engine reads. A builder's factory may set
attributes before it constructs the builder.

Does not: make an engine's spec, configuration or layer classes; a factory makes them if a builder checks them
with ``isinstance``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

import torch

from graphpact.errors import ConfigError
from graphpact_adapters.needs import assume_missing
from graphpact_conformance.records.raised import NeedsValueError

Kind = Literal["full", "mla", "sliding_window", "mamba"]


class NotGivenError(NeedsValueError, AttributeError):
    """A builder read an attribute for which the suite has no value."""


class Namespace:
    """Named values; reading any other name raises.

    Args:
        path: The name of this namespace in errors, such as ``vllm_config.cache_config``.
        values: The values, by name.
    """

    _path: str

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values, _path=path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python's protocols, such as copying
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        path, known = self._path, ", ".join(sorted(self.names()))
        return assume_missing(
            path,
            name,
            f"{path}.{name}: the suite has no value for it; it has {known}",
            hint=f"set it in the builder's factory, `{path}.{name} = ...`, or construct the builder"
            " with another object",
            error=NotGivenError,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __repr__(self) -> str:
        return f"Namespace({self._path})"

    def names(self) -> set[str]:
        """Return the names that have a value."""
        return {name for name in vars(self) if not name.startswith("_")}


class GraphMode(Enum):
    """Which steps an engine replays as full graphs.

    Attributes:
        NONE: No step.
        FULL: All steps.
        FULL_DECODE_ONLY: Decode steps; steps with prefill run without graphs.
    """

    NONE = 0
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)

    def decode_mode(self) -> "GraphMode":
        """Return the mode of decode steps."""
        return GraphMode.NONE if self is GraphMode.NONE else GraphMode.FULL

    def has_full_cudagraphs(self) -> bool:
        """Return whether any step is replayed as a full graph."""
        return self is not GraphMode.NONE


@dataclass(frozen=True)
class Sizes:
    """The sizes of a lane of the suite. All values given to a builder are derived from them.

    Attributes:
        num_layers: Layers that share the builder's metadata.
        num_q_heads: Query heads.
        num_kv_heads: Heads of the KV cache; 1 for ``mla``.
        head_size: Elements of a cached key; for ``mla`` of the latent vector and its rotary part together.
        head_size_v: Elements of a cached value; 0 for ``mla``, whose value is part of the latent vector.
        dtype: Dtype of the model and of the cache.
        block_size: Tokens in a block of the cache.
        max_model_len: Length of the longest sequence, in tokens.
        max_num_seqs: The most requests of a step.
        max_num_tokens: The most tokens of a step.
        capture_sizes: Numbers of tokens for which a graph is captured, ascending.
        num_blocks: Blocks of the cache; None for block 0 and those of the largest step.
        num_speculative_tokens: Draft tokens of a request that a step verifies; 0 without speculation.
        kind: What the cache holds.
        sliding_window: Keys that a query sees, for ``sliding_window``; else None.
        rope_size: Elements of the rotary part of an MLA key.
        state_shapes: Shapes of one request's recurrent states, for ``mamba``: convolution, then scan.
        chunk_size: Tokens in a chunk of the scan that fills recurrent states, for ``mamba``.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_tokens: int
    capture_sizes: tuple[int, ...]
    num_blocks: int | None = None
    num_speculative_tokens: int = 0
    kind: Kind = "full"
    sliding_window: int | None = None
    rope_size: int = 64
    state_shapes: tuple[tuple[int, ...], ...] = ((8, 3), (2, 4, 4))
    chunk_size: int = 16

    def __post_init__(self) -> None:
        """Raise if there is a window without kind ``sliding_window``, or that kind without a window."""
        if (self.sliding_window is None) == (self.kind == "sliding_window"):
            raise ConfigError(
                f"sizes of kind {self.kind!r} with sliding_window={self.sliding_window}",
                hint="give a window with kind 'sliding_window', and None with any other kind",
            )

    def times(self, factor: int) -> "Sizes":
        """Return sizes with ``factor`` times as many requests, tokens and captured tokens."""
        return replace(
            self,
            max_num_seqs=self.max_num_seqs * factor,
            max_num_tokens=self.max_num_tokens * factor,
            capture_sizes=tuple(size * factor for size in self.capture_sizes),
        )

    @property
    def layer_names(self) -> list[str]:
        """The names of the layers, in order."""
        return [f"model.layers.{layer}.attn" for layer in range(self.num_layers)]


def kv_cache_spec(sizes: Sizes) -> Namespace:
    """Return the specification of one group of an engine's KV cache.

    It has the names of vLLM's ``FullAttentionSpec``, ``MLAAttentionSpec``, ``SlidingWindowSpec`` or
    ``MambaSpec``.
    """
    shared = {"block_size": sizes.block_size}
    if sizes.kind == "mamba":
        return Namespace(
            "kv_cache_spec",
            shared
            | {
                "dcp_sharded": False,
                "shapes": sizes.state_shapes,
                "dtypes": tuple(sizes.dtype for _ in sizes.state_shapes),
                "mamba_cache_mode": "none",
                "num_speculative_blocks": sizes.num_speculative_tokens,
                "num_prefill_checkpoint_blocks": 0,
                "prefill_checkpoint_alignment": None,
            },
        )
    attention = shared | {
        "dcp_sharded": True,
        "num_kv_heads": sizes.num_kv_heads,
        "head_size": sizes.head_size,
        "head_size_v": sizes.head_size_v,
        "dtype": sizes.dtype,
        "kv_quant_mode": 0,  # not quantized
        "tokens_per_state": 1,
        "sliding_window": sizes.sliding_window,
    }
    if sizes.kind == "mla":
        attention |= {
            "cache_dtype_str": None,
            "model_version": None,
        }
    return Namespace("kv_cache_spec", attention)


def vllm_config(sizes: Sizes, layers: Mapping[str, Any] | None = None) -> Namespace:
    """Return an engine's configuration, in which each group of settings is a namespace.

    Args:
        sizes: The sizes of a lane.
        layers: The layers by name; None for those of `plain_layers`.
    """
    path = "vllm_config"

    def group(name: str, **values: Any) -> Namespace:
        return Namespace(f"{path}.{name}", values)

    return Namespace(
        path,
        {
            "model_config": _model(sizes),
            "cache_config": group(
                "cache_config",
                block_size=sizes.block_size,
                num_gpu_blocks=sizes.num_blocks
                or 1 + sizes.max_num_seqs * -(-sizes.max_model_len // sizes.block_size),
                cache_dtype="auto",
                mamba_cache_mode="none",
                use_replayssm=False,
                replayssm_buffer_len=0,
            ),
            "compilation_config": group(
                "compilation_config",
                cudagraph_mode=GraphMode.FULL_DECODE_ONLY,
                cudagraph_capture_sizes=list(sizes.capture_sizes),
                max_cudagraph_capture_size=max(sizes.capture_sizes, default=None),
                max_capture_size=max(sizes.capture_sizes, default=None),  # the name in releases up to 0.11
                static_forward_context=dict(plain_layers(sizes) if layers is None else layers),
            ),
            "scheduler_config": group(
                "scheduler_config",
                max_num_seqs=sizes.max_num_seqs,
                max_num_batched_tokens=sizes.max_num_tokens,
            ),
            "parallel_config": group(
                "parallel_config",
                tensor_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                cp_kv_cache_interleave_size=1,
            ),
            "attention_config": group(
                "attention_config",
                flash_attn_version=None,
                flash_attn_max_num_splits_for_cuda_graph=32,
                use_trtllm_attention=None,
                use_non_causal=False,
                use_prefill_query_quantization=False,
                disable_flashinfer_q_quantization=False,
                hisparse_config=None,
                flex_attn_q_block_size=None,
                flex_attn_kv_block_size=None,
                flex_attn_block_m=None,
                flex_attn_block_n=None,
            ),
            "kernel_config": group("kernel_config", enable_jit_warmup=False),
            "mamba_config": group("mamba_config", backend="triton"),
            "speculative_config": _speculation(sizes),
            "num_speculative_tokens": sizes.num_speculative_tokens,
            "additional_config": {},
            "use_v2_model_runner": True,
        },
    )


def _model(sizes: Sizes) -> Namespace:
    path = "vllm_config.model_config"
    published = {"model_type": "given"} | (_mla_sizes(sizes) if sizes.kind == "mla" else {})
    return Namespace(
        path,
        {
            "dtype": sizes.dtype,
            "max_model_len": sizes.max_model_len,
            "rswa_window": None,
            "is_mm_prefix_lm": False,
            "hf_config": Namespace(f"{path}.hf_config", {"model_type": "given"}),
            "hf_text_config": Namespace(f"{path}.hf_text_config", published),
            "model_arch_config": Namespace(
                f"{path}.model_arch_config", {"total_num_attention_heads": sizes.num_q_heads}
            ),
            "get_num_attention_heads": lambda _parallel: sizes.num_q_heads,
            "get_num_kv_heads": lambda _parallel: sizes.num_kv_heads,
            "get_head_size": lambda: sizes.head_size,
            "get_mamba_chunk_size": lambda: sizes.chunk_size,
        },
    )


def plain_layers(sizes: Sizes) -> dict[str, Namespace]:
    """Return the layers of a lane by name, as namespaces."""
    return {name: _layer(sizes, name) for name in sizes.layer_names}


def _layer(sizes: Sizes, name: str) -> Namespace:
    values: dict[str, Any] = {"num_heads": sizes.num_q_heads}
    if sizes.kind == "mla":
        values |= _mla_sizes(sizes) | {"non_causal_multi_token_decode": False}
    return Namespace(f"vllm_config.compilation_config.static_forward_context[{name!r}]", values)


def _mla_sizes(sizes: Sizes) -> dict[str, Any]:
    latent = sizes.head_size - sizes.rope_size
    return {
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": latent,
        "qk_rope_head_dim": sizes.rope_size,
        "v_head_dim": latent,
    }


def _speculation(sizes: Sizes) -> Namespace | None:
    if not sizes.num_speculative_tokens:
        return None
    return Namespace(
        "vllm_config.speculative_config",
        {
            "num_speculative_tokens": sizes.num_speculative_tokens,
            "method": "draft_model",
            "parallel_drafting": False,
            "use_eagle_block_drop": lambda: False,
            "use_dspark": lambda: False,
            "enable_adaptive_verification": False,
        },
    )
