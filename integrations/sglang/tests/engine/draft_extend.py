"""Draft extends of SGLang's TensorRT-LLM backend on a tape: the released class over a model of its kernel.

FlashInfer, which has the kernel, needs a GPU when it is imported. The backend is made by its own constructor,
in the process of a started engine. A draft extend gives every request as many queries as it has draft tokens,
also where fewer were accepted (PR 21987), so offsets of queries have one stride. The forward of 0.5.23 views
its queries so, and reads the offsets no more. `PadsByMetadata` reads them, as the forward did before.

Does not: write keys; they are in the cache.
"""

import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from engines import ENGINE
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context

from graphpact_guard import GraphKey, Guard, Settings
from graphpact_kernels import PageTableCall, PageTableRows, ScoreOptions, page_table_attention
from graphpact_sglang.guard.contents import DecodeRows, expected_metadata
from graphpact_sglang.load.in_process import InProcessEngine
from graphpact_sglang.seams.runners import METADATA

HEADS, RANK, ROPE, PAGE, PAGES, REQUESTS, WIDTH, BS = 2, 512, 64, 64, 4, 8, 4, 4  # DeepSeek's widths
DIM = RANK + ROPE
_KEY = GraphKey(runner="draft extend", shape=str(BS))


def _attend(
    *,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    **rest: Any,
) -> torch.Tensor:
    """Attend as FlashInfer's ``trtllm_batch_decode_with_kv_cache_mla``, ``[bs, width, heads, RANK]``."""
    bs, width = query.shape[:2]
    cache = kv_cache.reshape(-1, 1, DIM)
    rows = PageTableRows(
        cu_seqlens_q=torch.arange(bs + 1, dtype=torch.int32) * width,
        cache_seqlens=seq_lens.clamp(min=width),  # a padding row has one key
        page_table=block_tables,
        page_size=PAGE,
        max_seqlen_q=width,
    )
    options = ScoreOptions(rest["bmm1_scale"], 0, 0.0, None, is_causal=True)
    call = PageTableCall(query.flatten(0, 1), cache, cache[..., :RANK], rows, options)
    return page_table_attention(call)[0].view(bs, width, HEADS, RANK)


