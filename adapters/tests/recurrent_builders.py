"""Builders of recurrent layers with two vLLM interfaces: a right one of each, and wrong variants.

    Scan     one set of fields for decodes and drafts, as in Mamba2
    Delta    separate fields for drafts and decodes, and a mask, as in GDN; groups share everything except the
             block table

Does not: contain code of vLLM, or compute prefills.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from graphpact_adapters.vllm import CommonAttentionMetadata, RecurrentReads


class Support(Enum):
    """Graph support, with the values of vLLM's ``AttentionCGSupport``."""

    UNIFORM_BATCH = 2


class Builder:
    """The base of all builders here: the sizes, and persistent tensors for the largest step."""

    supports_update_block_table = False

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        del kv_cache_spec, layer_names
        self.drafts: int = vllm_config.num_speculative_tokens
        self.most: int = vllm_config.scheduler_config.max_num_seqs
        self.state_indices = torch.empty(self.most, 1 + self.drafts, dtype=torch.int32, device=device)
        self.accepted = torch.empty(self.most, dtype=torch.int32, device=device)
        self.starts = torch.empty(self.most + 1, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Support:
        """Return that graphs support decodes, and drafts with equal numbers of tokens."""
        del vllm_config, kv_cache_spec
        return Support.UNIFORM_BATCH


# -- Mamba2's shape ---------------------------------------------------------------------------------------


@dataclass
class ScanMetadata:
    """The fields of a scan that decodes and verifies drafts."""

    num_prefills: int
    num_decodes: int
    num_decode_tokens: int
    num_reqs: int
    state_indices_tensor_d: torch.Tensor
    query_start_loc_d: torch.Tensor | None
    num_accepted_tokens: torch.Tensor | None
    query_len: int


class Scan(Builder):
    """A right builder like Mamba2's: drafts have offsets, decodes have one token each."""

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> ScanMetadata:
        """Build for a dummy in which all tokens are accepted."""
        accepted = common.query_start_loc.diff() if self.drafts else None
        return self.build(0, common, num_accepted_tokens=accepted)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        *,
        num_accepted_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ScanMetadata:
        """Build for a step, in persistent tensors."""
        del common_prefix_len, fast_build, kwargs
        common = common_attn_metadata
        accepted = starts = None
        if self.drafts:
            assert num_accepted_tokens is not None
            accepted, starts = self.accepted_of(common, num_accepted_tokens), common.query_start_loc
        return ScanMetadata(
            num_prefills=0,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            num_reqs=common.num_reqs,
            state_indices_tensor_d=self.state_indices_of(common),
            query_start_loc_d=starts,
            num_accepted_tokens=accepted,
            query_len=1 + self.drafts,
        )

    def state_indices_of(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Return the state rows of all requests, in a persistent tensor."""
        return self.state_indices[: common.num_reqs].copy_(self.rows_of(common.block_table_tensor))

    def rows_of(self, block_table: torch.Tensor) -> torch.Tensor:
        """Return the columns of a block table that a step writes."""
        return block_table[:, : 1 + self.drafts]

    def accepted_of(self, common: CommonAttentionMetadata, accepted: torch.Tensor) -> torch.Tensor:
        """Return the accepted tokens of all requests, in a persistent tensor."""
        return self.accepted[: common.num_reqs].copy_(accepted)


class UpdatedScan(Scan):
    """A right builder: later groups take the metadata of the first with another block table."""

    supports_update_block_table = True

    def update_block_table(
        self, metadata: ScanMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> ScanMetadata:
        """Return the metadata with the state rows of another group, in this builder's memory."""
        del slot_mapping
        rows, accepted = metadata.num_reqs, metadata.num_accepted_tokens
        return replace(
            metadata,
            state_indices_tensor_d=self.state_indices[:rows].copy_(self.rows_of(blk_table)),
            num_accepted_tokens=None if accepted is None else self.accepted[:rows].copy_(accepted),
        )


class UpdatedRows(UpdatedScan):
    """Wrong with V1, which captures each group separately: accepted tokens stay in the first group."""

    def update_block_table(
        self, metadata: ScanMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> ScanMetadata:
        """Return the metadata, with only the state rows of another group."""
        updated = super().update_block_table(metadata, blk_table, slot_mapping)
        return replace(metadata, state_indices_tensor_d=updated.state_indices_tensor_d)

    def accepted_of(self, common: CommonAttentionMetadata, accepted: torch.Tensor) -> torch.Tensor:
        """Return the accepted tokens of all requests, in memory that no update writes."""
        self.of_builds = getattr(self, "of_builds", torch.empty_like(self.accepted))
        return self.of_builds[: common.num_reqs].copy_(accepted)


def uniform(metadata: ScanMetadata, slot_mapping: torch.Tensor) -> RecurrentReads:
    """Return the reads of a kernel that takes equal numbers of drafts, and no offsets."""
    return RecurrentReads(
        metadata.state_indices_tensor_d,
        slot_mapping,
        metadata.num_decode_tokens,
        query_len=metadata.query_len,
        num_accepted_tokens=metadata.num_accepted_tokens,
    )


class StalePadding(Scan):
    """Wrong: padding rows keep the state rows of an earlier batch."""

    def state_indices_of(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Copy only live rows."""
        live = int((common.query_start_loc_cpu.diff() > 0).sum())
        self.state_indices[:live].copy_(self.rows_of(common.block_table_tensor[:live]))
        return self.state_indices[: common.num_reqs]


class StaleAccepted(Scan):
    """Wrong: accepted tokens are written once for each size of a step, as if they were always the same."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.kept: dict[int, torch.Tensor] = {}

    def accepted_of(self, common: CommonAttentionMetadata, accepted: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the first step of this size."""
        return self.kept.setdefault(common.num_reqs, accepted.clone())


class CapturedWithoutDrafts(Scan):
    """Wrong: a capture has no accepted tokens, so it records a launch that begins at the first state."""

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> ScanMetadata:
        """Build without them."""
        return replace(super().build_for_cudagraph_capture(common), num_accepted_tokens=None)


class PaddingIsPrefill(Scan):
    """Wrong: steps with padding rows are treated as prefills, and the graph's tensors are not written."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        *,
        num_accepted_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ScanMetadata:
        """Count rows without queries as prefills."""
        common = common_attn_metadata
        empty = int((common.query_start_loc_cpu.diff() == 0).sum())
        if not empty:
            return super().build(
                common_prefix_len, common, fast_build, num_accepted_tokens=num_accepted_tokens, **kwargs
            )
        live, table = common.num_reqs - empty, common.block_table_tensor.clone()
        return ScanMetadata(empty, live, live, common.num_reqs, table, common.query_start_loc, None, 1)


class NoAccepted(Scan):
    """Wrong with a kernel without offsets: padding rows have 0 accepted tokens."""

    def accepted_of(self, common: CommonAttentionMetadata, accepted: torch.Tensor) -> torch.Tensor:
        """Write 0 into rows without queries."""
        live = common.query_start_loc.diff() > 0
        return super().accepted_of(common, torch.where(live, accepted, 0))


class FreshIndices(Scan):
    """Wrong: every build returns a new tensor, but a graph reads the tensor of the capture."""

    def state_indices_of(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Copy the block table."""
        return self.rows_of(common.block_table_tensor).clone()


class WritesLent(Scan):
    """Wrong: a capture writes into the block table that the runner lent."""

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> ScanMetadata:
        """Copy the rows of the dummy, and then overwrite them."""
        metadata = super().build_for_cudagraph_capture(common)
        common.block_table_tensor.fill_(1)
        return metadata


class SharedWithFirst(UpdatedScan):
    """Wrong: with an empty block table, as at captures, a later group keeps the tensors of the first."""

    def update_block_table(
        self, metadata: ScanMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> ScanMetadata:
        """Return the metadata of the first group for a dummy."""
        if not bool(blk_table.any()):
            return metadata
        return super().update_block_table(metadata, blk_table, slot_mapping)


class FirstGroup(UpdatedScan):
    """Wrong, also without a graph: a later group has the state rows of the first."""

    def update_block_table(
        self, metadata: ScanMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> ScanMetadata:
        """Return the metadata unchanged."""
        del blk_table, slot_mapping
        return metadata


# -- GDN's shape ------------------------------------------------------------------------------------------


@dataclass
class DeltaMetadata:
    """The fields of a gated delta rule."""

    num_prefills: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    num_actual_tokens: int
    spec_sequence_masks: torch.Tensor | None = None
    spec_query_start_loc: torch.Tensor | None = None
    spec_state_indices_tensor: torch.Tensor | None = None
    non_spec_state_indices_tensor: torch.Tensor | None = None
    num_accepted_tokens: torch.Tensor | None = None


class Delta(Builder):
    """A right builder like GDN's: rows for which the runner gives a number of drafts are drafts."""

    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.masks = torch.empty(self.most, dtype=torch.bool, device=device)

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> DeltaMetadata:
        """Build for a dummy in which all tokens but the first are drafts, and all are accepted."""
        drafts = common.query_start_loc_cpu.diff() - 1
        return self.build(0, common, common.query_start_loc.diff(), drafts)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> DeltaMetadata:
        """Build for a step, in persistent tensors."""
        del common_prefix_len, fast_build
        common, rows = common_attn_metadata, common_attn_metadata.num_reqs
        if not self.drafts or num_decode_draft_tokens_cpu is None or num_accepted_tokens is None:
            live = int((common.query_start_loc_cpu.diff() > 0).sum())
            return DeltaMetadata(
                0,
                num_decodes=rows,
                num_decode_tokens=live,
                num_spec_decodes=0,
                num_actual_tokens=common.num_actual_tokens,
                non_spec_state_indices_tensor=self.staged(common.block_table_tensor, live, rows)[:, 0],
            )
        has_drafts = num_decode_draft_tokens_cpu >= 0
        live = int(has_drafts.sum())
        self.masks[:rows].copy_(has_drafts)
        self.starts[: rows + 1].copy_(common.query_start_loc)
        self.accepted[:live].copy_(num_accepted_tokens[:live])
        self.accepted[live:rows] = 1
        return DeltaMetadata(
            0,
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=self.count(has_drafts, common),
            num_actual_tokens=common.num_actual_tokens,
            spec_sequence_masks=self.masks[:rows],
            spec_query_start_loc=self.starts[: rows + 1],
            spec_state_indices_tensor=self.staged(common.block_table_tensor, live, rows),
            num_accepted_tokens=self.accepted[:rows],
        )

    def count(self, has_drafts: torch.Tensor, common: CommonAttentionMetadata) -> int:
        """Return the number of rows with drafts."""
        del common
        return int(has_drafts.sum())

    def staged(self, block_table: torch.Tensor, live: int, rows: int) -> torch.Tensor:
        """Return the state rows of ``live`` requests, and no state in padding rows."""
        self.state_indices[:live].copy_(block_table[:live, : 1 + self.drafts])
        self.state_indices[live:rows] = 0
        return self.state_indices[:rows]

    def update_block_table(
        self, metadata: DeltaMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> DeltaMetadata:
        """Return the metadata of the first group with the state rows of this one."""
        del slot_mapping
        if metadata.spec_sequence_masks is None:
            rows = self.staged(blk_table, metadata.num_decode_tokens, metadata.num_decodes)
            return replace(metadata, non_spec_state_indices_tensor=rows[:, 0])
        rows = len(metadata.spec_sequence_masks)
        assert metadata.spec_query_start_loc is not None
        assert metadata.num_accepted_tokens is not None
        return replace(
            metadata,
            spec_sequence_masks=self.masks[:rows].copy_(metadata.spec_sequence_masks),
            spec_query_start_loc=self.starts[: rows + 1].copy_(metadata.spec_query_start_loc),
            spec_state_indices_tensor=self.staged(blk_table, metadata.num_spec_decodes, rows),
            num_accepted_tokens=self.accepted[:rows].copy_(metadata.num_accepted_tokens),
        )


class FrozenCount(Delta):
    """Wrong: a capture counts only rows with earlier keys, which in a dummy gives a count of one."""

    def count(self, has_drafts: torch.Tensor, common: CommonAttentionMetadata) -> int:
        """Count rows with earlier keys, and at least one."""
        return max(int((common.compute_num_computed_tokens().cpu() > 0)[has_drafts].sum()), 1)


class KeptAccepted(Delta):
    """Wrong: accepted tokens are views of the runner's tensor, which is new in each step."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> DeltaMetadata:
        """Build, without a copy of accepted tokens."""
        found = super().build(
            common_prefix_len,
            common_attn_metadata,
            num_accepted_tokens,
            num_decode_draft_tokens_cpu,
            fast_build,
        )
        return (
            found
            if found.num_accepted_tokens is None
            else replace(found, num_accepted_tokens=num_accepted_tokens)
        )
