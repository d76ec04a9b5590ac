"""Backends with SGLang's interface, for tests: right ones, planted public bugs, right ones in unusual style.

Six families, written only from SGLang's interface:

    PagedBackend      a page table, one set of buffers for all graphs; refreshed before a replay
    InGraphBackend    the same, refreshed by work that the graph records
    BlocksBackend     a table of blocks, for latents (MLA); offsets in a draft extend
    SlotsBackend      a list of KV slots with offsets; a mask over drafts
    ExpandedBackend   a row of the page table for each token
    DraftBackend      a backend for each step of a draft

`PLANTED` lists the bugs with their threads. Each bug is a subclass of a right backend, its twin. `UNUSUAL`
lists right backends in other styles that authors may choose.

Does not: contain code of SGLang.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphpact_adapters.sglang import Backends, PagedReads, Part

# -- page tables -----------------------------------------------------------------------------------------


@dataclass
class PagedMetadata:
    """What a paged attention kernel reads."""

    cache_seqlens_int32: torch.Tensor
    cu_seqlens_q: torch.Tensor
    page_table: torch.Tensor
    max_seq_len_q: int
    max_seq_len_k: int = 0

    def rows(self, requests: int) -> "PagedMetadata":
        """Return views of the first requests."""
        return type(self)(
            self.cache_seqlens_int32[:requests],
            self.cu_seqlens_q[: requests + 1],
            self.page_table[:requests],
            self.max_seq_len_q,
            self.max_seq_len_k,
        )


class PagedBackend:
    """The right backend of page tables."""

    def __init__(self, model_runner: Any) -> None:
        self.table: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self.page_size: int = model_runner.page_size
        self.context_len: int = model_runner.model_config.context_len
        self.num_draft_tokens: int | None = model_runner.server_args.speculative_num_draft_tokens
        self.num_steps: int = model_runner.server_args.speculative_num_steps or 0
        self.device = model_runner.device
        self.captured: dict[Any, Any] = {}
        self.memory: Any = None
        self.forward_metadata: Any = None

    # -- the interface ---------------------------------------------------------------------------

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padding row."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""
        self.memory = self.new(max_bs, max_num_tokens // max_bs)

    def init_forward_metadata(self, batch: Any) -> None:
        """Prepare an eager step, in new memory."""
        mode = batch.forward_mode
        metadata = self.new(batch.batch_size, self.width(batch))
        self.fill(metadata, batch)
        if mode.is_extend() and not mode.is_target_verify():
            counts = batch.extend_seq_lens
            metadata.cu_seqlens_q[1:] = counts.cumsum(0)
            metadata.max_seq_len_q = max(batch.extend_seq_lens_cpu)
        self.forward_metadata = metadata

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay."""
        if in_capture:
            self.captured[batch.batch_size] = self.memory.rows(batch.batch_size)
        self.forward_metadata = self.captured[batch.batch_size]
        self.refresh(self.forward_metadata, batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        """Record nothing."""

    # -- its work --------------------------------------------------------------------------------

    @property
    def columns(self) -> int:
        """Pages of the longest row of requests, drafts included."""
        return -(-self.table.shape[1] // self.page_size)

    def width(self, batch: Any) -> int:
        """Return the queries of each request."""
        speculates = batch.forward_mode.is_target_verify() or batch.forward_mode.is_draft_extend_v2()
        return self.num_draft_tokens if speculates and self.num_draft_tokens else 1

    def int32(self, *shape: int) -> torch.Tensor:
        """Return zeros on the device."""
        return torch.zeros(*shape, dtype=torch.int32, device=self.device)

    def new(self, requests: int, width: int) -> Any:
        """Return metadata in new memory."""
        offsets = torch.arange(requests + 1, dtype=torch.int32, device=self.device) * width
        table = self.int32(requests, self.columns)
        return PagedMetadata(self.int32(requests), offsets, table, width, self.table.shape[1])

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Bring captured metadata up to date."""
        del in_capture
        self.fill(metadata, batch)

    def fill(self, metadata: Any, batch: Any) -> None:
        """Write lengths and pages."""
        metadata.cache_seqlens_int32.copy_(self.keys(batch))
        metadata.page_table.copy_(self.pages(batch))

    def keys(self, batch: Any) -> torch.Tensor:
        """Return the keys of each request; a verify does not count its own tokens."""
        lens: torch.Tensor = batch.seq_lens[: batch.batch_size]
        return lens + self.width(batch) if batch.forward_mode.is_target_verify() else lens

    def pages(self, batch: Any) -> torch.Tensor:
        """Return the pages of each request."""
        rows = batch.req_pool_indices[: batch.batch_size]
        pages: torch.Tensor = self.table[rows, :: self.page_size] // self.page_size
        return pages


class ReboundAtReplay(PagedBackend):
    """Prepares replays like captures, in new memory, but the graph reads the memory of the capture."""

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a step in new memory."""
        metadata = self.new(batch.batch_size, self.width(batch))
        self.fill(metadata, batch)
        self.captured[batch.batch_size, in_capture] = self.forward_metadata = metadata


class TableNotPopulated(PagedBackend):
    """Binds the page table at a capture, and does not write it at replays."""

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Bring the lengths up to date."""
        if in_capture:
            self.fill(metadata, batch)
        metadata.cache_seqlens_int32.copy_(self.keys(batch))


class ColumnsOfTheLongest(PagedBackend):
    """Writes pages only up to the longest sequence of the batch before: later columns become stale."""

    longest = 0

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Write as many columns as the previous batch had."""
        del in_capture
        metadata.cache_seqlens_int32.copy_(self.keys(batch))
        longest = -(-int(self.keys(batch).max()) // self.page_size)
        columns = min(longest, self.longest) if self.longest else longest
        metadata.page_table[:, :columns].copy_(self.pages(batch)[:, :columns])
        self.longest = longest


class PrefixOnly(PagedBackend):
    """Counts only the prefix in a draft extend, although its kernel needs the new keys too."""

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Bring captured metadata up to date, without the new keys at a replay."""
        super().refresh(metadata, batch, in_capture=in_capture)
        if batch.forward_mode.is_draft_extend_v2() and not in_capture:
            metadata.cache_seqlens_int32.sub_(self.width(batch)).clamp_(min=1)


class SizedByContext(PagedBackend):
    """Sizes the table of its graphs by the context length, so drafts after it have no column."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.memory.page_table = self.int32(max_bs, -(-self.context_len // self.page_size))

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Write the columns that there are."""
        del in_capture
        metadata.cache_seqlens_int32.copy_(self.keys(batch))
        metadata.page_table.copy_(self.pages(batch)[:, : metadata.page_table.shape[1]])


class FilledByContext(PagedBackend):
    """Gives padding rows the context length, to capture for the longest; a verify adds drafts to it."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padding row."""
        return self.context_len


class LongestOfTheDummy(PagedBackend):
    """Bounds the kernel's keys by the sum of the lengths, which at a capture comes from a dummy."""

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Bring captured metadata up to date, with the most keys that the batch may have."""
        super().refresh(metadata, batch, in_capture=in_capture)
        metadata.max_seq_len_k = batch.seq_lens_sum


def read_bounded(metadata: PagedMetadata, batch: Any) -> PagedReads:
    """Return the reads of a kernel that is launched for at most that many keys."""
    tokens = len(batch.out_cache_loc)
    part = Part(
        seq_lens=metadata.cache_seqlens_int32,
        block_table=metadata.page_table,
        query_start_loc=metadata.cu_seqlens_q,
        num_tokens=tokens,
        max_query_len=metadata.max_seq_len_q,
        max_seq_len=metadata.max_seq_len_k,
    )
    return PagedReads((part,), batch.out_cache_loc, tokens)


# -- work in the graph -------------------------------------------------------------------------------------


class InGraphBackend(PagedBackend):
    """The right backend whose graph refreshes its metadata."""

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Leave the work to the graph."""

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        """Refresh captured metadata, only on the device."""
        self.fill(self.captured[batch.batch_size], batch)


class AsksTheHost(InGraphBackend):
    """Reads the longest sequence on the host inside the graph."""

    def pages(self, batch: Any) -> torch.Tensor:
        """Return the pages of the longest sequence, and zeros after them."""
        pages = super().pages(batch)
        longest = max(self.keys(batch).tolist())
        pages[:, -(-longest // self.page_size) :] = 0
        return pages


class FreshRaw(InGraphBackend):
    """Gives the graph a copy of the lengths, in new memory for each step."""

    raw: torch.Tensor | None = None

    def init_forward_metadata(self, batch: Any) -> None:
        """Prepare an eager step, without a copy."""
        self.raw = None
        super().init_forward_metadata(batch)

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Copy the inputs of the graph's work."""
        del metadata, in_capture
        self.raw = batch.seq_lens.to(torch.int32)

    def keys(self, batch: Any) -> torch.Tensor:
        """Return the keys from the copy."""
        if self.raw is None:
            return super().keys(batch)
        return self.raw + self.width(batch) if batch.forward_mode.is_target_verify() else self.raw


class MadeByTheWarmUp(InGraphBackend):
    """Makes lengths only once: the recorded run finds those of the warm-up, and records no work."""

    made: tuple[int, torch.Tensor] | None = None

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        """Write pages, and lengths if there are none."""
        metadata = self.captured[batch.batch_size]
        metadata.page_table.copy_(self.pages(batch))
        if self.made is None or self.made[0] != batch.batch_size:
            metadata.cache_seqlens_int32.copy_(self.keys(batch))
            self.made = batch.batch_size, metadata.cache_seqlens_int32


# -- tables of blocks ---------------------------------------------------------------------------------------


@dataclass
class BlocksMetadata:
    """What a kernel for latents reads."""

    block_kv_indices: torch.Tensor
    seq_lens_k: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None

    def rows(self, requests: int) -> "BlocksMetadata":
        """Return views of the first requests."""
        offsets = None if self.cu_seqlens_q is None else self.cu_seqlens_q[: requests + 1]
        return BlocksMetadata(self.block_kv_indices[:requests], self.seq_lens_k[:requests], offsets)


class BlocksBackend(PagedBackend):
    """The right backend of tables of blocks; its layers read another attribute."""

    forward_decode_metadata: Any = None

    def new(self, requests: int, width: int) -> Any:
        """Return metadata in new memory, with offsets where they may differ."""
        offsets = torch.arange(requests + 1, dtype=torch.int32, device=self.device) * width
        table = self.int32(requests, self.columns).fill_(-1)
        return BlocksMetadata(table, self.int32(requests), offsets if width > 1 else None)

    def init_forward_metadata(self, batch: Any) -> None:
        """Prepare an eager step."""
        super().init_forward_metadata(batch)
        self.forward_decode_metadata = self.forward_metadata

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay."""
        super().init_forward_metadata_out_graph(batch, in_capture=in_capture)
        self.forward_decode_metadata = self.forward_metadata

    def fill(self, metadata: Any, batch: Any) -> None:
        """Write lengths and blocks; there are no blocks after the last key."""
        keys, pages = self.keys(batch), self.pages(batch)
        metadata.seq_lens_k.copy_(keys)
        first = torch.arange(self.columns, device=self.device) * self.page_size
        metadata.block_kv_indices.copy_(torch.where(first < keys[:, None], pages, -1))


class PackedOffsets(BlocksBackend):
    """Packs the queries of a draft extend by accepted tokens, although the runner's have a uniform stride."""

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Bring captured metadata up to date, with other offsets at a replay."""
        super().refresh(metadata, batch, in_capture=in_capture)
        if batch.forward_mode.is_draft_extend_v2() and not in_capture:
            counts = batch.spec_info.num_accept_tokens[: batch.batch_size]
            metadata.cu_seqlens_q[1:].copy_(counts.cumsum(0))


# -- lists of KV slots ---------------------------------------------------------------------------------------


@dataclass
class SlotsMetadata:
    """What a kernel over a list of KV slots reads; with offsets of queries the list is the prefix."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    qo_indptr: torch.Tensor | None = None
    custom_mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    max_extend_len: int | None = None


class SlotsBackend(PagedBackend):
    """The right backend of lists of KV slots."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""
        width, keys = max_num_tokens // max_bs, self.table.shape[1]
        self.kv_indptr, self.qo_indptr = self.int32(max_bs + 1), self.int32(max_bs + 1)
        self.kv_indices = self.int32(max_bs * keys).long()
        self.custom_mask = self.int32(max_num_tokens * (keys + width)).to(torch.uint8)
        self.mask_indptr = self.int32(max_bs + 1).long()

    def init_forward_metadata(self, batch: Any) -> None:
        """Prepare an eager step, in new memory."""
        bs, tokens = batch.batch_size, len(batch.input_ids)
        spare = type(self).__new__(type(self))
        spare.__dict__.update(vars(self))
        spare.init_cuda_graph_state(bs, max(tokens, bs))
        self.forward_metadata = spare.metadata_of(batch)
        spare.write(self.forward_metadata, batch)

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay; layers keep the object of the capture."""
        if in_capture:
            self.captured[batch.batch_size] = self.metadata_of(batch)
        self.write(self.captured[batch.batch_size], batch)
        if in_capture:
            self.forward_metadata = self.captured[batch.batch_size]

    def metadata_of(self, batch: Any) -> SlotsMetadata:
        """Return metadata over the backend's memory."""
        bs, mode = batch.batch_size, batch.forward_mode
        metadata = SlotsMetadata(self.kv_indptr[: bs + 1], self.kv_indices)
        if mode.is_extend(include_draft_extend_v2=True):
            metadata.qo_indptr = self.qo_indptr[: bs + 1]
            metadata.max_extend_len = max(batch.extend_seq_lens_cpu)
        if mode.is_target_verify():
            metadata.custom_mask, metadata.mask_indptr = self.custom_mask, self.mask_indptr[: bs + 1]
        return metadata

    def write(self, metadata: SlotsMetadata, batch: Any) -> None:
        """Write offsets, slots and mask."""
        bs, mode = batch.batch_size, batch.forward_mode
        lens = batch.seq_lens[:bs]
        counts = batch.extend_seq_lens[:bs].long()
        if mode.is_extend(include_draft_extend_v2=True) and not mode.is_target_verify():
            lens = (lens - counts).clamp(min=0)
        metadata.kv_indptr[1:].copy_(lens.cumsum(0))
        self.write_slots(metadata, batch, lens)
        if metadata.qo_indptr is not None:
            stride = self.stride(batch)
            ends = counts.cumsum(0) if stride is None else torch.arange(1, bs + 1) * stride
            metadata.qo_indptr[1:].copy_(ends)
        if mode.is_target_verify():
            self.write_mask(metadata, batch, lens)

    def write_slots(self, metadata: SlotsMetadata, batch: Any, lens: torch.Tensor) -> None:
        """Write the KV slots of each request, one after the other."""
        rows = zip(batch.req_pool_indices.tolist(), lens.tolist(), strict=False)
        flat = torch.cat([self.table[row, :count] for row, count in rows])
        metadata.kv_indices[: len(flat)].copy_(flat)

    def stride(self, batch: Any) -> int | None:
        """Return the stride between the first queries of two requests; None to use the numbers of queries."""
        return None if batch.forward_mode.is_extend() else self.num_draft_tokens

    def write_mask(self, metadata: SlotsMetadata, batch: Any, lens: torch.Tensor) -> None:
        """Copy the mask of live requests: bytes of padding rows may be anything."""
        assert metadata.mask_indptr is not None
        width = batch.spec_info.draft_token_num
        metadata.mask_indptr[1:].copy_((width * (lens + width)).cumsum(0))
        mask = batch.spec_info.custom_mask
        size = min(len(mask), len(self.custom_mask))
        self.custom_mask[:size].copy_(mask[:size])


class StrideOfTheSteps(SlotsBackend):
    """Assumes in graphs that a request has one token more than steps; with branches it has more."""

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay, with other offsets for a draft extend."""
        super().init_forward_metadata_out_graph(batch, in_capture=in_capture)
        if batch.forward_mode.is_draft_extend_v2():
            bs = batch.batch_size
            self.qo_indptr[: bs + 1].copy_(torch.arange(bs + 1) * (self.num_steps + 1))


class MaskOfTheCapture(SlotsBackend):
    """Keeps the mask of the capture, which shows all keys; a replay's mask is another tensor."""

    def metadata_of(self, batch: Any) -> SlotsMetadata:
        """Return metadata with the mask of the batch."""
        metadata = super().metadata_of(batch)
        if batch.forward_mode.is_target_verify():
            metadata.custom_mask = batch.spec_info.custom_mask
        return metadata


class SlotsOfTheDummy(SlotsBackend):
    """Writes as many slots as the sum of lengths at the capture."""

    sums: dict[int, int]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.sums = {}

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay; later slots are not written."""
        bs, before = batch.batch_size, self.kv_indices.clone()
        if in_capture:
            self.sums[bs] = batch.seq_lens_sum
        super().init_forward_metadata_out_graph(batch, in_capture=in_capture)
        self.kv_indices[self.sums[bs] :].copy_(before[self.sums[bs] :])


# -- a row for each token ------------------------------------------------------------------------------------


class ExpandedBackend(PagedBackend):
    """The right backend that gives each token of a request a separate row."""

    def new(self, requests: int, width: int) -> Any:
        """Return metadata in new memory, with a row for each token."""
        rows = requests * width
        offsets = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        return PagedMetadata(self.int32(rows), offsets, self.int32(rows, self.columns), 1)

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay."""
        rows = batch.batch_size * self.width(batch)
        if in_capture:
            self.captured[batch.batch_size] = self.memory.rows(rows)
        self.forward_metadata = self.captured[batch.batch_size]
        self.fill(self.forward_metadata, batch)

    def keys(self, batch: Any) -> torch.Tensor:
        """Return the keys of each token, at least 0 in padding rows."""
        width = self.width(batch)
        before = torch.arange(width - 1, -1, -1, device=self.device)
        return self.bounded((super().keys(batch)[:, None] - before).flatten())

    def bounded(self, keys: torch.Tensor) -> torch.Tensor:
        """Return lengths that a kernel accepts."""
        return keys.clamp(min=0)

    def pages(self, batch: Any) -> torch.Tensor:
        """Return the pages of each token."""
        return super().pages(batch).repeat_interleave(self.width(batch), 0)


class NegativePadding(ExpandedBackend):
    """Subtracts from the length of a padding row too, which is 1."""

    def bounded(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the lengths as they are."""
        return keys


# -- several steps -------------------------------------------------------------------------------------------


class StepBackend(PagedBackend):
    """One step of a draft. Its keys are those of the sequence, and of the draft up to this step."""

    def __init__(self, model_runner: Any, step: int) -> None:
        super().__init__(model_runner)
        self.step = step

    def keys(self, batch: Any) -> torch.Tensor:
        """Return the keys of each request in this step."""
        lens: torch.Tensor = batch.seq_lens[: batch.batch_size]
        return lens + self.step + 1


class DraftBackend:
    """The right backend of a draft of several steps."""

    step: type[StepBackend] = StepBackend

    def __init__(self, model_runner: Any) -> None:
        steps = model_runner.server_args.speculative_num_steps - 1
        self.attn_backends = [self.step(model_runner, at) for at in range(steps)]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read, for each step."""
        for each in self.attn_backends:
            each.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, batch: Any) -> None:
        """Prepare an eager draft."""
        for each in self.attn_backends:
            each.init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay."""
        for each in self.attn_backends:
            each.init_forward_metadata_out_graph(batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        """Record the work of each step."""
        for each in self.attn_backends:
            each.init_forward_metadata_in_graph(batch)


class CommittedStep(StepBackend):
    """Counts in a replay only the tokens committed before the draft."""

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Bring captured metadata up to date."""
        super().refresh(metadata, batch, in_capture=in_capture)
        if not in_capture:
            metadata.cache_seqlens_int32.copy_(batch.seq_lens[: batch.batch_size])


class CommittedLengths(DraftBackend):
    """Has the committed lengths in every step."""

    step = CommittedStep


class SharedLengths(DraftBackend):
    """Lets all steps write one buffer of lengths, so the last write wins."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        first = self.attn_backends[0].memory
        for each in self.attn_backends:
            each.memory.cache_seqlens_int32 = first.cache_seqlens_int32


# -- right backends in unusual style -------------------------------------------------------------------------


class PlainTuple(NamedTuple):
    """Metadata as a tuple."""

    lens: torch.Tensor
    table: torch.Tensor
    offsets: torch.Tensor


class TupleBackend(PagedBackend):
    """Keeps tuples, but none after a replay: its layers read the captured one."""

    def init_forward_metadata(self, batch: Any) -> None:
        """Prepare an eager step."""
        super().init_forward_metadata(batch)
        self.forward_metadata = self.tuple_of(self.forward_metadata)

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay."""
        super().init_forward_metadata_out_graph(batch, in_capture=in_capture)
        self.forward_metadata = self.tuple_of(self.forward_metadata) if in_capture else None

    @staticmethod
    def tuple_of(metadata: PagedMetadata) -> PlainTuple:
        """Return a tuple."""
        return PlainTuple(metadata.cache_seqlens_int32, metadata.page_table, metadata.cu_seqlens_q)


def read_tuple(metadata: PlainTuple, batch: Any) -> PagedReads:
    """Return the reads of a tuple."""
    tokens = len(batch.out_cache_loc)
    part = Part(
        seq_lens=metadata.lens,
        block_table=metadata.table,
        query_start_loc=metadata.offsets,
        num_tokens=tokens,
    )
    return PagedReads((part,), batch.out_cache_loc, tokens)


class ShorterViews(SlotsBackend):
    """Makes a new object in each step, with a view of as many slots as the batch has."""

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay."""
        del in_capture
        metadata = self.metadata_of(batch)
        self.write(metadata, batch)
        metadata.kv_indices = self.kv_indices[: batch.seq_lens_sum]
        self.forward_metadata = metadata


class RawThenFull(PagedBackend):
    """Prepares a raw copy of the batch; the graph makes metadata from it, in its own memory."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the raw copy."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.raw = {name: self.int32(max_bs).long() for name in ("seq_lens", "req_pool_indices")}

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Copy the batch."""
        del in_capture
        for name, value in self.raw.items():
            value[: batch.batch_size].copy_(getattr(batch, name)[: batch.batch_size])
        self.forward_metadata = self.raw

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        """Make metadata from the copy; this is possible only once for each copy."""
        if self.forward_metadata is not self.raw:
            raise AssertionError("metadata was made already")
        metadata = self.new(batch.batch_size, self.width(batch))
        bs, verifies = batch.batch_size, batch.forward_mode.is_target_verify()
        metadata.cache_seqlens_int32.copy_(self.raw["seq_lens"][:bs] + self.width(batch) * verifies)
        rows = self.raw["req_pool_indices"][:bs]
        metadata.page_table.copy_(self.table[rows, :: self.page_size] // self.page_size)
        self.forward_metadata = metadata

    def on_after_cuda_graph_warmup(self) -> None:
        """Restore the raw copy."""
        self.forward_metadata = self.raw


class PairBackend(PagedBackend):
    """Has the two methods of earlier releases, with the parts of a batch."""

    init_forward_metadata_out_graph: Any = property()
    init_forward_metadata_in_graph: Any = property()

    def init_forward_metadata_capture_cuda_graph(
        self, bs: int, num_tokens: int, rows: Any, lens: Any, encoder_lens: Any, mode: Any, spec_info: Any
    ) -> None:
        """Prepare a capture."""
        del encoder_lens, spec_info
        self.captured[bs] = self.memory.rows(bs)
        self.forward_metadata = self.captured[bs]
        self.fill_parts(bs, rows, lens, num_tokens // bs if mode.is_target_verify() else 0)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        rows: Any,
        lens: Any,
        lens_sum: int,
        encoder_lens: Any,
        mode: Any,
        spec_info: Any,
        lens_cpu: Any,
    ) -> None:
        """Prepare a replay."""
        del lens_sum, encoder_lens, spec_info, lens_cpu
        self.forward_metadata = self.captured[bs]
        self.fill_parts(bs, rows, lens, (self.num_draft_tokens or 0) if mode.is_target_verify() else 0)

    def fill_parts(self, bs: int, rows: Any, lens: Any, more: int) -> None:
        """Write lengths and pages."""
        metadata = self.forward_metadata
        metadata.cache_seqlens_int32.copy_(lens[:bs] + more)
        metadata.page_table.copy_(self.table[rows[:bs], :: self.page_size] // self.page_size)


class EngineBase:
    """The part of SGLang 0.5.23's base class that matters here: two methods that do nothing."""

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        """Do nothing."""

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        """Do nothing."""


class UncalledPair(EngineBase, PairBackend):
    """Extends the base class, and prepares its graphs in the pair of earlier releases: not called."""


class PairForEarlierReleases(InGraphBackend, PairBackend):
    """Has the pair in addition to methods that do the work, which is right."""

    init_forward_metadata_out_graph = InGraphBackend.init_forward_metadata_out_graph
    init_forward_metadata_in_graph = InGraphBackend.init_forward_metadata_in_graph


class DraftWithLastStep(DraftBackend):
    """Has a backend for the last step too, which does not attend."""

    def __init__(self, model_runner: Any) -> None:
        steps = model_runner.server_args.speculative_num_steps
        self.attn_backends = [self.step(model_runner, at) for at in range(steps)]


class DraftOfTooFew(DraftBackend):
    """Has one step backend fewer than a draft reads."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.attn_backends.pop()


class DecodeGraphsOnly(PagedBackend):
    """Has only decode graphs, like a backend for a new device, and is right in all eager steps."""

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay of a decode."""
        if not batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError("graphs are for decode only")
        super().init_forward_metadata_out_graph(batch, in_capture=in_capture)


@functools.cache
def pool(owner: int, rows: int, columns: int) -> torch.Tensor:
    """Return memory that lives as long as the module."""
    del owner
    return torch.zeros(rows, columns, dtype=torch.int32)


class PooledBackend(PagedBackend):
    """Keeps the table of its graphs in a cache of the module, and gives padding rows the draft's length."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padding row."""
        return max(1, self.num_draft_tokens or 1)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.memory.page_table = pool(id(self), max_bs, self.columns)


class PinnedStaging(PagedBackend):
    """Makes lengths on the host, and copies them from memory that it keeps."""

    staging: torch.Tensor | None = None

    def keys(self, batch: Any) -> torch.Tensor:
        """Return the keys from the host's lengths."""
        lens = batch.seq_lens_cpu[: batch.batch_size].to(torch.int32)
        if self.staging is None or len(self.staging) < len(lens):
            self.staging = torch.zeros(len(lens), dtype=torch.int32)
        staged = self.staging[: len(lens)]
        staged.copy_(lens)
        return staged + self.width(batch) if batch.forward_mode.is_target_verify() else staged


# -- the tables ----------------------------------------------------------------------------------------------

LANES = {
    "decode": "decode-page16-gqa-float32",
    "verify": "target_verify-page16-gqa-float32",
    "draft_extend": "draft_extend-page16-gqa-float32",
    "draft": "draft_decode-page16-gqa-float32",
    "verify_slots": "target_verify-page1-gqa-float32",
    "latent_draft_extend": "draft_extend-page16-mla-float32",
}
"""Lanes of a quick run, by a short name."""


@dataclass(frozen=True)
class Planted:
    """A planted bug.

    Args:
        make: The backend with the bug.
        twin: The right backend.
        thread: The public thread about the bug.
        rule: The rule that it breaks.
        field: The beginning of the finding's field.
        lane: The name in `LANES` of the lane that shows it.
        read: The reader of both; None for the adapter's reader.
        options: Options of the adapter.
    """

    make: type[Any]
    twin: type[Any]
    thread: str
    rule: str
    field: str
    lane: str = "decode"
    read: Callable[..., Any] | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.make.__name__

    def subject(self) -> Backends:
        """Return what is checked: the bug under the adapter."""
        return under_test(self.make, self.read, **dict(self.options))


def under_test(make: type[Any], read: Callable[..., Any] | None = None, **options: Any) -> Backends:
    """Return a backend class under the adapter."""
    reader: dict[str, Any] = {} if read is None else {"read": read}
    return Backends(make, **options, **reader)


_LATENT = (("kind", "mla"),)
_TREES = (("trees", True),)
_SLOTS = (("page_sizes", (1,)),)
_SGLANG = "sgl-project/sglang"

PLANTED = (
    Planted(ReboundAtReplay, PagedBackend, f"{_SGLANG}#26019", "GP01", "cache_seqlens_int32"),
    Planted(TableNotPopulated, PagedBackend, f"{_SGLANG}#26019, in review", "GP02", "page_table"),
    Planted(ColumnsOfTheLongest, PagedBackend, "no thread", "GP02", "page_table"),
    Planted(
        PrefixOnly,
        PagedBackend,
        f"{_SGLANG}, KNOWN_FAILURES.md C.3",
        "GP02",
        "cache_seqlens_int32",
        lane="draft_extend",
    ),
    Planted(SizedByContext, PagedBackend, f"{_SGLANG}#29695", "GP13", "page_table", lane="verify"),
    Planted(
        FilledByContext, PagedBackend, f"{_SGLANG}#1469", "GP13", "", lane="verify_slots", options=_SLOTS
    ),
    Planted(
        LongestOfTheDummy,
        PagedBackend,
        f"{_SGLANG}#26019, in review",
        "GP08",
        "max_seq_len",
        read=read_bounded,
    ),
    Planted(AsksTheHost, InGraphBackend, f"{_SGLANG}#29413", "GP20", ""),
    Planted(FreshRaw, InGraphBackend, f"{_SGLANG}#27664", "GP02", "cache_seqlens_int32"),
    Planted(MadeByTheWarmUp, InGraphBackend, f"{_SGLANG}#38994", "GP02", "cache_seqlens_int32"),
    Planted(
        PackedOffsets,
        BlocksBackend,
        f"{_SGLANG}#21987",
        "GP02",
        "cu_seqlens_q",
        lane="latent_draft_extend",
        options=_LATENT,
    ),
    Planted(
        StrideOfTheSteps,
        SlotsBackend,
        f"{_SGLANG}#27545",
        "GP02",
        "qo_indptr",
        lane="draft_extend",
        options=_TREES,
    ),
    Planted(MaskOfTheCapture, SlotsBackend, f"{_SGLANG}#19741", "GP13", "custom_mask", lane="verify"),
    Planted(SlotsOfTheDummy, SlotsBackend, f"{_SGLANG}#1789", "GP03", "kv_indices"),
    Planted(
        NegativePadding,
        ExpandedBackend,
        f"{_SGLANG}#31270",
        "GP04",
        "cache_seqlens_int32[",
        lane="draft_extend",
    ),
    Planted(CommittedLengths, DraftBackend, f"{_SGLANG}#24750", "GP02", "cache_seqlens_int32", "draft"),
    Planted(
        SharedLengths,
        DraftBackend,
        f"{_SGLANG}#26239",
        "GP02",
        "draft step 0: cache_seqlens_int32",
        "draft",
    ),
)
"""The planted bugs."""

UNUSUAL = (
    (TupleBackend, read_tuple),
    (ShorterViews, None),
    (RawThenFull, None),
    (PairBackend, None),
    (PooledBackend, None),
    (PinnedStaging, None),
)
"""Right backends in unusual style, each with its reader."""
