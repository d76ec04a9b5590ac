"""`PagedAttnBackend`: an attention backend of SGLang whose kernels run on any device, and can be recorded.

It serves prefill, decode, verify and draft extend, and is one step of a draft in
`graphpact_sglang.attention.drafts`, for MHA, GQA and MLA caches, and for every page size: its kernels read a
list of KV slots. SGLang's own backends for a CPU have no such metadata, so they cannot run in a graph.

Does not: serve cross attention, or a cache with a separate pool for layers with a window.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from graphpact.errors import ConfigError
from graphpact_kernels import (
    AttendCall,
    PagedRows,
    ScoreOptions,
    fill_paged_indices,
    pack_tree_mask,
    paged_attention,
    write_indptr,
)
from graphpact_sglang import ATTENTION_BACKEND


@dataclass
class PagedMetadata:
    """What the kernel reads in one step.

    Args:
        qo_indptr: ``[bs + 1]`` int32: where the queries of each request begin.
        kv_indptr: ``[bs + 1]`` int32: where the KV slots of each request begin in ``kv_indices``.
        kv_indices: ``[>= kv_indptr[-1]]`` int32: KV slots.
        kv_last_page_len: ``[bs]`` int32: 1, or 0 without keys: a page is one KV slot.
        max_q_len: The most queries of a request.
        mask: Packed bits that say which keys each draft token sees; None without a mask.
        window_mask: The same in layers with a window: a kernel with a mask applies no window of its own. None
            without a mask, or if no layer has a window.
        mask_indptr: ``[bs + 1]`` int32: where the bytes of each request begin in ``mask``.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    max_q_len: int
    mask: torch.Tensor | None = None
    window_mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionRows:
    """The rows of a step: what metadata is made of.

    Args:
        slots: ``[rows, max_context_len]`` int32: the KV slot of each position.
        index: ``[bs]`` int64: the row of ``slots`` of each request, or of each branch of a draft.
        num_q: ``[bs]`` int: queries of each row, or one number for all.
        kv_lens: ``[bs]`` int64: keys of each row, those of its queries included.
        max_q_len: The most queries of a row.
        mask: SGLang's flat tree mask: for each request ``max_q_len`` rows with a column for each of its keys;
            None if queries are causal.
    """

    slots: torch.Tensor
    index: torch.Tensor
    num_q: torch.Tensor | int
    kv_lens: torch.Tensor
    max_q_len: int
    mask: torch.Tensor | None = None


