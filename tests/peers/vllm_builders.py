"""The attention metadata builders of a released vLLM, constructed on a CPU.

Each factory of this module makes one builder; its arguments are those of the builder's constructor, as
:mod:`graphpact_adapters.vllm.plain_values` makes them. ``peers.vllm_builders:NAME`` addresses the factory of
a row of :data:`BUILDERS`, which has one for each builder class below ``vllm/v1/attention/backends``. The
first factory that is called prepares the process (:func:`prepare`). Where a builder asks with ``isinstance``,
a factory makes the real spec, enum or layer from the given one; what it adds to the configuration, it adds in
place, since a builder's class methods read it too.

Does not: construct an implementation (``...Impl``), or run a kernel of attention.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from graphpact_adapters import stand_ins
from graphpact_adapters.vllm.plain_values import Kind, Namespace
from peers.wheels import TRITON, Wheel, unpack

VLLM = Wheel("vllm", "0.33.0")
CAPABILITY = (10, 0)  # compute capability of the simulated GPU, by which most builders choose their kernels
COMPUTE_UNITS = 148
ABSENT = [
    "PIL",
    "aiohttp",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "compressed_tensors",
    "cpuinfo",
    "einops",
    "flashinfer",
    "huggingface_hub",
    "openai",
    "openai_harmony",
    "psutil",
    "pybase64",
    "requests",
    "tqdm",
    "urllib3",
    "uvloop",
    "zmq",
    "vllm._C",
    "vllm._C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm._moe_C",
]
HEAVY = [
    "vllm.distributed.kv_transfer",
    "vllm.entrypoints",
    "vllm.multimodal.inputs",
    "vllm.vllm_flash_attn",
]
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",  # builders launch small kernels for metadata
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_HAS_FLASHINFER_CUBIN": "1",  # otherwise FlashInfer's builder asks the network for kernels
}
_BACKENDS = "vllm.v1.attention.backends"
_kept: list[object] = []  # operators live as long as their library


@functools.cache
def prepare(
    engine: Wheel = VLLM,
    beside: tuple[Wheel, ...] = (),
    absent: tuple[str, ...] = (),
    heavy: tuple[str, ...] = (),
) -> None:
    """Make vLLM's builder modules importable in this process, once; download missing wheels.

    The platform is vLLM's own for CUDA; it describes a GPU that is not there.

    Args:
        engine: The release.
        beside: Wheels of plugins.
        absent: More modules that are absent.
        heavy: More modules that stand-ins take the place of.
    """
    os.environ |= ENVIRONMENT
    sys.path += [str(unpack(wheel)) for wheel in (engine, *beside, TRITON)]
    stand_ins.install([*ABSENT, *absent], [*HEAVY, *heavy])
    platforms, interface, cuda = (
        importlib.import_module(f"vllm.platforms{name}") for name in ("", ".interface", ".cuda")
    )

    class Described(cuda.CudaPlatformBase):
        """The platform of a simulated GPU."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            del device_id
            return interface.DeviceCapability(*CAPABILITY)

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            del device_id
            return COMPUTE_UNITS

    platforms._current_platform = Described()
    properties = SimpleNamespace(multi_processor_count=COMPUTE_UNITS, gcnArchName="gfx942")  # for ROCm's
    torch.cuda.get_device_properties = lambda _=None: properties
    torch.cuda.device = lambda _: contextlib.nullcontext()
    # What the compiled extension would answer to modules that choose kernels while they are imported.
    operators = torch.library.Library("_C", "FRAGMENT")
    _kept.append(operators)
    for name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"):
        operators.define(f"{name}(int capability) -> bool")
        operators.impl(name, lambda _: False, "CompositeExplicitAutograd")


