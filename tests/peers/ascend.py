"""vLLM-Ascend's attention: its builders, and its own update of the tasks of a graph.

The builder gets the common metadata of vLLM-Ascend's runner, which is another class than vLLM's. `updates`
returns an update that runs ``update_graph_params`` of the engine's implementation as it is: the parameters
of the graph are filled from the tasks, and the calls of ``torch_npu`` that update a recorded kernel update
a task.

Does not: run a kernel of an NPU, or construct an implementation.
"""

import contextlib
import functools
import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from graphpact.errors import ConfigError
from graphpact_adapters.kernel_reads import PagedReads, Part
from graphpact_adapters.tasks import KernelTask, UpdatableGraph
from graphpact_adapters.vllm.plain_values import Namespace
from peers import vllm_builders
from peers.wheels import Wheel

ASCEND = Wheel("vllm-ascend", "0.23.0")
VLLM = Wheel("vllm", "0.23.0")
ABSENT = ("gguf", "llguidance", "msgspec", "torch_npu", "xgrammar")
HEAVY = (
    "vllm.model_executor.models",
    "vllm.v1.core.sched",
    "vllm_ascend.device.device_op",
    "vllm_ascend.distributed",
    "vllm_ascend.ops",
    "vllm_ascend.quantization",
)
ARGUMENTS = ("actual_seq_lengths_q", "seq_lens_list", "block_tables")
"""The updated arguments: two lists on the host, and the address of the block table."""
ARGUMENTS_MLA = ("decode.seq_lens_list",)
"""The updated arguments of a latent decode: only the lengths."""


@functools.cache
def prepare() -> None:
    """Make the modules importable in this process, once; download missing wheels."""
    vllm_builders.prepare(VLLM, (ASCEND,), ABSENT, HEAVY)
    npu: Any = importlib.import_module("torch_npu")  # a stand-in
    torch.npu = npu.npu  # the package registers itself in the same way
    importlib.import_module("vllm_ascend.ascend_config")._ASCEND_CONFIG = _configured()
    rotary: Any = importlib.import_module("vllm_ascend.ops.rotary_embedding")  # no reader supports its tables
    rotary.get_cos_and_sin_mla = lambda positions, **_: (positions, positions)
    npu.npu_fused_infer_attention_score = SimpleNamespace(out=_updating.attention)
    npu.npu_fused_infer_attention_score_v2 = SimpleNamespace(out=_updating.latents)
    npu.npu.stream = lambda _: contextlib.nullcontext()
    npu.npu.graph_task_update_begin, npu.npu.graph_task_update_end = _updating.begin, _updating.end


def _configured() -> SimpleNamespace:
    """Return the engine's default configuration: attention is fused, and never paged."""
    return SimpleNamespace(pa_shape_list=[], ascend_compilation_config=None, eplb_config=None)


def builder(spec: Any, layer_names: list[str], config: Namespace, device: torch.device) -> Any:
    """Return the metadata builder of plain attention."""
    return _construct("attention_v1", "AscendAttentionMetadataBuilder", spec, layer_names, config, device)


def mla_builder(spec: Any, layer_names: list[str], config: Namespace, device: torch.device) -> Any:
    """Return the metadata builder of latent attention."""
    vllm_builders.latents(config)
    return _construct("mla_v1", "AscendMLAMetadataBuilder", spec, layer_names, config, device)


def _construct(
    module: str, name: str, spec: Any, layer_names: list[str], config: Namespace, device: torch.device
) -> Any:
    prepare()
    cls = getattr(importlib.import_module(f"vllm_ascend.attention.{module}"), name)
    vllm_builders.real_mode(config)
    importlib.import_module("vllm.config.vllm")._current_vllm_config = config
    config.scheduler_config.enable_chunked_prefill = True
    config.model_config.runner_type = "generate"
    return _with_common(cls)(vllm_builders.real_spec(spec), layer_names, config, device)


@functools.cache
def _with_common(cls: type[Any]) -> type[Any]:
    """Return a builder class that gets the common metadata of vLLM-Ascend's own class."""

    class OfRunner(cls):  # type: ignore[misc]
        """The builder with the input that its runner gives it."""

        def build(self, common_prefix_len: int, common_attn_metadata: Any, **more: Any) -> Any:
            """Build from the runner's metadata."""
            return super().build(common_prefix_len, as_ascend(common_attn_metadata), **more)

    OfRunner.__name__ = OfRunner.__qualname__ = cls.__name__
    return OfRunner


def as_ascend(common: Any) -> Any:
    """Return the common metadata of a step as vLLM-Ascend's runner has it."""
    made = importlib.import_module("vllm_ascend.attention.utils").AscendCommonAttentionMetadata
    states = importlib.import_module("vllm_ascend.attention.attention_v1").AscendAttentionState
    is_decode = common.max_query_len == 1
    return made(
        query_start_loc=common.query_start_loc,
        query_start_loc_cpu=common.query_start_loc_cpu,
        seq_lens=common.seq_lens,
        seq_lens_cpu=common.seq_lens_cpu,
        _seq_lens_cpu=common.seq_lens_cpu,
        num_computed_tokens_cpu=common.num_computed_tokens_cpu,
        num_reqs=common.num_reqs,
        num_actual_tokens=common.num_actual_tokens,
        num_input_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        decode_token_per_req=common.max_query_len,
        block_table_tensor=common.block_table_tensor,
        slot_mapping=common.slot_mapping,
        positions=common.positions,
        attn_state=states.DecodeOnly if is_decode else states.ChunkedPrefill,
        causal=common.causal,
    )