class PagedAttnBackend(AttentionBackend):
    """An attention backend over FlashInfer's index tensors, with a page for each KV slot.

    Args:
        model_runner: SGLang's model runner.

    Raises:
        ConfigError: The KV cache has a separate pool for layers with a sliding window.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.device = model_runner.device
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.max_context_len = self.req_to_token.shape[1]
        self.forward_metadata: PagedMetadata | None = None
        window = model_runner.sliding_window_size  # keys before the query's own
        self._window = 0 if window is None or window < 0 else window + 1
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            raise ConfigError(
                f"the attention backend {ATTENTION_BACKEND!r} does not serve a separate KV pool for windows",
                hint="add --disable-hybrid-swa-memory: windows are then masks over the full cache",
            )

    # -- metadata --------------------------------------------------------------------------------

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padding row."""
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value  # SGLang pads eager batches with it

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.graph_qo_indptr, self.graph_kv_indptr = zeros(max_bs + 1), zeros(max_bs + 1)
        self.graph_kv_indices = zeros(max_bs * self.max_context_len)
        self.graph_kv_last_page_len = zeros(max_bs)
        width = max_num_tokens // max_bs
        self.graph_mask_indptr = zeros(max_bs + 1)
        size = -(-width * max_bs * self.max_context_len // 8) + max_bs
        self.graph_mask = zeros(size, torch.uint8)
        self.graph_window_mask = zeros(size, torch.uint8) if self._window else None

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:  # noqa: FBT001, FBT002  SGLang's own
        """Fill the graph's tensors for a padded batch, at capture and at replay alike."""
        del in_capture
        self.fill_graph_metadata(self._rows(forward_batch))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of an eager step, in new memory."""
        self.make_metadata(self._rows(forward_batch))

    def fill_graph_metadata(self, rows: AttentionRows) -> None:
        """Fill the graph's tensors for ``rows``."""
        bs, has_mask = len(rows.kv_lens), rows.mask is not None
        self.forward_metadata = PagedMetadata(
            self.graph_qo_indptr[: bs + 1],
            self.graph_kv_indptr[: bs + 1],
            self.graph_kv_indices,
            self.graph_kv_last_page_len[:bs],
            rows.max_q_len,
            self.graph_mask if has_mask else None,
            self.graph_window_mask if has_mask else None,
            self.graph_mask_indptr[: bs + 1] if has_mask else None,
        )
        self._fill(rows, self.forward_metadata)

    def make_metadata(self, rows: AttentionRows) -> None:
        """Make metadata for ``rows`` in new memory."""
        bs, total = len(rows.kv_lens), int(rows.kv_lens.sum())

        def new(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=self.device)

        mask = window_mask = mask_indptr = None
        if rows.mask is not None:
            size = -(-total * rows.max_q_len // 8) + bs
            mask, mask_indptr = new(size, torch.uint8), new(bs + 1)
            window_mask = new(size, torch.uint8) if self._window else None
        self.forward_metadata = PagedMetadata(
            new(bs + 1), new(bs + 1), new(total), new(bs), rows.max_q_len, mask, window_mask, mask_indptr
        )
        self._fill(rows, self.forward_metadata)

    def _rows(self, forward_batch: Any) -> AttentionRows:
        mode, bs = forward_batch.forward_mode, forward_batch.batch_size
        seq_lens = forward_batch.seq_lens[:bs].to(torch.int64)
        num_q: torch.Tensor | int = 1
        max_q_len, kv_lens, mask = 1, seq_lens, None
        if mode.is_target_verify():
            num_q = max_q_len = forward_batch.spec_info.draft_token_num
            kv_lens, mask = seq_lens + max_q_len, forward_batch.spec_info.custom_mask
        elif mode.is_draft_extend_v2():
            num_q = max_q_len = forward_batch.spec_info.num_tokens_per_req
            kv_lens = seq_lens.clamp(min=max_q_len)  # the length of a padding row is 1
        elif not mode.is_decode_or_idle():
            counts = forward_batch.extend_seq_lens_cpu
            num_q = forward_batch.extend_seq_lens
            max_q_len = int(forward_batch.extend_seq_lens.max()) if counts is None else max(counts)
        return AttentionRows(
            slots=self.req_to_token,
            index=forward_batch.req_pool_indices[:bs],
            num_q=num_q,
            kv_lens=kv_lens,
            max_q_len=max_q_len,
            mask=mask,
        )

    def _fill(self, rows: AttentionRows, metadata: PagedMetadata) -> None:
        """Write the metadata of ``rows``."""
        kv_lens, num_q = rows.kv_lens, rows.num_q
        write_indptr(
            num_q if isinstance(num_q, torch.Tensor) else torch.full_like(kv_lens, num_q),
            out=metadata.qo_indptr,
        )
        fill_paged_indices(
            rows.slots,
            rows.index,
            kv_lens,
            num_q=num_q,
            page_size=1,
            kv_indptr=metadata.kv_indptr,
            kv_indices=metadata.kv_indices,
            kv_last_page_len=metadata.kv_last_page_len,
        )
        if rows.mask is None or metadata.mask_indptr is None:
            return
        tree = _tree_mask(rows.mask, kv_lens, rows.max_q_len)
        for out, window in ((metadata.mask, None), (metadata.window_mask, self._window)):
            if out is not None:
                pack_tree_mask(
                    tree,
                    seq_lens=kv_lens - rows.max_q_len,
                    first_key=torch.zeros_like(kv_lens),
                    kv_lens=kv_lens,
                    mask_indptr=metadata.mask_indptr,
                    out=out,
                    sliding_window=window,
                )

    # -- attention -------------------------------------------------------------------------------

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,  # noqa: FBT001, FBT002  SGLang's own
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the keys and values of the new tokens, and attend.

        Returns:
            ``[T, num_q_heads * v_head_dim]``.

        Raises:
            ConfigError: The layer does cross attention, or attends without causality.
        """
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            raise ConfigError(
                f"layer {layer.layer_id} is not causal self attention",
                hint=f"the attention backend {ATTENTION_BACKEND!r} serves decoders; choose another one",
            )
        pool, metadata = self.token_to_kv_pool, self.forward_metadata
        assert metadata is not None  # noqa: S101  SGLang initialises it before the model runs
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        before = layer.sliding_window_size  # keys before the query's own
        window = 0 if before is None or before < 0 else before + 1
        mask = metadata.window_mask if window else metadata.mask
        if metadata.mask is not None and window not in (0, self._window):
            raise ConfigError(
                f"layer {layer.layer_id} has a window of {window} tokens, others of {self._window}",
                hint=f"the attention backend {ATTENTION_BACKEND!r} serves trees of drafts with one window",
            )
        call = AttendCall(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            PagedRows(
                qo_indptr=metadata.qo_indptr,
                kv_indptr=metadata.kv_indptr,
                kv_indices=metadata.kv_indices,
                kv_last_page_len=metadata.kv_last_page_len,
                page_size=1,
                max_q_len=metadata.max_q_len,
                max_kv_len=self.max_context_len,
                mask=mask,
                mask_indptr=metadata.mask_indptr,
            ),
            ScoreOptions(
                layer.scaling,
                window,
                layer.logit_cap or 0.0,
                sinks,
            ),
        )
        return paged_attention(call).flatten(1)

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        """Return whether SGLang may prepare this backend's batches with Triton."""
        return False


def _tree_mask(mask: torch.Tensor, kv_lens: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``[bs * width, width]`` bool: which drafts each draft token sees.

    Args:
        mask: SGLang's flat mask: for each live request, ``width`` rows with a column for each of its keys.
            Padding rows, which it may lack, see all drafts.
        kv_lens: ``[bs]`` int: keys of each request, drafts included.
        width: Draft tokens of a request.
    """
    ends = torch.cumsum(kv_lens * width, dim=0)
    row, column = torch.meshgrid(torch.arange(width), torch.arange(width), indexing="ij")
    begins = (ends - kv_lens * width)[:, None, None]
    lens = kv_lens[:, None, None]
    place = begins + row.to(mask.device) * lens + (lens - width) + column.to(mask.device)
    cells = torch.cat([mask.flatten().bool(), mask.new_ones(1, dtype=torch.bool)])
    return cells[place.flatten().clamp(max=len(cells) - 1)].view(-1, width)
