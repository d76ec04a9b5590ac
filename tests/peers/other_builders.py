"""Builders of other vendors' wheels, and of earlier releases of vLLM, constructed on a CPU.

`OTHERS` has them. ``peers.other_builders:NAME`` addresses a factory, with the arguments of a builder's
constructor. A process has one release of vLLM: that of the builder made first.

Does not: construct an implementation, or run a kernel of attention. `peers.ascend` has vLLM-Ascend's
builders.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError
from graphpact.shapes import GraphShape
from graphpact_adapters.kernel_reads import PagedReads, Part, Reader
from graphpact_adapters.tasks import Tasks
from graphpact_adapters.vllm.plain_values import Kind, Namespace
from graphpact_adapters.vllm.readers import read_vllm_metadata
from peers import ascend, vllm_builders
from peers.wheels import Wheel

VLLM_0_11, VLLM_0_23 = Wheel("vllm", "0.11.0"), ascend.VLLM
KUNLUN = Wheel("vllm-kunlun", "0.11.1")
_ABSENT_0_11 = ("blake3", "setproctitle")
_HEAVY_KUNLUN = ("vllm_kunlun.ops", "vllm_kunlun.platforms")
_BACKENDS = "vllm.v1.attention.backends"


@dataclass(frozen=True)
class Other:
    """A builder class of a wheel.

    Attributes:
        engine: The wheel's name and version, as the page has it.
        make: The factory.
        wheels: The wheels.
        read: What its kernel reads.
        kind: What its cache holds.
        block_size: Of its cache.
        modes: The kinds of step whose kernel the reader knows; None for those of the adapter.
        pads_replays: Whether its runner builds replays with padding rows.
        tasks: What the engine updates in a graph; None for nothing.
    """

    engine: str
    make: Callable[..., Any]
    wheels: tuple[Wheel, ...]
    read: Reader = read_vllm_metadata
    kind: Kind = "full"
    block_size: int = 16
    modes: frozenset[ForwardMode] | None = None
    pads_replays: bool = True
    tasks: Tasks | None = None


def _mode(config: Namespace) -> None:
    vllm_builders.real_mode(config)
    importlib.import_module("vllm.config")._current_vllm_config = config


def _of_0_11(path: str) -> Callable[..., Any]:
    """Return the factory of a builder of vLLM 0.11."""

    def make(spec: Namespace, layer_names: list[str], config: Namespace, device: torch.device) -> Any:
        vllm_builders.prepare(VLLM_0_11, absent=_ABSENT_0_11)
        return _construct(f"{_BACKENDS}.{path}", spec, layer_names, config, device)

    return make


def _of_0_23(path: str) -> Callable[..., Any]:
    """Return the factory of a builder of vLLM 0.23."""

    def make(spec: Namespace, layer_names: list[str], config: Namespace, device: torch.device) -> Any:
        vllm_builders.prepare(VLLM_0_23, absent=ascend.ABSENT)
        return _construct(f"{_BACKENDS}.{path}", spec, layer_names, config, device)

    return make


def _kunlun(spec: Namespace, layer_names: list[str], config: Namespace, device: torch.device) -> Any:
    """Return vLLM-Kunlun's builder of plain attention."""
    absent = (*_ABSENT_0_11, "kunlun_ops")
    vllm_builders.prepare(VLLM_0_11, (KUNLUN,), absent, _HEAVY_KUNLUN)
    path = "vllm_kunlun.v1.attention.backends.kunlun_attn:KunlunAttentionMetadataBuilder"
    return _construct(path, spec, layer_names, config, device)


def _construct(
    path: str, spec: Namespace, layer_names: list[str], config: Namespace, device: torch.device
) -> Any:
    module, _, name = path.partition(":")
    _mode(config)
    cls = getattr(importlib.import_module(module), name)
    return cls(vllm_builders.real_spec(spec), layer_names, config, device)


# -- readers -----------------------------------------------------------------------------------------------


def _causal(metadata: Any, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the reads of a kernel that is causal, whose metadata does not say so."""
    part = Part(
        seq_lens=metadata.seq_lens,
        block_table=metadata.block_table,
        query_start_loc=metadata.query_start_loc,
        num_tokens=metadata.num_actual_tokens,
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
    )
    return PagedReads((part,), slot_mapping, metadata.num_actual_tokens)


def _of_decodes(metadata: Any, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the reads of ``kunlun_ops.paged_attention``, by its lengths on the device.

    Raises:
        ConfigError: There are prefills, which another kernel computes.
    """
    decode, tokens = metadata.decode_metadata, metadata.num_decode_tokens
    if metadata.num_prefills or decode is None:
        raise ConfigError(
            f"KunlunMetadata has {metadata.num_prefills} prefills; this reader knows the decode kernel",
            hint="check only decodes and verified drafts",
        )
    part = Part(
        seq_lens=decode.seq_lens_tensor,
        block_table=decode.block_tables,
        query_len=tokens // metadata.num_decodes,
        num_tokens=tokens,
        names={"seq_lens": "seq_lens_tensor", "block_table": "block_tables"},
    )
    return PagedReads((part,), slot_mapping, metadata.num_actual_tokens)


def _tokens(shape: GraphShape) -> int:
    """Return the key of a graph: vLLM-Ascend counts only tokens."""
    return shape.num_tokens


_DECODE = frozenset({ForwardMode.DECODE})
_VERIFY = _DECODE | {ForwardMode.TARGET_VERIFY}
_ASCEND = Other(
    f"vLLM-Ascend {ascend.ASCEND.version}",
    ascend.builder,
    (VLLM_0_23, ascend.ASCEND),
    ascend.read,
    block_size=128,
    tasks=Tasks(ascend.ARGUMENTS, ascend.update, _tokens),
)
_OLD = Other(
    "vLLM 0.11.0", _of_0_11("triton_attn:TritonAttentionMetadataBuilder"), (VLLM_0_11,), pads_replays=False
)
OTHERS: dict[str, Other] = {
    "ascend": _ASCEND,
    "ascend_missing_a_layer": replace(
        _ASCEND, tasks=Tasks(ascend.ARGUMENTS, ascend.missing_the_last, _tokens), modes=_DECODE
    ),
    "ascend_mla": replace(
        _ASCEND,
        make=ascend.mla_builder,
        read=ascend.read_mla,
        kind="mla",
        modes=_DECODE,
        tasks=Tasks(ascend.ARGUMENTS_MLA, ascend.update_mla, _tokens),
    ),
    "kunlun": Other(
        f"vLLM-Kunlun {KUNLUN.version}", _kunlun, (VLLM_0_11, KUNLUN), _of_decodes, modes=_VERIFY
    ),
    "triton_0_23": Other(
        "vLLM 0.23.0", _of_0_23("triton_attn:TritonAttentionMetadataBuilder"), (VLLM_0_23,), _causal
    ),
    "flash_attention_0_23": Other(
        "vLLM 0.23.0", _of_0_23("flash_attn:FlashAttentionMetadataBuilder"), (VLLM_0_23,)
    ),
    "triton_0_11": replace(_OLD, read=_causal),
    "flash_attention_0_11": replace(_OLD, make=_of_0_11("flash_attn:FlashAttentionMetadataBuilder")),
}
"""The builders; `ascend_missing_a_layer` has a fault of ours, so that a missed update is seen to be found."""


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the factory of a builder in the table."""
    if name not in OTHERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return OTHERS[name].make
