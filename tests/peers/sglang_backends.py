"""SGLang's attention backends, unedited, each constructed on a CPU from one strict namespace of plain values.

:func:`install` comes first, once in a process. Then every factory takes a model runner, which
:func:`model_runner` makes, and returns a backend; each can be named as ``peers.sglang_backends:NAME``.

Adjustments of SGLang besides the stand-ins:

- two bare packages: ``sglang``, since the real one imports a server, and ``sglang.srt.configs``, since it
  imports the configuration of every model; the modules below both are the real ones;
- its configuration is published by its own ``override_server_args``, which refuses fields that it lacks;
- tensors that it asks for on ``cuda``, or pinned, are made on the CPU;
- FlashInfer's wrappers are those of :mod:`peers.flashinfer_wrappers`, which keep what a plan gives a kernel.

Does not: run a kernel of attention, or hold anything of SGLang.
"""

import contextlib
import importlib
import os
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from graphpact_adapters import stand_ins
from graphpact_adapters.sglang.plain_values import Given
from peers import flashinfer_wrappers

ABSENT = (
    "IPython", "PIL", "aiter", "compressed_tensors", "cuda", "dill", "einops", "fastapi", "flash_attn",
    "flash_mla", "flashinfer", "gguf", "orjson", "partial_json_parser", "psutil", "pybase64", "pynvml",
    "requests", "scipy", "sentencepiece", "sgl_kernel", "soundfile", "starlette", "torchao", "tvm_ffi",
    "uvicorn", "xgrammar", "zmq",
)  # fmt: skip
"""Third-party modules that backends import and that stand-ins replace; triton and msgspec are real."""

HEAVY = (
    "sglang.srt.configs.dots3",
    "sglang.srt.entrypoints",
    "sglang.srt.multimodal",
    "sglang.srt.utils.hf_transformers",
    "sglang.srt.utils.hf_transformers_utils",
    "sglang.kernels.ops.attention.unified_attention_3d_mtp",
    "sglang.kernels.ops.attention.fixup_zero_kv",
)
"""Modules of SGLang that are there and not wanted: processors, the server, kernels that ask AITER or nvcc."""

CORES = 108
"""Multiprocessors of the simulated GPU: with none, backends skip the metadata of split keys."""

CAPABILITY = (9, 0)
"""Compute capability of the simulated GPU: Hopper."""


def install(wheel: Path) -> None:
    """Make SGLang's modules importable from an unpacked wheel, for the rest of the process."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    os.environ["SGLANG_FLASHINFER_USE_TENSOR_CORE"] = "false"  # otherwise SGLang asks FlashInfer
    os.environ["SGLANG_FLASHINFER_WORKSPACE_SIZE"] = "1024"
    stand_ins.install(ABSENT, HEAVY)
    for name in ("sglang", "sglang.srt.configs"):
        stand_ins.package(name, wheel.joinpath(*name.split(".")))
    flashinfer = importlib.import_module("flashinfer")
    for name in vars(flashinfer_wrappers):
        if name.startswith(("Batch", "fast_")):
            setattr(flashinfer, name, getattr(flashinfer_wrappers, name))
    utils = importlib.import_module("flashinfer.utils")
    utils.get_device_sm_count = lambda _device: CORES
    utils.get_trtllm_gen_multi_ctas_kv_counter_bytes = lambda *_: 256  # a kernel's own semaphores
    importlib.import_module("flash_mla").get_mla_decoding_metadata = mla_metadata
    importlib.import_module("sgl_kernel.flash_attn").get_scheduler_metadata = scheduler_metadata
    common = importlib.import_module("sglang.srt.utils.common")
    utils = importlib.import_module("sglang.srt.utils")
    for module in (common, utils):
        module.is_flashinfer_available = lambda: True
        module.get_device_core_count = lambda _device=0: CORES
        module.get_device_capability = lambda _device=0: CAPABILITY


def scheduler_metadata(*, batch_size: int, cache_seqlens: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return a schedule of FlashAttention-3: a semaphore, then each request's planned length four times."""
    rows = (batch_size + 3) // 4 * 4
    schedule = torch.zeros(1 + rows * 4, dtype=torch.int32)
    schedule[1:].view(4, rows)[:, :batch_size] = cache_seqlens[:batch_size]
    return schedule


