"""Right attention backends that keep their metadata in ten styles, over the same kernel."""

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from graphpact_sglang.attention.paged import AttentionRows, PagedAttnBackend, PagedMetadata


class NewObject(PagedAttnBackend):
    """A new metadata object in every step, with views of the same memory."""


class ObjectOfASize(PagedAttnBackend):
    """One metadata object for each captured size, refreshed in place, as FlashAttention's backend."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.captured: dict[int, Any] = {}

    def fill_graph_metadata(self, rows: AttentionRows) -> None:
        """Fill the graph's tensors."""
        super().fill_graph_metadata(rows)
        self.forward_metadata = self.captured.setdefault(len(rows.kv_lens), self.forward_metadata)


class _Other(PagedAttnBackend):
    """Metadata of another kind in graphs."""

    def other(self, metadata: PagedMetadata) -> Any:
        """Return ``metadata`` as this backend keeps it."""
        raise NotImplementedError

    def fill_graph_metadata(self, rows: AttentionRows) -> None:
        """Fill the graph's tensors."""
        super().fill_graph_metadata(rows)
        assert self.forward_metadata is not None
        self.forward_metadata = self.other(self.forward_metadata)


class TupleMetadata(NamedTuple):
    """`PagedMetadata` as a named tuple."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    max_q_len: int
    mask: torch.Tensor | None
    window_mask: torch.Tensor | None
    mask_indptr: torch.Tensor | None


class Tuples(_Other):
    """A named tuple."""

    def other(self, metadata: PagedMetadata) -> Any:
        """Return a tuple."""
        return TupleMetadata(**vars(metadata))


class Namespaces(_Other):
    """A namespace, as many scripts have it."""

    def other(self, metadata: PagedMetadata) -> Any:
        """Return a namespace."""
        return SimpleNamespace(**vars(metadata))


class OwnCopies(_Other):
    """Copies for the host's use, beside the memory that the graph reads."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:  # noqa: FBT001, FBT002
        """Prepare a capture or a replay."""
        self.is_capture = in_capture
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def other(self, metadata: PagedMetadata) -> Any:
        """Return copies at replay."""
        if self.is_capture:
            return metadata
        return dataclasses.replace(metadata, kv_indptr=metadata.kv_indptr.clone())


class ShorterViews(_Other):
    """Views that are as long as the keys of the step."""

    def other(self, metadata: PagedMetadata) -> Any:
        """Return views without the unused rest."""
        used = int(metadata.kv_indptr[-1])
        return dataclasses.replace(metadata, kv_indices=metadata.kv_indices[: max(used, 512)])


@dataclasses.dataclass
class CountedMetadata(PagedMetadata):
    """Metadata with numbers that no kernel reads.

    Args:
        step: How many steps were prepared.
        longest: The most keys of a request.
    """

    step: int = 0
    longest: int = 0


class Counters(PagedAttnBackend):
    """Host numbers that change in every step, and that no kernel reads."""

    prepared = 0

    def fill_graph_metadata(self, rows: AttentionRows) -> None:
        """Fill the graph's tensors."""
        super().fill_graph_metadata(rows)
        self.prepared += 1
        self.forward_metadata = CountedMetadata(
            **vars(self.forward_metadata), step=self.prepared, longest=int(rows.kv_lens.max())
        )


class InGraph(PagedAttnBackend):
    """A part of the metadata is written by the graph itself."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Write the offsets of the queries."""
        assert self.forward_metadata is not None
        offsets = self.forward_metadata.qo_indptr
        torch.arange(forward_batch.batch_size + 1, dtype=offsets.dtype, out=offsets)


class Attributes(PagedAttnBackend):
    """No metadata object: the kernel's tensors are attributes of the backend."""

    rows_of: int | None = None

    def fill_graph_metadata(self, rows: AttentionRows) -> None:
        """Fill the graph's tensors."""
        super().fill_graph_metadata(rows)
        self.rows_of, self.forward_metadata = len(rows.kv_lens), None

    def make_metadata(self, rows: AttentionRows) -> None:
        """Make metadata for an eager step."""
        super().make_metadata(rows)
        self.rows_of = None

    def forward_extend(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend with the attributes."""
        if self.rows_of is None:
            return super().forward_extend(q, *args, **kwargs)
        bs, self.forward_metadata = self.rows_of, None
        self.forward_metadata = PagedMetadata(
            self.graph_qo_indptr[: bs + 1],
            self.graph_kv_indptr[: bs + 1],
            self.graph_kv_indices,
            self.graph_kv_last_page_len[:bs],
            max_q_len=1,
        )
        try:
            return super().forward_extend(q, *args, **kwargs)
        finally:
            self.forward_metadata = None

    forward_decode = forward_extend


class Wrapper(AttentionBackend):
    """A backend around another one, as for models with several kinds of attention."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.inner = PagedAttnBackend(model_runner)
        self.token_to_kv_pool = self.inner.token_to_kv_pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of an eager step."""
        self.inner.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:  # noqa: FBT001, FBT002
        """Prepare a capture or a replay."""
        self.inner.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""
        self.inner.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padding row."""
        return 1

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend."""
        return self.inner.forward_extend(*args, **kwargs)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend."""
        return self.inner.forward_decode(*args, **kwargs)

    def support_triton(self) -> bool:
        """Return whether SGLang may prepare this backend's batches with Triton."""
        return False


STYLES: tuple[type[AttentionBackend], ...] = (
    NewObject,
    ObjectOfASize,
    Tuples,
    Namespaces,
    OwnCopies,
    ShorterViews,
    Counters,
    InGraph,
    Attributes,
    Wrapper,
)