def real_spec(spec: Namespace) -> Any:
    """Return vLLM's own KV cache spec with the values of a given one."""
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    names = spec.names()
    if "shapes" in names:
        made = interface.MambaSpec
    elif "cache_dtype_str" in names:
        made = interface.MLAAttentionSpec
    elif spec.sliding_window is not None:
        made = interface.SlidingWindowSpec
    else:
        made = interface.FullAttentionSpec
    fields = {field.name for field in dataclasses.fields(made)}
    values = {name: getattr(spec, name) for name in names & fields}
    if "kv_quant_mode" in values:
        values["kv_quant_mode"] = interface.KVQuantMode(values["kv_quant_mode"])
    return made(**values)


def real_enums(config: Namespace) -> None:
    """Replace the settings of a given configuration that builders compare with members of vLLM's enums."""
    mamba = importlib.import_module("vllm.config.mamba")
    real_mode(config)
    config.mamba_config.backend = mamba.MambaBackendEnum.TRITON


def real_mode(config: Namespace) -> None:
    """Replace the mode of graphs by a member of vLLM's enum, which releases since 0.11 have."""
    compilation = importlib.import_module("vllm.config.compilation")
    mode = config.compilation_config.cudagraph_mode
    config.compilation_config.cudagraph_mode = compilation.CUDAGraphMode[mode.name]


class _NoPrefill:
    """Replaces the prefill backend of an MLA layer, since all batches of the suite are decode batches."""

    def clone(self) -> "_NoPrefill":
        return self

    def get_name(self) -> str:
        return "NO_PREFILL"

    def prepare_metadata(self, metadata: Any) -> None:
        raise AssertionError(f"a decode batch was planned as prefill: {metadata}")


def latents(config: Namespace) -> None:
    """Add the attributes that builders of latent layers read, without a prefill backend."""
    for layer in _layers(config):
        layer.prefill_backend = _NoPrefill()


def _sparse_mla(config: Namespace) -> None:
    for layer in _layers(config):
        layer.prefill_backend = None  # every row takes the sparse path
    for published in (config.model_config.hf_config, config.model_config.hf_text_config):
        published.index_topk = config.model_config.max_model_len  # every key is chosen
    config.attention_config.sparse_mla_prefill_workspace_factor = 1


def _swa(config: Namespace) -> None:
    _sparse_mla(config)
    config.model_config.hf_config.sliding_window = config.model_config.max_model_len  # it has every key


def _indexer(config: Namespace) -> None:
    _sparse_mla(config)
    config.attention_config.resolve_indexer_kv_dtype = lambda default: default


def _flashinfer(config: Namespace) -> None:
    # Its builder looks for the window and the scale of its layers' implementations, with isinstance.
    base = importlib.import_module("vllm.model_executor.layers.attention_layer_base").AttentionLayerBase
    impl = importlib.import_module("vllm.v1.attention.backends.flashinfer").FlashInferImpl
    layers = config.compilation_config.static_forward_context
    heads = config.model_config.get_num_attention_heads(config.parallel_config)
    for name in layers:
        made = object.__new__(impl)
        made.num_heads, made.sliding_window, made.scale = heads, (-1, -1), 1.0
        made.logits_soft_cap = made.sinks = None
        layer = object.__new__(type("Layer", (base,), dict.fromkeys(base.__abstractmethods__)))
        layer.impl = made
        layers[name] = layer
    cache = importlib.import_module("vllm.v1.kv_cache_interface").KVCacheLayout
    config.cache_config.get_resolved_kv_cache_layout = lambda: cache.LBHNC


def _layers(config: Namespace) -> Iterable[Namespace]:
    return config.compilation_config.static_forward_context.values()


@dataclass(frozen=True)
class Builder:
    """A builder class of vLLM, and how it is constructed.

    Attributes:
        path: ``module:class``, below ``vllm.v1.attention.backends``.
        kind: What its cache holds.
        ready: Adds the settings that only this builder reads to the configuration.
        absent: Why it cannot be constructed; empty if it can.
    """

    path: str
    kind: Kind = "full"
    ready: Callable[[Namespace], None] | None = None
    absent: str = ""


_AITER = "the package aiter sizes its buffers"

