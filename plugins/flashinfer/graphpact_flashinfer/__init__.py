"""The ``flashinfer`` attention backend: FlashInfer's paged metadata for decode and extend.

Metadata is what FlashInfer's wrappers take: ``qo_indptr``, ``kv_indptr``, ``kv_indices`` and
``kv_last_page_len``, each a slot of the lane's registry. The kernels are graphpact's portable ones,
which read the same tensors and make the same checks.

Does not: call FlashInfer's own kernels, or serve a mode other than decode and extend.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphpact import (
    AttentionBackend,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    GraphShape,
    GraphSlot,
    LayerSpec,
    Limits,
    PaddingPolicy,
    bounded,
)
from graphpact.attention import GraphSupport, HeadLayout
from graphpact.errors import EngineError
from graphpact.kernels import pack_kv_indices, paged_attention, write_kv_cache

_REBUILT = "fill_metadata writes every row of the padded extent in every step"
_RAGGED = "kernels read up to kv_indptr[-1], as far as each step writes it"


@dataclass(slots=True)
class FlashInferMetadata:
    """What FlashInfer's kernels read for one step of ``bs`` requests.

    Args:
        out_cache_loc: ``[T]`` int64: KV slot of each new token; 0 is scratch.
        qo_indptr: ``[bs + 1]`` int32: where each request's queries begin.
        kv_indptr: ``[bs + 1]`` int32: where each request's pages begin in ``kv_indices``.
        kv_indices: ``[capacity]`` int32: page numbers, read up to ``kv_indptr[-1]``.
        kv_last_page_len: ``[bs]`` int32: keys in each request's last page, 1 to the page size.
        max_q_len: Bound on the queries of a request: 1 for decode.
        max_kv_len: Bound on the keys of a request: the context length for decode, at capture as at
            replay.
    """

    out_cache_loc: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    max_q_len: int = bounded()
    max_kv_len: int = bounded()


class FlashInferBackend(AttentionBackend):
    """FlashInfer-shaped metadata on portable kernels."""

    capabilities = Capabilities(
        modes=frozenset({ForwardMode.DECODE, ForwardMode.EXTEND}),
        graph_support=GraphSupport.UNIFORM_DECODE,
        dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16}),
        devices=frozenset({"cpu", "cuda"}),
        head_layouts=frozenset({HeadLayout.MHA, HeadLayout.GQA}),
        # A padded row has one key, in scratch: FlashInfer refuses a causal row with fewer keys than
        # queries, so 0 is not an empty row for it.
        seq_len_fill_value=1,
        sliding_window=True,
        softcap=True,
        sinks=True,
    )

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return the four index tensors, int32 as FlashInfer requires."""

        def slot(
            name: str,
            shape_fn: Callable[[int, int], tuple[int, ...]],
            extra_rows: int | None = None,
        ) -> GraphSlot:
            return GraphSlot(
                name=f"flashinfer.{name}",
                shape_fn=shape_fn,
                dtype=torch.int32,
                owner="flashinfer",
                axis="none" if extra_rows is None else "bs",
                slice_fn=None if extra_rows is None else lambda b, n: b[: n + extra_rows],
                padding_policy=PaddingPolicy.KEEP_PAD,
                reason=_RAGGED if extra_rows is None else _REBUILT,
                copy_from_fb=False,
            )

        pages = limits.max_pages_per_request
        return [
            slot("qo_indptr", lambda bs, _: (bs + 1,), extra_rows=1),
            slot("kv_indptr", lambda bs, _: (bs + 1,), extra_rows=1),
            slot("kv_indices", lambda bs, _: (bs * pages,)),
            slot("kv_last_page_len", lambda bs, _: (bs,), extra_rows=0),
        ]

    def allocate_metadata(
        self, view: ForwardBatch, shape: GraphShape, buffers: Callable[[str], torch.Tensor]
    ) -> FlashInferMetadata:
        """Return the metadata of ``shape``, its tensors slices of the declared slots.

        Decode is captured, so its bounds are those of every replay. Extend runs eagerly: its bounds are
        the batch's own, from the lengths on the host, since what a GPU computes grows with them.
        """
        max_q_len, max_kv_len = 1, self.context.limits.max_context_len
        if not shape.mode.is_decode:
            max_q_len = int(_required(view.extend_seq_lens_cpu).max())
            max_kv_len = int(view.seq_lens_cpu.max())
        return FlashInferMetadata(
            out_cache_loc=view.out_cache_loc,
            qo_indptr=buffers("flashinfer.qo_indptr"),
            kv_indptr=buffers("flashinfer.kv_indptr"),
            kv_indices=buffers("flashinfer.kv_indices"),
            kv_last_page_len=buffers("flashinfer.kv_last_page_len"),
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
        )

    def fill_metadata(self, view: ForwardBatch, metadata: FlashInferMetadata) -> None:
        """Derive all four index tensors from lengths and request rows, on the device."""
        page_size = self.context.limits.page_size
        if view.forward_mode.is_decode:
            torch.arange(view.batch_size + 1, out=metadata.qo_indptr)
        else:
            _offsets(_required(view.extend_seq_lens), out=metadata.qo_indptr)
        _offsets((view.seq_lens + (page_size - 1)) // page_size, out=metadata.kv_indptr)
        metadata.kv_last_page_len.copy_((view.seq_lens - 1) % page_size + 1)
        pack_kv_indices(
            self.context.req_to_token,
            view.req_pool_indices,
            metadata.kv_indptr,
            page_size=page_size,
            out=metadata.kv_indices,
        )

    def metadata_in_graph(self, view: ForwardBatch, metadata: FlashInferMetadata) -> None:
        """Do the same as `fill_metadata`, which for decode is device work alone."""
        self.fill_metadata(view, metadata)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        metadata: FlashInferMetadata,
    ) -> torch.Tensor:
        """Write keys and values to their slots, then attend over the pages."""
        cache = self.context.kv_cache
        k_cache, v_cache = cache.k[layer.layer_id], cache.v[layer.layer_id]
        write_kv_cache(k, v, k_cache, v_cache, metadata.out_cache_loc)
        return paged_attention(
            q,
            k_cache,
            v_cache,
            qo_indptr=metadata.qo_indptr,
            kv_indptr=metadata.kv_indptr,
            kv_indices=metadata.kv_indices,
            kv_last_page_len=metadata.kv_last_page_len,
            page_size=self.context.limits.page_size,
            max_q_len=metadata.max_q_len,
            max_kv_len=metadata.max_kv_len,
            scaling=layer.scaling,
            sliding_window=layer.sliding_window,
            softcap=layer.softcap,
            sinks=layer.sinks,
        )


def _offsets(counts: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write ``[0, counts[0], counts[0] + counts[1], ...]`` into ``out``."""
    out[:1].zero_()
    torch.cumsum(counts, dim=0, dtype=out.dtype, out=out[1:])


def _required(lengths: torch.Tensor | None) -> torch.Tensor:
    if lengths is None:
        raise EngineError("an extend batch must carry extend_seq_lens and extend_seq_lens_cpu")
    return lengths