class _Wrapper:
    """The place of FlashInfer's wrappers, which draft extends make and never plan."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs


def _released() -> Any:
    """Return SGLang's module of the backend, over the model of FlashInfer."""
    from sglang.srt.layers.attention import flashinfer_mla_backend

    model = types.ModuleType("flashinfer")
    model.decode = SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=_attend)  # type: ignore[attr-defined]
    model.utils = SimpleNamespace(  # type: ignore[attr-defined]  sizes of the kernel's own semaphores
        get_device_sm_count=lambda _device: 1, get_trtllm_gen_multi_ctas_kv_counter_bytes=lambda *_: 16
    )
    sys.modules["flashinfer"] = model
    for name in ("BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
        setattr(flashinfer_mla_backend, name, _Wrapper)
    from sglang.srt.layers.attention import trtllm_mla_backend

    trtllm_mla_backend.flashinfer = model
    trtllm_mla_backend._jit_fixup_module = lambda _dtype: None  # a kernel of decode context parallelism
    return trtllm_mla_backend


class PadsByMetadata:
    """Pads queries, and cuts the result, by offsets and lengths of the metadata."""

    def forward_extend(self, q: torch.Tensor, k: Any, v: Any, layer: Any, batch: Any, **options: Any) -> Any:
        """Return ``[T, HEADS * RANK]``."""
        backend: Any = self
        metadata = backend.forward_decode_metadata
        padded = q.new_zeros(len(metadata.seq_lens_q), WIDTH, HEADS, DIM)
        padded = backend.pad_draft_extend_query(q, padded, metadata.seq_lens_q, metadata.cu_seqlens_q)
        out = super().forward_extend(padded.flatten(0, 1), k, v, layer, batch, **options)  # type: ignore[misc]
        cut = backend.unpad_draft_extend_output(
            out.view(-1, WIDTH, HEADS, RANK),
            metadata.cu_seqlens_q,
            metadata.seq_lens_q,
            metadata.sum_seq_lens_q,
        )
        return cut.flatten(1)


class PacksAccepted(PadsByMetadata):
    """The fix taken out: a replay lays out the accepted tokens, as an eager step may."""

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:  # noqa: FBT001, FBT002
        """Prepare a capture, or a replay by accepted lengths."""
        super().init_forward_metadata_out_graph(batch, in_capture)  # type: ignore[misc]
        if in_capture:
            return
        backend: Any = self
        metadata, accepted = backend.forward_decode_metadata, batch.spec_info.num_accept_tokens
        metadata.seq_lens_q.copy_(accepted)
        metadata.cu_seqlens_q[1:].copy_(torch.cumsum(accepted, 0))
        metadata.sum_seq_lens_q = int(accepted.sum())


@dataclass(frozen=True)
class Extend:
    """The requests of one draft extend.

    Args:
        lengths: Keys of each request, those of its draft tokens included.
        accepted: Accepted tokens of each.
    """

    lengths: tuple[int, ...]
    accepted: tuple[int, ...]


EXTENDS = (Extend((70, 9, 33), (2, 4, 1)), Extend((12, 130), (1, 3)), Extend((65, 20, 6), (4, 1, 2)))
"""Batches below the captured size."""


@dataclass
class Result:
    """What a run gave.

    Args:
        replayed: For each batch, ``[bs][HEADS * RANK]``: the rows of the last accepted tokens.
        eager: The same by eager runs of the released backend.
        faults: Rule, owner and field of the guard's faults.
        read: The tensors of metadata that the capture read.
    """

    replayed: list[list[list[float]]]
    eager: list[list[list[float]]]
    faults: set[tuple[str, str, str]]
    read: set[str]


def run(change: type | None) -> Result:
    """Capture a draft extend and replay it for `EXTENDS`, with the released backend, or with a mixin."""
    load_plugins()
    off = dict.fromkeys(("cuda_graph_backend_decode", "cuda_graph_backend_prefill"), "disabled")
    engine = InProcessEngine(**ENGINE | off)  # it publishes the configuration that backends read
    get_context().override("the test", speculative_num_draft_tokens=WIDTH)
    released = _released().TRTLLMMLABackend
    kind = released if change is None else type(released.__name__, (change, released), {})
    given = _runner_of(engine)
    with torch.inference_mode():
        return _Lane(kind(given, skip_prefill=True), released(given, skip_prefill=True), given).run(EXTENDS)


def _runner_of(engine: InProcessEngine) -> SimpleNamespace:
    """Return what the constructor asks for: a small latent cache, and a table that mixes its pages."""
    draw = torch.Generator().manual_seed(0)
    cache = torch.randn((1 + REQUESTS * PAGES) * PAGE, 1, DIM, generator=draw)
    pages = 1 + torch.randperm(REQUESTS * PAGES, generator=draw).view(REQUESTS, PAGES)
    table = torch.zeros(1 + REQUESTS, PAGES * PAGE, dtype=torch.int32)
    table[1:] = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
    config = SimpleNamespace(
        context_len=PAGES * PAGE,
        num_attention_heads=HEADS,
        get_num_kv_heads=lambda _ranks: 1,
        kv_lora_rank=RANK,
        qk_nope_head_dim=RANK,
        qk_rope_head_dim=ROPE,
        v_head_dim=RANK,
        scaling=DIM**-0.5,
    )
    return SimpleNamespace(
        model_config=config,
        device="cpu",
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        page_size=PAGE,
        max_running_requests=REQUESTS,
        is_draft_worker=True,
        req_to_token_pool=SimpleNamespace(size=REQUESTS, req_to_token=table),
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _layer: cache),
        token_to_kv_pool_allocator=engine.model_runner.token_to_kv_pool_allocator,
        kv_index_translator=engine.model_runner.kv_index_translator,
    )