BUILDERS: dict[str, Builder] = {
    "triton": Builder("triton_attn:TritonAttentionMetadataBuilder"),
    "triton_diffkv": Builder("triton_attn_diffkv:TritonAttentionDiffKVMetadataBuilder"),
    "flash_attention": Builder("flash_attn:FlashAttentionMetadataBuilder"),
    "flashinfer": Builder("flashinfer:FlashInferMetadataBuilder", ready=_flashinfer),
    "turboquant": Builder("turboquant_attn:TurboQuantMetadataBuilder"),
    "flex": Builder("flex_attention:FlexAttentionMetadataBuilder"),
    "b12x": Builder("b12x:B12xPagedMetadataBuilder"),
    "hpc": Builder("hpc_attn:HpcAttnMetadataBuilder", absent="the package hpc lays out its task map"),
    "cpu": Builder(
        "cpu_attn:CPUAttentionMetadataBuilder",
        absent="a compiled operator plans its schedule; a CPU captures no graphs",
    ),
    "rocm": Builder("rocm_attn:RocmAttentionMetadataBuilder"),
    "rocm_octave": Builder("rocm_octave_attn:RocmOctaveMetadataBuilder"),
    "rocm_segmented": Builder("rocm_segmented_attn:RocmSegmentedAttentionMetadataBuilder"),
    "rocm_aiter_unified": Builder("rocm_aiter_unified_attn:RocmAiterUnifiedAttentionMetadataBuilder"),
    "rocm_aiter_flash_attention": Builder("rocm_aiter_fa:AiterFlashAttentionMetadataBuilder"),
    "triton_mla": Builder("mla.triton_mla:TritonMLAMetadataBuilder", "mla", latents),
    "flashmla": Builder("mla.flashmla:FlashMLAMetadataBuilder", "mla", latents),
    "flash_attention_mla": Builder("mla.flashattn_mla:FlashAttnMLAMetadataBuilder", "mla", latents),
    "xpu_flash_attention_mla": Builder("mla.flashattn_mla:XPUFlashAttnMLAMetadataBuilder", "mla", latents),
    "cutlass_mla": Builder(
        "mla.cutlass_mla:CutlassMLAMetadataBuilder",
        "mla",
        absent="its module allocates on a GPU while it is imported",
    ),
    "flashinfer_mla": Builder("mla.flashinfer_mla:FlashInferMLAMetadataBuilder", "mla", latents),
    "tokenspeed_mla": Builder("mla.tokenspeed_mla:TokenspeedMLAMetadataBuilder", "mla", latents),
    "amx_mla": Builder("mla.amx_mla:AMXMLAMetadataBuilder", "mla", latents),
    "rocm_aiter_mla": Builder("mla.rocm_aiter_mla:AiterMLAMetadataBuilder", "mla", absent=_AITER),
    "flashmla_sparse": Builder("mla.flashmla_sparse:FlashMLASparseMetadataBuilder", "mla", _sparse_mla),
    "flashinfer_mla_sparse": Builder(
        "mla.flashinfer_mla_sparse:FlashInferMLASparseMetadataBuilder", "mla", _sparse_mla
    ),
    "flashinfer_mla_sparse_trtllm": Builder(
        "mla.flashinfer_mla_sparse:FlashInferMLASparseTRTLLMMetadataBuilder", "mla", _sparse_mla
    ),
    "flashinfer_mla_sparse_sm90": Builder(
        "mla.flashinfer_mla_sparse_sm90:FlashInferMLASparseSM90Builder",
        "mla",
        absent="it plans through FlashInfer's compiled wrappers",
    ),
    "flash_attention_mla_sparse": Builder(
        "mla.flashattn_mla_sparse:FlashAttnMLASparseMetadataBuilder", "mla", _sparse_mla
    ),
    "flash_attention_mla_sparse_fa4": Builder(
        "mla.flashattn_mla_sparse:FlashAttnMLASparseFA4MetadataBuilder", "mla", _sparse_mla
    ),
    "xpu_mla_sparse": Builder("mla.xpu_mla_sparse:XPUMLASparseMetadataBuilder", "mla", _sparse_mla),
    "rocm_aiter_mla_sparse": Builder(
        "mla.rocm_aiter_mla_sparse:ROCMAiterMLASparseMetadataBuilder", "mla", absent=_AITER
    ),
    "sparse_swa": Builder("mla.sparse_swa:DeepseekSparseSWAMetadataBuilder", "mla", _swa),
    "indexer": Builder("mla.indexer:DeepseekV32IndexerMetadataBuilder", "mla", _indexer),
    "kpool_tail": Builder("mla.indexer:KpoolTailMetadataBuilder", "mla"),
    "sparse_indexer": Builder(
        "mla.sparse_indexer:DeepseekV41SparseIndexerMetadataBuilder",
        "mla",
        absent="it requires DeepGEMM's compiled sparse kernels",
    ),
    "rocm_mxfp4_indexer": Builder(
        "mla.rocm_paged_mxfp4_indexer:RocmMxfp4IndexerMetadataBuilder", "mla", absent=_AITER
    ),
    "rocm_mxfp4_sparse_indexer": Builder(
        "mla.rocm_paged_mxfp4_indexer:DeepseekV41RocmMxfp4IndexerMetadataBuilder", "mla", absent=_AITER
    ),
    "mamba1": Builder("mamba1_attn:Mamba1AttentionMetadataBuilder", "mamba"),
    "mamba2": Builder("mamba2_attn:Mamba2AttentionMetadataBuilder", "mamba"),
    "linear": Builder("linear_attn:LinearAttentionMetadataBuilder", "mamba"),
    "bailing_linear": Builder("linear_attn:BailingLinearAttentionMetadataBuilder", "mamba"),
    "short_conv": Builder("short_conv_attn:ShortConvAttentionMetadataBuilder", "mamba"),
    "ple_short_conv": Builder("short_conv_attn:PleShortConvAttentionMetadataBuilder", "mamba"),
    "gdn": Builder("gdn_attn:GDNAttentionMetadataBuilder", "mamba"),
}