def read(metadata: Any, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the fields of the metadata that ``npu_fused_infer_attention_score`` reads."""
    part = Part(
        seq_lens=tuple(metadata.seq_lens_list),
        block_table=metadata.block_tables,
        query_start_loc=(0, *metadata.actual_seq_lengths_q),
        num_tokens=metadata.num_actual_tokens,
        causal=metadata.causal,
        names={
            "seq_lens": "seq_lens_list",
            "block_table": "block_tables",
            "query_start_loc": "actual_seq_lengths_q",
        },
    )
    return PagedReads((part,), slot_mapping, metadata.num_actual_tokens)


def read_mla(metadata: Any, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the fields of decode metadata that ``npu_fused_infer_attention_score_v2`` reads.

    Raises:
        ConfigError: There are prefills, which another kernel computes.
    """
    decode = metadata.decode
    if metadata.num_prefills or decode is None:
        raise ConfigError(
            f"AscendMLAMetadata has {metadata.num_prefills} prefills; this reader knows the decode kernel",
            hint="check only decodes",
        )
    part = Part(
        seq_lens=tuple(decode.seq_lens_list),
        block_table=decode.block_table,
        query_start_loc=(0, *decode.actual_seq_lengths_q),
        num_tokens=metadata.num_decode_tokens,
        name="decode",
        names={"seq_lens": "seq_lens_list", "query_start_loc": "actual_seq_lengths_q"},
    )
    return PagedReads((part,), slot_mapping, metadata.num_actual_tokens)


# -- the engine's update -----------------------------------------------------------------------------------


class Updating:
    """The task whose kernel the engine is updating; it replaces the state of ``torch_npu``."""

    task: KernelTask | None = None

    def begin(self, stream: Any, handle: KernelTask) -> None:
        """Begin the update of a recorded kernel."""
        del stream
        self.task = handle

    def end(self, stream: Any) -> None:
        """End it."""
        del stream
        self.task = None

    def attention(
        self,
        *,
        actual_seq_lengths: list[int],
        actual_seq_lengths_kv: list[int],
        block_table: torch.Tensor | None,
        **_: Any,
    ) -> None:
        """Update the arguments of the kernel; without a table, that of the capture stays."""
        assert self.task is not None
        self.task.update(
            actual_seq_lengths_q=(0, *actual_seq_lengths),
            seq_lens_list=actual_seq_lengths_kv,
            block_tables=block_table,
        )

    def latents(
        self, *_: Any, actual_seq_kvlen: list[int], actual_seq_qlen: list[int] | None, **__: Any
    ) -> None:
        """Update the lengths of the latent kernel; the table stays, and each decode has one query."""
        assert self.task is not None
        del actual_seq_qlen
        self.task.update(**{"decode.seq_lens_list": actual_seq_kvlen})


class _Event:
    """An event of the graph, which waits for each update."""

    def record(self, stream: Any) -> None:
        """Let the graph continue."""


_updating = Updating()


def update(graph: UpdatableGraph, attn_metadata: Mapping[str, Any]) -> None:
    """Run ``update_graph_params`` of plain attention."""
    _run_update("attention_v1", "AscendAttentionBackendImpl", 22, graph, attn_metadata)


def update_mla(graph: UpdatableGraph, attn_metadata: Mapping[str, Any]) -> None:
    """Run ``update_graph_params`` of latents."""
    _run_update("mla_v1", "AscendMLAImpl", 18, graph, attn_metadata)


def _run_update(
    module: str, name: str, kept: int, graph: UpdatableGraph, attn_metadata: Mapping[str, Any]
) -> None:
    """Run an implementation's ``update_graph_params``, as it is, for the graph that is replayed.

    The engine keeps ``kept`` arguments of each recorded kernel, and replaces the lengths and the table.
    """
    graphs = importlib.import_module("vllm_ascend.compilation.acl_graph")
    context = importlib.import_module("vllm.forward_context")
    impl = getattr(importlib.import_module(f"vllm_ascend.attention.{module}"), name)
    tokens = graph.key
    captured = [(None,) * kept] * len(graph)
    events = [_Event()] * len(graph)
    graphs._graph_params = graphs.GraphParams({tokens: events}, {}, {tokens: [*graph]}, {tokens: captured})
    context._forward_context = SimpleNamespace(attn_metadata=attn_metadata)
    config = importlib.import_module("vllm.config.vllm")._current_vllm_config
    impl.update_graph_params(None, context._forward_context, tokens, config)


def missing_the_last(graph: UpdatableGraph, attn_metadata: Mapping[str, Any]) -> None:
    """Run the update with metadata that lacks a layer; the engine's ``zip`` then omits a task."""
    *kept, _ = sorted(attn_metadata)
    update(graph, {name: attn_metadata[name] for name in kept})