class _Lane:
    """A draft extend of one layer: its static inputs, its graph, and an eager backend to compare with."""

    def __init__(self, backend: Any, eager: Any, given: SimpleNamespace) -> None:
        self.backend, self._eager = backend, eager
        self._table = given.req_to_token_pool.req_to_token
        self._layer = SimpleNamespace(
            layer_id=0,
            tp_q_head_num=HEADS,
            head_dim=DIM,
            v_head_dim=RANK,
            scaling=DIM**-0.5,
            k_scale_float=None,
        )
        self._q = torch.zeros(BS * WIDTH, HEADS, DIM)
        self._seq_lens = torch.ones(BS, dtype=torch.int64)
        self._rows = torch.zeros(BS, dtype=torch.int64)
        self._accepted = torch.full((BS,), WIDTH)
        self._draw = torch.Generator().manual_seed(1)
        slots = torch.zeros(BS * PAGES * PAGE, dtype=torch.int32)  # otherwise made on a GPU
        backend.init_cuda_graph_state(BS, BS * WIDTH, slots)

    def run(self, extends: Sequence[Extend]) -> Result:
        """Capture, and replay each batch beside an eager run."""
        guard = Guard(Settings(guard=True, contents=1), {}, metadata=METADATA)
        stand_in: Any = torch.cuda.CUDAGraph
        graph = stand_in()
        self.backend.init_forward_metadata_out_graph(self._batch(), in_capture=True)
        with guard.capturing(_KEY, {"TRTLLMMLABackend": self.backend}, {}), graph.capturing():
            out = self._attend(self.backend, self._q, self._batch())
        replayed, eager = [], []
        for extend in extends:
            raw = len(extend.lengths)
            q = torch.randn(raw * WIDTH, HEADS, DIM, generator=self._draw)
            eager.append(self._run_eagerly(extend, q).tolist())
            self._fill(extend, q)
            self.backend.init_forward_metadata_out_graph(self._batch())
            guard.replaying(_KEY)
            rows = DecodeRows(
                raw=raw,
                padded=BS,
                width=WIDTH,
                is_tree=False,
                seq_lens=self._seq_lens,
                requests=self._rows,
                req_to_token=self._table,
                page_size=PAGE,
            )
            guard.check_contents(_KEY, expected_metadata(rows, guard.records[_KEY].leaves()))
            graph.replay()
            replayed.append(out[self._last(extend)].tolist())
        faults = {(fault.rule, fault.owner, fault.field) for fault in guard.log.faults.values()}
        return Result(replayed, eager, faults, {field for _, field in guard.records[_KEY].leaves()})

    def _batch(self) -> SimpleNamespace:
        return SimpleNamespace(
            forward_mode=ForwardMode.DRAFT_EXTEND_V2,
            batch_size=BS,
            positions=torch.zeros(BS * WIDTH),
            seq_lens=self._seq_lens,
            req_pool_indices=self._rows,
            spec_info=SimpleNamespace(num_accept_tokens=self._accepted),
            kv_loc_plan=None,
        )

    def _fill(self, extend: Extend, q: torch.Tensor) -> None:
        """Write the static inputs as SGLang's runner does: padding has one key, of request row 0."""
        raw = len(extend.lengths)
        self._seq_lens.fill_(1)
        self._rows.zero_()
        self._accepted.fill_(WIDTH)
        self._seq_lens[:raw] = torch.tensor(extend.lengths)
        self._rows[:raw] = torch.arange(1, raw + 1)
        self._accepted[:raw] = torch.tensor(extend.accepted)
        self._q[: len(q)] = q

    def _run_eagerly(self, extend: Extend, q: torch.Tensor) -> torch.Tensor:
        """Return the rows of the last accepted tokens from an eager run of the released backend."""
        raw = len(extend.lengths)
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DRAFT_EXTEND_V2,
            batch_size=raw,
            seq_lens=torch.tensor(extend.lengths),
            seq_lens_cpu=torch.tensor(extend.lengths),
            extend_seq_lens=torch.full((raw,), WIDTH),
            extend_seq_lens_cpu=[WIDTH] * raw,
            req_pool_indices=torch.arange(1, raw + 1),
            kv_loc_plan=None,
        )
        self._eager.init_forward_metadata(batch)
        return self._attend(self._eager, q, batch)[self._last(extend)]

    def _attend(self, backend: Any, q: torch.Tensor, batch: Any) -> torch.Tensor:
        out: torch.Tensor = backend.forward_extend(q, None, None, self._layer, batch, save_kv_cache=False)
        return out

    @staticmethod
    def _last(extend: Extend) -> torch.Tensor:
        return torch.arange(len(extend.accepted)) * WIDTH + torch.tensor(extend.accepted) - 1