NOT_BUILDERS = {
    "mamba_attn:BaseMambaAttentionMetadataBuilder": "abstract",
    "mla.index_group:SparseMLAIndexGroupBuilder": "plans top-k groups for sparse MLA builders",
}

Factory = Callable[[Namespace, list[str], Namespace, torch.device], Any]


def unlisted() -> set[str]:
    """Return the builder classes of the wheel that are in neither table, as ``module:class``."""
    root = unpack(VLLM).joinpath(*_BACKENDS.split("."))
    found = set()
    for file in root.rglob("*.py"):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Builder"):
                found.add(f"{module}:{node.name}")
    return found - NOT_BUILDERS.keys() - {row.path for row in BUILDERS.values()}


def __getattr__(name: str) -> Factory:
    """Return the factory of a builder in the table, so that ``peers.vllm_builders:NAME`` addresses it."""
    if name not in BUILDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    row = BUILDERS[name]
    if row.absent:
        raise AttributeError(f"{row.path} cannot be constructed: {row.absent}")

    def make(
        kv_cache_spec: Namespace, layer_names: list[str], vllm_config: Namespace, device: torch.device
    ) -> Any:
        prepare()
        module, _, cls = row.path.partition(":")
        builder = getattr(importlib.import_module(f"{_BACKENDS}.{module}"), cls)
        stand_ins.called()
        real_enums(vllm_config)
        # The engine does so while it makes a model. Some builders ask for it later too.
        importlib.import_module("vllm.config.vllm")._current_vllm_config = vllm_config
        if row.ready is not None:
            row.ready(vllm_config)
        width = -(-vllm_config.model_config.max_model_len // kv_cache_spec.block_size)
        extra = {"block_table_width": width} if builder.requires_block_table_width else {}
        return builder(real_spec(kv_cache_spec), layer_names, vllm_config, device, **extra)

    make.__name__ = make.__qualname__ = name
    return make