def mla_metadata(seq_lens: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a schedule of FlashMLA, ``[CORES, 8]`` with the planned lengths, and each request's splits."""
    schedule = torch.zeros(CORES, 8, dtype=torch.int32)
    schedule.view(-1)[: len(seq_lens)] = seq_lens
    return schedule, torch.arange(len(seq_lens) + 1, dtype=torch.int32)


_IS_CUDA = torch.Tensor.is_cuda.__get__


class _OnCPU(TorchFunctionMode):
    """A mode that makes ``cuda`` tensors on the CPU, and pinned tensors unpinned."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func == _IS_CUDA:  # SGLang asks it in assertions, and to choose GPU kernels
            return True
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Run SGLang's code on a CPU that looks like a GPU to it."""
    gpu = {
        "get_device_properties": lambda _device=None: types.SimpleNamespace(multi_processor_count=CORES),
        "get_device_capability": lambda _device=None: CAPABILITY,
    }
    with mock.patch.multiple(torch.cuda, **gpu), _OnCPU():
        try:
            yield
        except Exception as error:
            _forget_own_frames(error)
            raise


def _forget_own_frames(error: Exception) -> None:
    """Drop the frames of the mode above from a traceback, so that the line of SGLang is reported."""
    at = error.__traceback__
    while at is not None and (following := at.tb_next) is not None:
        if following.tb_frame.f_code is _OnCPU.__torch_function__.__code__:
            at.tb_next = following.tb_next
        else:
            at = following


def _module(name: str) -> Any:
    return importlib.import_module(f"sglang.srt.{name}")


def model_runner(
    *,
    mla: bool = False,
    page_size: int = 1,
    max_requests: int = 8,
    context_len: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    draft: bool = False,
    **server_args: Any,
) -> Given:
    """Return the argument of a backend: a strict model runner over plain values.

    Args:
        mla: Latent attention, with the dimensions of DeepSeek; otherwise heads of keys and values.
        page_size: KV slots in a page.
        max_requests: Rows of ``req_to_token``, less row 0, which is scratch.
        context_len: Columns of ``req_to_token``.
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values.
        head_dim: Size of a head; latent attention has 576 and 512 instead.
        draft: A runner of the draft model.
        server_args: Fields of SGLang's configuration that differ from its defaults.

    """
    slots = page_size * (1 + max_requests * (-(-context_len // page_size)))
    text = Given("model_runner.model_config.hf_text_config", num_attention_heads=num_heads, absent=_ABSENT)
    hf = Given(
        "model_runner.model_config.hf_config",
        absent=_ABSENT,
        architectures=["LlamaForCausalLM"],
        get_text_config=lambda: text,
        num_attention_heads=num_heads,
        num_hidden_layers=1,
    )
    config = Given(
        "model_runner.model_config",
        absent=_ABSENT,
        attention_arch="mla" if mla else "mha",
        context_len=context_len,
        get_max_num_attention_heads=lambda: num_heads,
        get_num_kv_heads=lambda tp, dcp=1: 1 if mla else max(1, num_kv_heads // tp // dcp),
        head_dim=head_dim,
        hf_config=hf,
        hf_text_config=text,
        hidden_size=num_heads * head_dim,
        is_encoder_decoder=False,
        is_local_attention_model=False,
        is_multimodal=False,
        kv_lora_rank=512,
        linear_attn_registry_result=None,
        num_attention_heads=num_heads,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        scaling=head_dim**-0.5,
        swa_v_head_dim=head_dim,
        v_head_dim=128 if mla else head_dim,
    )
    value = torch.zeros(slots, 1 if mla else num_kv_heads, 512 if mla else head_dim)
    quantization = Given(
        "model_runner.token_to_kv_pool.kv_cache_quant_method",
        name="none",
        resolve_attention_access=lambda _phase, _backend: Given(
            "attention_access", kind="native", scale_recipe=None
        ),
        needs_global_scale=lambda: False,
    )
    pool = Given(
        "model_runner.token_to_kv_pool",
        start_layer=0,
        get_value_buffer=lambda _layer: value,
        get_v_head_dim=lambda: value.shape[-1],
        get_kv_cache_quant_method=lambda: quantization,
    )
    no = dict.fromkeys(
        ("is_dspark", "is_frozen_kv_mtp", "is_speculative", "is_dflash_family", "is_none"), lambda: False
    )
    return Given(
        "model_runner",
        absent=("prefill_aware_swa",),
        server_args=server_args | {"page_size": page_size, "device": "cpu"},
        attention_chunk_size=None,
        decode_attention_backend_str="",
        prefill_attention_backend_str="",
        decode_num_tokens_per_req=lambda: server_args.get("speculative_num_draft_tokens") or 1,
        device="cpu",
        dtype=torch.float32,
        gpu_id=0,
        init_new_workspace=False,
        is_draft_worker=draft,
        kv_cache_dtype=torch.float32,
        kv_cache_dtype_str="auto",
        max_running_requests=max_requests,
        model=torch.nn.Module(),
        model_config=config,
        page_size=page_size,
        req_to_token_pool=Given(
            "model_runner.req_to_token_pool",
            size=max_requests,
            req_to_token=torch.zeros(max_requests + 1, context_len, dtype=torch.int32),
        ),
        sliding_window_size=None,
        spec_algorithm=Given("model_runner.spec_algorithm", **no),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=Given("model_runner.token_to_kv_pool_allocator", get_kvcache=lambda: pool),
        use_mla_backend=mla,
    )


_ABSENT = (  # attributes of models that are not arguments here
    "attn_logit_softcapping", "block", "candidate_block_size", "candidate_topk_blocks", "index_topk",
    "layer_types", "lightning_layerwise_decay", "linear_backend", "model_type",
    "num_linear_key_value_heads", "text_config",
)  # fmt: skip


_published: list[Any] = []


@contextlib.contextmanager
def ready(runner: Given) -> Iterator[Given]:
    """Publish the runner's configuration, and add the attributes that only SGLang can make."""
    context = _module("runtime_context").get_context()
    while _published:
        _published.pop().restore()
    override = context.override_server_args(**runner.server_args)
    runner.server_args = override.install()
    _published.append(override)
    context.parallel.override_permanently(attn_dcp_rank=0, attn_tp_rank=0, tp_rank=0)
    arch = _module("configs.model_config").AttentionArch
    config = runner.model_config
    config.attention_arch = {"mla": arch.MLA, "mha": arch.MHA}.get(
        config.attention_arch, config.attention_arch
    )
    translator = _module("mem_cache.kv_index_translator").KVIndexTranslator
    with on_cpu():
        runner.kv_index_translator = translator(
            req_to_token=runner.req_to_token_pool.req_to_token,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            token_to_kv_pool=runner.token_to_kv_pool,
            page_size=runner.page_size,
            device=runner.device,
            is_draft_worker=runner.is_draft_worker,
        )
        yield runner


def _factory(module: str, name: str, *args: Any, **kwargs: Any) -> Callable[[Given], Any]:
    def make(runner: Given) -> Any:
        with ready(runner):
            return getattr(_module(f"layers.attention.{module}"), name)(runner, *args, **kwargs)

    make.__doc__ = f"Return a ``{name}``, by its own constructor."
    return make


def _multi_step(module: str, name: str) -> Callable[[Given], Any]:
    def make(runner: Given) -> Any:
        with ready(runner):
            spec = _module("runtime_context").get_spec()
            made = getattr(_module(f"layers.attention.{module}"), name)
            return made(runner, spec.speculative_eagle_topk, spec.speculative_num_steps)

    make.__doc__ = f"Return a ``{name}``, by its own constructor."
    return make


triton = _factory("triton_backend", "TritonAttnBackend")
flashinfer = _factory("flashinfer_backend", "FlashInferAttnBackend")
fa3 = _factory("flashattention_backend", "FlashAttentionBackend")
trtllm_mha = _factory("trtllm_mha_backend", "TRTLLMHAAttnBackend")
flashinfer_mla = _factory("flashinfer_mla_backend", "FlashInferMLAAttnBackend")
trtllm_mla = _factory("trtllm_mla_backend", "TRTLLMMLABackend")
cutedsl_mla = _factory("cutedsl_mla_backend", "CuteDslMLABackend")
flashmla = _factory("flashmla_backend", "FlashMLABackend")
triton_draft = _multi_step("triton_backend", "TritonMultiStepDraftBackend")
flashinfer_draft = _multi_step("flashinfer_backend", "FlashInferMultiStepDraftBackend")
fa3_draft = _multi_step("flashattention_backend", "FlashAttentionMultiStepBackend")
trtllm_mha_draft = _multi_step("trtllm_mha_backend", "TRTLLMHAAttnMultiStepDraftBackend")
flashinfer_mla_draft = _multi_step("flashinfer_mla_backend", "FlashInferMLAMultiStepDraftBackend")
trtllm_mla_draft = _multi_step("trtllm_mla_backend", "TRTLLMMLAMultiStepDraftBackend")
cutedsl_mla_draft = _multi_step("cutedsl_mla_backend", "CuteDslMLAMultiStepDraftBackend")
flashmla_draft = _multi_step("flashmla_backend", "FlashMLAMultiStepDraftBackend")


def deepseek_v4(runner: Given) -> Any:
    """Return a ``DeepseekV4AttnBackend``, by its own constructor, for layers without compressed keys.

    It takes only a pool of SGLang's class for this model, whose constructor requires a model. The pool here
    is an instance made without it: it has the attributes that metadata of sliding windows read, and maps
    every slot to itself.
    """
    pool_class = _module("mem_cache.deepseek_v4_memory_pool").DeepSeekV4TokenToKVPool
    pool = object.__new__(pool_class)
    rows, columns = runner.req_to_token_pool.req_to_token.shape
    slots = runner.page_size * (2 + rows * -(-columns // runner.page_size))
    vars(pool).update(
        present_ratios=(),
        swa_page_size=runner.page_size,
        request_window=None,
        swa_req_ring_size=None,
        full_to_swa_index_mapping=torch.arange(slots),
    )
    runner.token_to_kv_pool = pool
    runner.hisparse_coordinator = None
    runner.model_config.head_dim = runner.model_config.v_head_dim = 512
    with ready(runner):
        return _module("layers.attention.deepseek_v4_backend").DeepseekV4AttnBackend(runner)


def _recurrent(module: str, name: str) -> Callable[[Given], Any]:
    def make(runner: Given) -> Any:
        """Return the backend. Request row ``n`` owns state ``n`` of its pool; state 0 is scratch."""
        requests, heads = runner.req_to_token_pool.size, runner.model_config.num_attention_heads
        owners = torch.arange(requests + 1, dtype=torch.int32)
        cache = Given(
            "model_runner.req_to_token_pool.mamba_pool.mamba_cache",
            conv=[torch.zeros(1, requests + 1, heads, 3)],
            temporal=torch.zeros(1, requests + 1, heads, 4, 4),
            replayssm_rawv=None,
            replayssm_d=None,
        )
        pool = runner.req_to_token_pool
        pool.get_mamba_indices = lambda rows: owners[rows]
        pool.translate_mamba_indices = lambda states: states
        pool.mamba_pool = Given(
            "model_runner.req_to_token_pool.mamba_pool",
            absent=("replayssm_is_kda", "replayssm_spec_fold", "replayssm_cache_base"),
            mamba_cache=cache,
            size=requests,
            enable_linear_replayssm=False,
        )
        with ready(runner):
            runner.linear_attn_backends = _module(
                "layers.attention.linear.utils"
            ).resolve_linear_attn_backends()
            return getattr(_module(f"layers.attention.{module}"), name)(runner)

    return make


gdn = _recurrent("linear.gdn_backend", "GDNAttnBackend")
kda = _recurrent("linear.kda_backend", "KDAAttnBackend")
mamba2 = _recurrent("hybrid_linear_attn_backend", "Mamba2AttnBackend")
short_conv = _recurrent("linear.short_conv_backend", "ShortConvAttnBackend")
lightning = _recurrent("linear.lightning_backend", "LightningAttentionBackend")


def _dsa(runner: Given) -> Given:
    """Add the attributes that DeepSeek's sparse attention reads, with the kernels of FlashMLA."""
    config = runner.model_config
    config.hf_config.architectures = ["DeepseekV32ForCausalLM"]
    config.hf_config.index_topk, config.hf_config.index_kpool = 32, 1
    runner.hisparse_coordinator = None
    runner.token_to_kv_pool.dsa_kv_cache_store_fp8 = False
    runner.token_to_kv_pool.kv_cache_dim = config.kv_lora_rank + config.qk_rope_head_dim
    runner.token_to_kv_pool.dtype = runner.kv_cache_dtype
    kernels = {"dsa_prefill_backend": "flashmla_sparse", "dsa_decode_backend": "flashmla_sparse"}
    runner.server_args |= kernels | {"dsa_topk_backend": "torch", "speculative_dsa_topk_backend": "torch"}
    return runner


def dsa(runner: Given) -> Any:
    """Return a ``DeepseekSparseAttnBackend``, by its own constructor."""
    return _factory("dsa_backend", "DeepseekSparseAttnBackend")(_dsa(runner))


def dsa_draft(runner: Given) -> Any:
    """Return a ``DeepseekSparseAttnMultiStepBackend``, by its own constructor."""
    return _multi_step("dsa_backend", "DeepseekSparseAttnMultiStepBackend")(_dsa(runner))
