"""Builders with vLLM's interface, for tests: right ones, planted public bugs, right ones in unusual style.

Five families, written only from vLLM's interface:

    PagedBuilder       refers to the buffers that the runner lends
    OwnedBuilder       copies lengths and block table into its own buffers
    SplitBuilder       separates decodes and prefills, for latents (MLA)
    ScheduledBuilder   tiles of a scheduler, in its own buffer; its reader models the kernel
    PlannedBuilder     pages as offsets, indices and entries of the last page; its reader models the kernel

`PLANTED` lists the bugs with their threads. Each bug is a subclass of a right builder, its twin. `UNUSUAL`
lists right builders in other styles that authors may choose.

Does not: contain code of vLLM.
"""

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from graphpact.attention import KVBuffers, LayerSpec
from graphpact.errors import KernelRefusal
from graphpact_adapters.vllm import Builders, CommonAttentionMetadata, PagedReads, Part
from graphpact_kernels import define_kernel


class AttentionCGSupport(enum.Enum):
    """Which batches a backend can run in a full graph; values as in vLLM."""

    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


# -- page tables ----------------------------------------------------------------------------------------


@dataclass
class PagedMetadata:
    """What a paged attention kernel reads."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True


class PagedBuilder:
    """The right builder of paged metadata: it refers to the runner's own buffers."""

    support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.block_size: int = kv_cache_spec.block_size
        self.layer_names = layer_names
        self.device = device
        self.max_reqs: int = vllm_config.scheduler_config.max_num_seqs
        self.max_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.max_blocks = -(-self.max_model_len // self.block_size)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the declared support."""
        del vllm_config, kv_cache_spec
        return cls.support

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return the metadata of a step."""
        return PagedMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )

    def build(
        self,
        common_prefix_len: int,
        common: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Return the metadata of a step."""
        del common_prefix_len, fast_build
        return self.metadata(common)

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Any:
        """Return the metadata that a graph keeps."""
        return self.build(0, common)

    def int32(self, *shape: int) -> torch.Tensor:
        """Return zeros on the device, for a buffer of the builder's own."""
        return torch.zeros(*shape, dtype=torch.int32, device=self.device)


def host_lens(common: CommonAttentionMetadata) -> torch.Tensor:
    """Return the lengths on the host, which after speculation are upper bounds."""
    assert common.seq_lens_cpu_upper_bound is not None
    return common.seq_lens_cpu_upper_bound


class OwnedBuilder(PagedBuilder):
    """Copies lengths and block table, for a kernel that needs its own layout of them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seq_lens = self.int32(self.max_reqs)
        self.block_table = self.int32(self.max_reqs, self.max_blocks)

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata in the builder's own buffers; every build writes their rows."""
        metadata = super().metadata(common)
        reqs = common.num_reqs
        self.seq_lens[:reqs].copy_(common.seq_lens)
        self.block_table[:reqs].copy_(common.block_table_tensor)
        metadata.seq_lens, metadata.block_table = self.seq_lens[:reqs], self.block_table[:reqs]
        return metadata


class FreshLengths(PagedBuilder):
    """Casts lengths to the kernel's dtype: a new tensor in every build."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with lengths in new memory."""
        metadata = super().metadata(common)
        metadata.seq_lens = common.seq_lens.long().to(torch.int32)
        return metadata


class ClearsHostOffsets(PagedBuilder):
    """Clears the offsets on the host at a capture, so that later builders divide by a query length of 0."""

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Any:
        """Return the metadata of a capture, and clear the offsets that other builders read."""
        metadata = self.build(0, common)
        common.query_start_loc_cpu.zero_()
        return metadata


class ZeroesOffsets(PagedBuilder):
    """Zeroes the offsets at a capture, for a kernel that is slow with long dummies."""

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Any:
        """Return the metadata of a capture, with the runner's own offsets zeroed."""
        metadata = self.build(0, common)
        metadata.query_start_loc.zero_()
        return metadata


class SharedBuffers(OwnedBuilder):
    """Shares its buffers with the builders of other KV-cache groups, which overwrite them."""

    shared: ClassVar[dict[tuple[int, int], torch.Tensor]] = {}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.block_table = self.shared.setdefault((self.max_reqs, self.max_blocks), self.block_table)


class CachedByCounts(OwnedBuilder):
    """Keeps metadata by the number of requests, and brings only the block table up to date."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cached: dict[tuple[int, int], Any] = {}

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return kept metadata for a batch with the same counts."""
        key = common.num_reqs, common.num_actual_tokens
        if key not in self.cached:
            self.cached[key] = super().metadata(common)
        self.block_table[: common.num_reqs].copy_(common.block_table_tensor)
        return self.cached[key]


class LongestOfTheDummy(PagedBuilder):
    """Bounds the kernel's keys by the lengths of the batch, which are short in a dummy."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with the longest sequence of this batch."""
        metadata = super().metadata(common)
        metadata.max_seq_len = int(host_lens(common).max())
        return metadata


class RaggedOffsetsOfTheDummy(PagedBuilder):
    """Declares graphs of all batches, but keeps the capture's offsets, right only for decodes."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with a copy of the offsets."""
        metadata = super().metadata(common)
        metadata.query_start_loc = common.query_start_loc.clone()
        return metadata


class FastPath(OwnedBuilder):
    """Skips its own buffers for sequences shorter than the full length, which only dummies have."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return the runner's own buffers on the fast path, and else the builder's."""
        is_fast = common.max_seq_len < self.max_model_len
        of = PagedBuilder if is_fast else OwnedBuilder
        return of.metadata(self, common)


class GrowsForLargerBatches(OwnedBuilder):
    """Allocates new buffers when a batch is larger than any before it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seq_lens = self.int32(0)

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata in buffers that are large enough for this batch."""
        longest = int(common.seq_lens.max()) if common.num_reqs else 0
        if common.num_reqs * longest > len(self.seq_lens):
            self.seq_lens = self.int32(common.num_reqs * longest)
        return super().metadata(common)


class UpperBoundsAsLengths(OwnedBuilder):
    """Takes lengths from the host, where they are upper bounds after speculation."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with the host's numbers."""
        metadata = super().metadata(common)
        bound = host_lens(common)
        self.seq_lens[: len(bound)].copy_(bound)
        return metadata


class OwnSlots(PagedBuilder):
    """Copies the slot mapping, which its kernel takes from the metadata."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.slots = torch.full((self.max_tokens,), -1, dtype=torch.int64, device=self.device)

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with the builder's own slots, which are -1 for padding tokens."""
        metadata = super().metadata(common)
        self.slots[: common.num_actual_tokens].copy_(common.slot_mapping)
        metadata.slot_mapping = self.slots[: common.num_actual_tokens]
        return metadata


class StaleSlots(OwnSlots):
    """Writes only the slots of live tokens, so padding tokens write to slots of an earlier batch."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata whose padding tokens keep earlier slots."""
        metadata = PagedBuilder.metadata(self, common)
        live = int(common.query_start_loc_cpu[-1])
        self.slots[:live].copy_(common.slot_mapping[:live])
        metadata.slot_mapping = self.slots[: common.num_actual_tokens]
        return metadata


def read_with_own_slots(metadata: PagedMetadata, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the reads of a kernel that takes slots from the metadata."""
    del slot_mapping
    part = Part(
        seq_lens=metadata.seq_lens,
        block_table=metadata.block_table,
        query_start_loc=metadata.query_start_loc,
        num_tokens=metadata.num_actual_tokens,
        max_query_len=metadata.max_query_len,
    )
    return PagedReads((part,), metadata.slot_mapping, metadata.num_actual_tokens)


# -- decodes and prefills apart ----------------------------------------------------------------------------


@dataclass
class DecodeMetadata:
    """What a decode kernel reads; all requests have equally many queries."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor


@dataclass
class SplitMetadata:
    """Decodes first, then prefills."""

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    decode: DecodeMetadata | None
    causal: bool = True


class SplitBuilder(PagedBuilder):
    """The right builder of split metadata, for latents; verified drafts are decodes."""

    support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        speculation = args[2].speculative_config
        self.threshold = 1 + (speculation.num_speculative_tokens if speculation is not None else 0)

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with all requests as decodes, if none has more queries than a verified draft."""
        decodes = common.num_reqs if common.max_query_len <= self.threshold else 0
        decode = self.decode_of(common) if decodes else None
        return SplitMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=decodes,
            num_decode_tokens=common.num_actual_tokens if decodes else 0,
            num_prefills=common.num_reqs - decodes,
            decode=decode,
        )

    def decode_of(self, common: CommonAttentionMetadata) -> DecodeMetadata:
        """Return the metadata of decodes."""
        return DecodeMetadata(common.block_table_tensor, common.seq_lens)


class ExpandedBuilder(SplitBuilder):
    """Gives each verified token a separate row, for a kernel that decodes one token in each row."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rows = self.rows()
        self.seq_lens, self.block_table = self.int32(rows), self.int32(rows, self.max_blocks)

    def rows(self) -> int:
        """Return the most rows: the tokens of a step."""
        return self.max_tokens

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with a decode for each token."""
        metadata = super().metadata(common)
        metadata.num_decodes = metadata.num_decode_tokens
        return metadata

    def decode_of(self, common: CommonAttentionMetadata) -> DecodeMetadata:
        """Return the metadata of one-token decodes: token ``t`` of ``n`` sees ``n - 1 - t`` fewer keys."""
        tokens = common.num_actual_tokens
        width = tokens // common.num_reqs
        back = torch.arange(width - 1, -1, -1, dtype=torch.int32, device=self.device)
        lens = (common.seq_lens[:, None] - back).clamp_(min=0).flatten()
        self.seq_lens[:tokens].copy_(lens)
        self.block_table[:tokens].copy_(common.block_table_tensor.repeat_interleave(width, 0))
        return DecodeMetadata(self.block_table[:tokens], self.seq_lens[:tokens])


class SizedByRequests(ExpandedBuilder):
    """Has a row for each request, but speculation needs one for each token."""

    def rows(self) -> int:
        """Return the number of requests."""
        return self.max_reqs


class NegativePadding(ExpandedBuilder):
    """Subtracts from the lengths of padding rows too."""

    def decode_of(self, common: CommonAttentionMetadata) -> DecodeMetadata:
        """Return the metadata of one-token decodes; a padding row of four tokens has lengths from -3 on."""
        decode = super().decode_of(common)
        width = common.num_actual_tokens // common.num_reqs
        back = torch.arange(width - 1, -1, -1, dtype=torch.int32, device=self.device)
        decode.seq_lens.copy_((common.seq_lens[:, None] - back).flatten())
        return decode


# -- tiles of a scheduler ----------------------------------------------------------------------------------

TILE = 16
"""Keys of a tile."""


def _schedule(seq_lens: torch.Tensor, tiles: torch.Tensor, rest: int) -> None:
    entries = [
        (request, min(TILE, length - first))
        for request, length in enumerate(seq_lens.tolist())
        for first in range(0, length, TILE)
    ]
    tiles[: len(entries)] = torch.tensor(entries, dtype=torch.int32).reshape(-1, 2)
    if rest:
        tiles[len(entries) :] = -1


def _sum_tiles(tiles: torch.Tensor, num_splits: int, out: torch.Tensor) -> None:
    out.zero_()
    count = [0] * len(out)
    for request, keys in tiles.tolist():
        if not 0 <= request < len(out):
            continue  # no work
        out[request] += keys
        count[request] += 1
    if max(count) > num_splits:
        raise KernelRefusal(
            f"{max(count)} tiles of a request; the launch combines at most {num_splits} (num_splits)",
            rule="GP08",
        )


schedule_tiles = define_kernel(
    "schedule_tiles(Tensor seq_lens, Tensor(a!) tiles, int rest) -> ()", _schedule, namespace="vllm_builders"
)
sum_tiles = define_kernel(
    "sum_tiles(Tensor tiles, int num_splits, Tensor(a!) out) -> ()", _sum_tiles, namespace="vllm_builders"
)


@dataclass
class ScheduledMetadata(PagedMetadata):
    """Paged metadata, and the work of a kernel's blocks."""

    tiles: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    num_splits: int = 0


class ScheduledBuilder(PagedBuilder):
    """The right builder of scheduled metadata, with tiles in its own buffer, -1 for no work."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.max_splits = -(-self.max_model_len // TILE)
        self.tiles = self.int32(self.max_reqs * self.max_splits, 2).fill_(-1)

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with the tiles of this batch."""
        metadata = super().metadata(common)
        self.schedule(common)
        return ScheduledMetadata(
            **vars(metadata),
            tiles=self.tiles[: common.num_reqs * self.max_splits],
            num_splits=self.splits_of(common),
        )

    def schedule(self, common: CommonAttentionMetadata) -> None:
        """Write the tiles of a batch, and -1 after the last one."""
        schedule_tiles(common.seq_lens, self.tiles, 1)

    def splits_of(self, common: CommonAttentionMetadata) -> int:
        """Return the most tiles of a request: a bound for all batches."""
        del common
        return self.max_splits


class ScheduledOnce(ScheduledBuilder):
    """Makes the schedule only if there is none yet, so the warm-up makes the only one."""

    scheduled = False

    def schedule(self, common: CommonAttentionMetadata) -> None:
        """Write the tiles of the first batch."""
        if not self.scheduled:
            super().schedule(common)
        self.scheduled = True


class StaleTiles(ScheduledBuilder):
    """Leaves tiles of a larger batch after the last one of a smaller batch."""

    def schedule(self, common: CommonAttentionMetadata) -> None:
        """Write only the tiles of a batch."""
        schedule_tiles(common.seq_lens, self.tiles, 0)


class SplitsOfTheDummy(ScheduledBuilder):
    """Launches with the number of splits of the batch, which is one in a dummy."""

    def splits_of(self, common: CommonAttentionMetadata) -> int:
        """Return the tiles of this batch's longest request."""
        return -(-int(host_lens(common).max()) // TILE)


@dataclass(frozen=True)
class ScheduledReads:
    """What a scheduled kernel reads: the tiles, and what paged attention reads, except the lengths."""

    tiles: torch.Tensor
    num_splits: int
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    num_actual_tokens: int
    max_query_len: int

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        cache: KVBuffers,
        page_size: int,
    ) -> torch.Tensor:
        """Attend to the keys of the tiles."""
        lens = torch.empty(len(self.block_table), dtype=torch.int32, device=q.device)
        sum_tiles(self.tiles, self.num_splits, lens)
        part = Part(
            seq_lens=lens,
            block_table=self.block_table,
            query_start_loc=self.query_start_loc,
            num_tokens=self.num_actual_tokens,
            max_query_len=self.max_query_len,
        )
        reads = PagedReads((part,), self.slot_mapping, self.num_actual_tokens)
        return reads.attend(q, k, v, layer, cache, page_size)


def read_scheduled(metadata: ScheduledMetadata, slot_mapping: torch.Tensor) -> ScheduledReads:
    """Return what the scheduled kernel reads."""
    return ScheduledReads(
        tiles=metadata.tiles,
        num_splits=metadata.num_splits,
        block_table=metadata.block_table,
        query_start_loc=metadata.query_start_loc,
        slot_mapping=slot_mapping,
        num_actual_tokens=metadata.num_actual_tokens,
        max_query_len=metadata.max_query_len,
    )


# -- plans of pages ----------------------------------------------------------------------------------------


def _tables_of_plan(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    page_size: int,
    lens: torch.Tensor,
    table: torch.Tensor,
) -> None:
    starts = indptr.tolist()
    table.zero_()
    for request, last in enumerate(last_page_len.tolist()):
        first, stop = starts[request], starts[request + 1]
        if not 0 <= first <= stop <= len(indices) or stop - first > table.shape[1]:
            raise KernelRefusal(
                f"request {request}: pages {first}:{stop} of {len(indices)}; offsets do not decrease",
                rule="GP05",
            )
        lens[request] = (stop - first - 1) * page_size + last if stop > first else 0
        table[request, : stop - first] = indices[first:stop]


tables_of_plan = define_kernel(
    "tables_of_plan(Tensor indptr, Tensor indices, Tensor last_page_len, int page_size, Tensor(a!) lens,"
    " Tensor(b!) table) -> ()",
    _tables_of_plan,
    namespace="vllm_builders",
)


@dataclass
class PlannedMetadata:
    """Pages of all requests, one after the other."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor


class PlannedBuilder(PagedBuilder):
    """The right builder of plans: arrays on the host, staged and copied into persistent ones."""

    support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        pages = self.max_reqs * self.max_blocks
        sizes = {"indptr": self.max_reqs + 1, "indices": pages, "last": self.max_reqs}
        self.plan = {name: self.int32(size) for name, size in sizes.items()}
        self.staging = {
            name: torch.zeros(size, dtype=torch.int32, pin_memory=torch.cuda.is_available())
            for name, size in sizes.items()
        }

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with the plan of this batch."""
        reqs = common.num_reqs
        self.make_plan(common)
        return PlannedMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            paged_kv_indptr=self.plan["indptr"][: reqs + 1],
            paged_kv_indices=self.plan["indices"],
            paged_kv_last_page_len=self.plan["last"][:reqs],
        )

    def make_plan(self, common: CommonAttentionMetadata) -> None:
        """Plan on the host, and copy; padding rows have no pages."""
        lens = common.seq_lens.tolist()  # waits for the device, because bounds are not lengths
        pages = [-(-length // self.block_size) for length in lens]
        staged = self.staging
        staged["indptr"][0] = 0
        staged["indptr"][1 : len(pages) + 1] = torch.tensor(pages).cumsum(0)
        staged["last"][: len(lens)] = torch.tensor([(n - 1) % self.block_size + 1 for n in lens])
        table = common.block_table_tensor
        indices = torch.cat([table[request, :count] for request, count in enumerate(pages)])
        self.plan["indices"][: len(indices)].copy_(indices)
        for name in ("indptr", "last"):
            self.plan[name].copy_(staged[name], non_blocking=True)


class PlanKept(PlannedBuilder):
    """Writes the pages only if their number changes, as if the pages were equal otherwise."""

    planned: tuple[int, ...] = ()

    def make_plan(self, common: CommonAttentionMetadata) -> None:
        """Plan, and keep the pages while their counts are equal."""
        before = self.plan["indices"].clone()
        super().make_plan(common)
        counts = tuple(self.staging["indptr"].tolist())
        if counts == self.planned:
            self.plan["indices"].copy_(before)
        self.planned = counts


@dataclass(frozen=True)
class PlannedReads:
    """What a planned kernel reads."""

    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    num_actual_tokens: int
    max_query_len: int

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        cache: KVBuffers,
        page_size: int,
    ) -> torch.Tensor:
        """Attend to the pages of the plan."""
        reqs = len(self.paged_kv_last_page_len)
        lens = torch.empty(reqs, dtype=torch.int32, device=q.device)
        blocks = len(self.paged_kv_indices) // reqs
        table = torch.empty(reqs, blocks, dtype=torch.int32, device=q.device)
        plan = self.paged_kv_indptr, self.paged_kv_indices, self.paged_kv_last_page_len
        tables_of_plan(*plan, page_size, lens, table)
        part = Part(
            seq_lens=lens,
            block_table=table,
            query_start_loc=self.query_start_loc,
            num_tokens=self.num_actual_tokens,
            max_query_len=self.max_query_len,
        )
        reads = PagedReads((part,), self.slot_mapping, self.num_actual_tokens)
        return reads.attend(q, k, v, layer, cache, page_size)


def read_planned(metadata: PlannedMetadata, slot_mapping: torch.Tensor) -> PlannedReads:
    """Return what the planned kernel reads."""
    return PlannedReads(
        paged_kv_indptr=metadata.paged_kv_indptr,
        paged_kv_indices=metadata.paged_kv_indices,
        paged_kv_last_page_len=metadata.paged_kv_last_page_len,
        query_start_loc=metadata.query_start_loc,
        slot_mapping=slot_mapping,
        num_actual_tokens=metadata.num_actual_tokens,
        max_query_len=metadata.max_query_len,
    )


# -- a choice of kernels, and host lists -------------------------------------------------------------------


@dataclass
class ChosenMetadata(PagedMetadata):
    """Paged metadata, and the kernel for it."""

    uses_window: bool = False


class ChosenBuilder(PagedBuilder):
    """Serves short sequences with another kernel, with queries of one length; the runner chooses."""

    short = 32

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata for the kernel of this builder's configuration."""
        metadata = super().metadata(common)
        return ChosenMetadata(**vars(metadata), uses_window=self.is_short(common))

    def is_short(self, common: CommonAttentionMetadata) -> bool:
        """Return whether the kernel for short sequences serves all batches."""
        del common
        return self.max_model_len <= self.short


class ChosenByLength(ChosenBuilder):
    """Chooses the kernel by the longest sequence of a batch, which at a capture has the maximum length."""

    def is_short(self, common: CommonAttentionMetadata) -> bool:
        """Return whether the kernel for short sequences serves this batch."""
        return common.max_seq_len <= self.short

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata; the table of the other kernel is not written."""
        metadata = super().metadata(common)
        if not hasattr(self, "tables"):
            self.tables = {short: self.int32(self.max_reqs, self.max_blocks) for short in (False, True)}
        table = self.tables[metadata.uses_window][: common.num_reqs]
        table.copy_(common.block_table_tensor)
        metadata.block_table = table
        return metadata


def read_chosen(metadata: ChosenMetadata, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the reads of the chosen kernel; the one for short sequences is launched without offsets."""
    tokens = metadata.num_actual_tokens
    part = Part(
        seq_lens=metadata.seq_lens,
        block_table=metadata.block_table,
        query_start_loc=None if metadata.uses_window else metadata.query_start_loc,
        query_len=1 if metadata.uses_window else None,
        num_tokens=tokens,
        max_query_len=metadata.max_query_len,
    )
    return PagedReads((part,), slot_mapping, tokens)


@dataclass
class VerifyMetadata(PagedMetadata):
    """Paged metadata, with the lists that a loop over prefills uses to launch its kernels."""

    is_prefill: bool = False
    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()


class VerifyBuilder(PagedBuilder):
    """Serves rows with the tokens of a draft as decodes, from tensors."""

    support = AttentionCGSupport.UNIFORM_BATCH

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata; rows of several tokens are no prefills."""
        metadata = super().metadata(common)
        return VerifyMetadata(**vars(metadata))


class VerifyAsPrefill(VerifyBuilder):
    """Serves rows of several tokens by the loop over prefills, which reads host lists."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with the lists of this batch."""
        metadata = super().metadata(common)
        if common.max_query_len > 1:
            metadata.is_prefill = True
            metadata.queries = tuple(common.query_start_loc_cpu.diff().tolist())
            metadata.keys = tuple(common.seq_lens.tolist())
        return metadata


@dataclass(frozen=True)
class LoopReads:
    """What the loop over prefills reads: the lists are arguments of its launches."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_actual_tokens: int

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        cache: KVBuffers,
        page_size: int,
    ) -> torch.Tensor:
        """Attend request by request."""
        device = q.device
        starts = torch.tensor([0, *self.queries], device=device).cumsum(0).to(torch.int32)
        part = Part(
            seq_lens=torch.tensor(self.keys, dtype=torch.int32, device=device),
            block_table=self.block_table,
            query_start_loc=starts,
            num_tokens=self.num_actual_tokens,
        )
        reads = PagedReads((part,), self.slot_mapping, self.num_actual_tokens)
        return reads.attend(q, k, v, layer, cache, page_size)


def read_verify(metadata: VerifyMetadata, slot_mapping: torch.Tensor) -> PagedReads | LoopReads:
    """Return the reads of decodes, or of the loop over prefills."""
    if not metadata.is_prefill:
        return read_with_own_slots(metadata, slot_mapping)
    return LoopReads(
        metadata.queries, metadata.keys, metadata.block_table, slot_mapping, metadata.num_actual_tokens
    )


# -- right builders in unusual style -------------------------------------------------------------------------


class PlainTuple(NamedTuple):
    """Metadata as a tuple."""

    seq_lens: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    num_tokens: int
    max_query_len: int


class TupleBuilder(PagedBuilder):
    """Returns a named tuple."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return a named tuple."""
        return PlainTuple(
            common.seq_lens,
            common.block_table_tensor,
            common.query_start_loc,
            common.num_actual_tokens,
            common.max_query_len,
        )


def read_tuple(metadata: PlainTuple, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the reads of a named tuple."""
    part = Part(
        seq_lens=metadata.seq_lens,
        block_table=metadata.block_table,
        query_start_loc=metadata.query_start_loc,
        num_tokens=metadata.num_tokens,
        max_query_len=metadata.max_query_len,
    )
    return PagedReads((part,), slot_mapping, metadata.num_tokens)


class DictBuilder(OwnedBuilder):
    """Returns a dictionary."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return a dictionary."""
        return vars(super().metadata(common))


def read_dict(metadata: dict[str, Any], slot_mapping: torch.Tensor) -> PagedReads:
    """Return the reads of a dictionary."""
    return read_with_own_slots(PagedMetadata(**{**metadata, "slot_mapping": slot_mapping}), slot_mapping)


class ViewsByShape(OwnedBuilder):
    """Makes the views of its buffers once for each number of requests."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata of kept views."""
        metadata = super().metadata(common)
        views = self.views.setdefault(common.num_reqs, (metadata.seq_lens, metadata.block_table))
        metadata.seq_lens, metadata.block_table = views
        return metadata


class LongerViews(ScheduledBuilder):
    """Returns its whole buffer in each build, but at a replay a shorter view of it."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with as many tiles as there are, at least one."""
        metadata = super().metadata(common)
        used = max(1, int((self.tiles[:, 0] >= 0).sum()))
        metadata.tiles = self.tiles[:used]
        return metadata

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with all tiles."""
        metadata = self.build(0, common)
        metadata.tiles = self.tiles
        return metadata


class LeavesTails(OwnedBuilder):
    """Writes only live rows: padding rows have no queries, so no kernel reads their keys."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with padding rows of an earlier batch."""
        metadata = PagedBuilder.metadata(self, common)
        live, reqs = int((common.query_start_loc_cpu.diff() > 0).sum()), common.num_reqs
        self.seq_lens[:live].copy_(common.seq_lens[:live])
        self.block_table[:live].copy_(common.block_table_tensor[:live])
        metadata.seq_lens, metadata.block_table = self.seq_lens[:reqs], self.block_table[:reqs]
        return metadata


@functools.cache
def pool(layer: str, rows: int, columns: int) -> torch.Tensor:
    """Return memory that lives as long as the module."""
    del layer
    return torch.zeros(rows, columns, dtype=torch.int32)


POOL: dict[tuple[str, int], torch.Tensor] = {}
"""Memory of builders, by their first layer and its size."""


class PooledBuilder(OwnedBuilder):
    """Keeps its buffers in a cache of the module."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata of the module's memory."""
        metadata = super().metadata(common)
        key, reqs = (self.layer_names[0], self.max_reqs), common.num_reqs
        if key not in POOL:
            POOL[key] = self.int32(self.max_reqs)
        table = pool(self.layer_names[0], self.max_reqs, self.max_blocks)
        POOL[key][:reqs].copy_(common.seq_lens)
        table[:reqs].copy_(common.block_table_tensor)
        metadata.seq_lens, metadata.block_table = POOL[key][:reqs], table[:reqs]
        return metadata


class MutatesTheCaptured(PagedBuilder):
    """Keeps each captured object, and changes it in place at a replay."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.captured: dict[tuple[int, int], Any] = {}

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return the captured object of this shape, if there is one."""
        metadata = super().metadata(common)
        kept = self.captured.get((common.num_reqs, common.num_actual_tokens))
        if kept is None:
            return metadata
        kept.seq_lens.copy_(metadata.seq_lens)
        kept.max_seq_len = metadata.max_seq_len
        kept.max_query_len = metadata.max_query_len
        return kept

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with its own lengths, and keep it; a replay of an idle rank calls this again."""
        metadata = super().metadata(common)
        metadata.seq_lens = metadata.seq_lens.clone()
        self.captured.setdefault((common.num_reqs, common.num_actual_tokens), metadata)
        return self.metadata(common)


class ShortCaptures(OwnedBuilder):
    """Captures with one key in each request, in its own memory, so that captures are quick."""

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata of a capture with short sequences."""
        metadata = self.build(0, common)
        metadata.seq_lens.fill_(1)
        return metadata


# -- the tables ----------------------------------------------------------------------------------------------

LANES = {
    "decode": "decode-page16-gqa-float32",
    "extend": "extend-page16-gqa-float32",
    "verify": "target_verify-page16-gqa-float32",
    "mla decode": "decode-page16-mla-float32",
    "mla verify": "target_verify-page16-mla-float32",
}


@dataclass(frozen=True)
class Planted:
    """A planted bug.

    Args:
        make: The builder with the bug.
        twin: The right builder.
        thread: The public thread about the bug.
        rule: The rule that it breaks; None if it is wrong without a graph too.
        field: The beginning of the finding's field.
        lane: The name in `LANES` of the lane that shows it.
        read: The reader of both; None for the adapter's reader.
        kind: What their KV cache holds.
    """

    make: type[PagedBuilder]
    twin: type[PagedBuilder]
    thread: str
    rule: str | None
    field: str
    lane: str = "decode"
    read: Callable[..., Any] | None = None
    kind: str = "full"

    def __str__(self) -> str:
        return self.make.__name__

    def subject(self) -> Builders:
        """Return what is checked: the bug under the adapter."""
        return under_test(self.make, self.read, self.kind)


def under_test(make: type[PagedBuilder], read: Callable[..., Any] | None, kind: str = "full") -> Builders:
    """Return a builder class under the adapter."""
    options: dict[str, Any] = {"kind": kind} | ({} if read is None else {"read": read})
    return Builders(make, **options)


PLANTED = (
    Planted(FreshLengths, OwnedBuilder, "vllm-project/vllm#51994", "GP01", "seq_lens"),
    Planted(FastPath, OwnedBuilder, "local-inference-lab/vllm#667", "GP01", "seq_lens"),
    Planted(
        RaggedOffsetsOfTheDummy,
        PagedBuilder,
        "pytorch/torchtitan#3893",
        "GP01",
        "query_start_loc",
        lane="extend",
    ),
    Planted(CachedByCounts, OwnedBuilder, "vllm-project/vllm#48659", "GP02", "seq_lens"),
    Planted(SharedBuffers, OwnedBuilder, "vllm-project/vllm#46993", None, "an eager run"),
    Planted(ScheduledOnce, ScheduledBuilder, "vllm-project/vllm#42444", "GP02", "tiles", read=read_scheduled),
    Planted(
        PlanKept,
        PlannedBuilder,
        "NVIDIA/TensorRT-LLM#18769",
        "GP09",
        "paged_kv_indices",
        read=read_planned,
    ),
    Planted(
        UpperBoundsAsLengths,
        OwnedBuilder,
        "vllm-project/vllm-ascend#16007",
        "GP09",
        "seq_lens_cpu_upper_bound",
        lane="verify",
    ),
    Planted(StaleTiles, ScheduledBuilder, "vllm-project/vllm#21691", "GP03", "tiles", read=read_scheduled),
    Planted(
        StaleSlots, OwnSlots, "vllm-project/vllm#21196", "GP03", "slot_mapping", read=read_with_own_slots
    ),
    Planted(
        NegativePadding,
        ExpandedBuilder,
        "vllm-project/vllm-ascend#12841",
        "GP04",
        "decode.seq_lens",
        lane="mla verify",
        kind="mla",
    ),
    Planted(LongestOfTheDummy, PagedBuilder, "vllm-project/vllm#33360", "GP08", "max_seq_len"),
    Planted(
        SplitsOfTheDummy,
        ScheduledBuilder,
        "vllm-project/vllm#20301",
        "GP08",
        "num_splits",
        read=read_scheduled,
    ),
    Planted(
        VerifyAsPrefill,
        VerifyBuilder,
        "vllm-project/vllm#52475",
        "GP08",
        "keys",
        lane="verify",
        read=read_verify,
    ),
    Planted(
        ChosenByLength, ChosenBuilder, "vllm-project/vllm#27114", "GP10", "the launches", read=read_chosen
    ),
    Planted(
        SizedByRequests,
        ExpandedBuilder,
        "vllm-project/vllm#50065",
        "GP13",
        "a buffer of the builder",
        lane="mla verify",
        kind="mla",
    ),
    Planted(GrowsForLargerBatches, OwnedBuilder, "vllm-project/vllm#30715", "GP14", "seq_lens"),
    Planted(ClearsHostOffsets, PagedBuilder, "vllm-project/vllm#51585", "GP19", "query_start_loc_cpu"),
    Planted(ZeroesOffsets, PagedBuilder, "vllm-project/vllm#53821", "GP19", "query_start_loc"),
)
"""The planted bugs."""

UNUSUAL: tuple[tuple[type[PagedBuilder], Callable[..., Any] | None], ...] = (
    (TupleBuilder, read_tuple),
    (DictBuilder, read_dict),
    (ViewsByShape, None),
    (LongerViews, read_scheduled),
    (LeavesTails, None),
    (PooledBuilder, None),
    (MutatesTheCaptured, None),
    (PlannedBuilder, read_planned),
    (ShortCaptures, None),
)
"""Right builders in unusual style, with their readers."""
