"""Numbers that a builder takes from the host: lists that a graph keeps, and an engine's bounds and blocks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm_builders import LANES, OwnedBuilder, PagedBuilder, UpperBoundsAsLengths, host_lens

from graphpact_adapters.kernel_reads import PagedReads, Part
from graphpact_adapters.read_leaves import leaves
from graphpact_adapters.vllm import Builders, CommonAttentionMetadata
from graphpact_conformance.results import Finding, Outcome
from graphpact_conformance.suite import examine_lane
from graphpact_conformance.targets import Options


class ListedLengths(PagedBuilder):
    """Keeps the lengths of requests as a list, because its kernel is launched once for each request."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with lengths on the host."""
        made = super().metadata(common)
        made.seq_lens = host_lens(common)
        return made


def read_listed(metadata: Any, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the reads of a kernel that is launched with numbers of the host."""
    part = Part(
        seq_lens=tuple(metadata.seq_lens.tolist()),
        block_table=metadata.block_table,
        query_start_loc=metadata.query_start_loc,
        num_tokens=metadata.num_actual_tokens,
    )
    return PagedReads((part,), slot_mapping, metadata.num_actual_tokens)


class WithinBlocks(OwnedBuilder):
    """Has a table with a column for each block of the cache, like flex attention."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_blocks: int = args[2].cache_config.num_gpu_blocks

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Raise for a block that is not in the cache."""
        assert int(common.block_table_tensor.max()) < self.num_blocks
        return super().metadata(common)


def findings(builders: Builders, lane: str) -> Iterator[Finding]:
    """Yield the findings of a lane."""
    options = Options(size="quick", lanes=(LANES[lane],), shrink=False)
    for plan in builders.lanes(options):
        for result in examine_lane(plan, options, experiments=builders.experiments):
            assert result.outcome is not Outcome.ERROR, result.reason
            yield from result.findings


@pytest.mark.parametrize(("lane", "rules"), [("decode", {"GP08"}), ("verify", {"GP08", "GP09", None})])
def test_lengths_that_a_graph_keeps_are_named_beside_bounds(lane: str, rules: set[str | None]) -> None:
    """One finding covers the lengths of all requests; with inexact bounds, both faults are named."""
    found = [*findings(Builders(ListedLengths, read=read_listed), lane)]
    assert {f.rule for f in found} == rules
    (kept,) = {f.field for f in found if f.rule == "GP08"}
    assert kept == "seq_lens"
    first = next(f for f in found if f.rule == "GP08")
    assert first.batch
    assert first.actual.endswith(", the number of the capture")
    assert first.expected.startswith("(")


def test_bounds_in_the_memory_of_the_graph_are_one_fault() -> None:
    """If a graph reads the result of an eager build, the bounds are the only fault."""
    assert {f.rule for f in findings(Builders(UpperBoundsAsLengths), "verify")} == {"GP09", None}


def test_a_tuple_of_numbers_is_one_value() -> None:
    """A tuple of host numbers is one leaf; each part has separate leaves."""
    part = Part(seq_lens=(3, 4), block_table=torch.zeros(2, 1), query_start_loc=(0, 1, 2))
    found = dict(leaves(PagedReads((part,), torch.zeros(2), 2)))
    assert (found["parts[0].seq_lens"], found["parts[0].query_start_loc"]) == ((3, 4), (0, 1, 2))
    assert not [path for path in found if path.startswith("parts[0].seq_lens[")]


@pytest.mark.few(1)
@pytest.mark.parametrize("lane", ["decode", "verify"])
def test_each_block_is_one_of_the_configuration(lane: str) -> None:
    """No block id of any batch is past ``num_gpu_blocks``: a table of all blocks has a column for it."""
    assert [*findings(Builders(WithinBlocks), lane)] == []
