"""Methods of builders that model runner V1 calls and V2 does not, and methods that no run calls."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from adapter_checks import assert_found, assert_right, findings_of
from vllm_builders import LANES, AttentionCGSupport, OwnedBuilder, PagedBuilder, PagedMetadata

from graphpact.plugins import PluginCatalog
from graphpact_adapters.vllm import Builders, CommonAttentionMetadata, PagedReads
from graphpact_adapters.vllm.readers import read_vllm_metadata
from graphpact_conformance.report.digest import unchecked
from graphpact_conformance.suite import examine, targets
from graphpact_conformance.targets import Options
from graphpact_conformance.testing import _Listener

QUICK = Options(size="quick", shrink=False)


class Passes(PagedBuilder):
    """Refers to lent buffers, so another group's metadata is right with this group's block table."""

    supports_update_block_table = True

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        """Return the metadata of this group."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class Owns(OwnedBuilder):
    """Has its own buffers, and fills them from the metadata of the other group."""

    supports_update_block_table = True

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        """Return the metadata of this group, in this builder's memory."""
        rows = len(metadata.seq_lens)
        self.seq_lens[:rows].copy_(metadata.seq_lens)
        self.block_table[:rows].copy_(blk_table)
        return replace(
            metadata,
            seq_lens=self.seq_lens[:rows],
            block_table=self.block_table[:rows],
            slot_mapping=slot_mapping,
        )


class Clones(Owns):
    """Returns clones, but the graph of this group reads the tensors that its capture returned."""

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        """Return the metadata of this group, in new memory."""
        return replace(
            metadata,
            seq_lens=metadata.seq_lens.clone(),
            block_table=blk_table.clone(),
            slot_mapping=slot_mapping,
        )


class ForgetsLengths(Owns):
    """Updates the block table, but leaves lengths in the memory of the other group."""

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        """Return metadata whose lengths are those of the other builder."""
        self.block_table[: len(blk_table)].copy_(blk_table)
        return replace(metadata, block_table=self.block_table[: len(blk_table)], slot_mapping=slot_mapping)


class OwnsDecodes(Owns):
    """Keeps the table of decodes in its own buffer, and passes that of prefills on, as in an eager step."""

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        """Return the metadata of this group; graphs of prefills read the buffer, which is not written."""
        if metadata.num_actual_tokens == len(metadata.seq_lens):
            return super().update_block_table(metadata, blk_table, slot_mapping)
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


@dataclass
class SlicedMetadata(PagedMetadata):
    """Metadata with the table of prefills beside that of all requests, as kernels for prefills take it."""

    prefill_block_table: torch.Tensor | None = None


def read_sliced(metadata: SlicedMetadata, slot_mapping: torch.Tensor) -> PagedReads:
    """Return what the kernels read: prefills from their own table, if there is one."""
    reads = read_vllm_metadata(metadata, slot_mapping)
    assert isinstance(reads, PagedReads)
    if metadata.prefill_block_table is None:
        return reads
    (part,) = reads.parts
    return replace(reads, parts=(replace(part, block_table=metadata.prefill_block_table),))


class Slices(PagedBuilder):
    """Has a table of prefills, for steps that no graph holds, and makes it again for each group."""

    support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return the metadata of a step, with the table of prefills if it has any."""
        prefills = common.is_prefilling is not None and bool(common.is_prefilling.any())
        table = common.block_table_tensor.clone() if prefills else None
        return SlicedMetadata(**vars(super().metadata(common)), prefill_block_table=table)

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        """Return the metadata of this group."""
        prefill = None if metadata.prefill_block_table is None else blk_table.clone()
        return replace(
            metadata, block_table=blk_table, slot_mapping=slot_mapping, prefill_block_table=prefill
        )


class KeepsSlices(Slices):
    """Keeps the table of prefills of the other group: a public bug (MetaX-MACA/vLLM-metax#224)."""

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        """Return the metadata of this group, with prefills in the blocks of the other group."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


NAME = "test_vllm_runners:Cascades"


def v1(lane: str) -> str:
    """Return the name of a lane in which V1's calls are made."""
    return f"{LANES[lane]}-v1"


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [Passes, Owns])
@pytest.mark.parametrize("lane", ["decode", "verify"])
def test_a_right_update_of_block_tables_passes(make: type[PagedBuilder], lane: str) -> None:
    """The builder is right with the calls of either runner."""
    for name in (LANES[lane], v1(lane)):
        assert_right(Builders(make), name)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "field"),
    [(Clones, "KV-cache group 1: "), (ForgetsLengths, "KV-cache group 1: seq_lens")],
)
def test_an_update_that_does_not_reach_the_graph_is_found(make: type[PagedBuilder], field: str) -> None:
    """Only the calls of V1 show the fault, and the finding names the method."""
    findings = findings_of(Builders(make), v1("decode"))
    assert_found(findings, "GP01", field)
    assert {f.hook for f in findings} == {"update_block_table"}
    assert any("update_block_table() returned another tensor" in f.actual for f in findings)
    assert findings_of(Builders(make), LANES["decode"]) == []


class RefreshesDecodes(Owns):
    """Fills its buffers in steps without prompts, as if no graph ever got one."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata, of prompts without the builder's own memory."""
        assert common.is_prefilling is not None
        if bool(common.is_prefilling.any()):
            return PagedBuilder.metadata(self, common)
        return super().metadata(common)


@pytest.mark.few(1)
@pytest.mark.parametrize("lane", ["decode", "verify"])
def test_a_step_of_prompts_that_is_not_refreshed_is_found(lane: str) -> None:
    """V1 replays prompts that have the shape of decodes or drafts. With V2's calls the builder is right."""
    assert_found(findings_of(Builders(RefreshesDecodes), v1(lane)), "GP01", "KV-cache group 0: seq_lens")
    assert findings_of(Builders(RefreshesDecodes), LANES[lane]) == []


@pytest.mark.few(1)
def test_an_update_is_checked_in_graphs_of_prefills_too() -> None:
    """An update that is right for decodes, and does not reach graphs of prefills, is found there only."""
    assert findings_of(Builders(OwnsDecodes), v1("decode")) == []
    findings = findings_of(Builders(OwnsDecodes), v1("extend"))
    assert_found(findings, "GP01", "KV-cache group 1: block_table")
    assert {f.hook for f in findings} == {"update_block_table"}
    assert findings_of(Builders(OwnsDecodes), LANES["extend"]) == []


@pytest.mark.few(1)
def test_an_update_is_checked_in_steps_that_no_graph_holds() -> None:
    """V1 calls it in eager steps too: a table of prefills that stays that of the other group is found."""
    right, wrong = (Builders(make, read=read_sliced) for make in (Slices, KeepsSlices))
    mixed = "mixed-page16-gqa-float32"
    assert findings_of(right, f"{mixed}-v1", v1("decode")) == []
    assert findings_of(wrong, mixed, v1("decode")) == []
    found = [f for f in findings_of(wrong, f"{mixed}-v1") if "layer 1" in (f.field or "")]
    assert found
    assert {f.rule for f in found} == {None}


def test_only_builders_that_declare_it_have_lanes_of_v1() -> None:
    """Without ``supports_update_block_table``, or with groups of other specifications, V1 calls ``build``."""
    for builders in (Builders(PagedBuilder), Builders(Passes, kind="sliding_window")):
        assert not any(str(plan).endswith("-v1") for plan in builders.lanes(QUICK))
    of_v1 = [str(plan) for plan in Builders(Passes).lanes(QUICK) if str(plan).endswith("-v1")]
    assert [lane.partition("-")[0] for lane in of_v1] == ["decode", "extend", "mixed", "target_verify"]


def test_v1_calls_as_its_code_does() -> None:
    """A capture builds every group; other steps build the first and derive the next from it, in order."""
    calls: list[tuple[str, int]] = []
    made: list[object] = []

    class Logs(Passes):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.group = len(made)
            made.append(self)

        def build(self, *args: Any, **more: Any) -> Any:
            calls.append(("build", self.group))
            return super().build(*args, **more)

        def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Any:
            calls.append(("capture", self.group))
            return self.metadata(common)

        def update_block_table(self, *args: Any) -> Any:
            calls.append(("update", self.group))
            return super().update_block_table(*args)

    plan = next(p for p in Builders(Logs).lanes(QUICK) if str(p) == v1("decode"))
    made.clear()
    calls.clear()
    rig = plan.lane.rig()
    assert calls == [("capture", 0), ("capture", 1)] * (len(calls) // 2) != []
    (drawn,) = plan.lane.drawn(1, 0)
    steps = [problem for problem in drawn if problem.batch_size]  # an idle rank replays a dummy
    calls.clear()
    for problem in steps:
        rig.step(problem)
        rig.step(problem, eagerly=True)
    assert calls == [("build", 0), ("update", 1)] * (2 * len(steps))


# -- what is never called ------------------------------------------------------------------------------


class Cascades(PagedBuilder):
    """Has methods that engines call and this run does not call."""

    supports_update_block_table = False

    def use_cascade_attention(self, *_: Any) -> bool:
        """Return whether to compute a common prefix once."""
        return True

    def update_block_table(self, *_: Any) -> Any:
        """Raise, because this use is not declared."""
        raise NotImplementedError


def test_methods_that_no_lane_calls_are_reported() -> None:
    """The report lists only uncalled methods under "not checked", with when the engine calls them."""
    builders = Builders(Cascades)
    assert {each.name for each in builders.uncalled([*builders.lanes(QUICK)])} == {
        "use_cascade_attention",
        "update_block_table",
    }
    assert [*Builders(Owns).uncalled([*Builders(Owns).lanes(QUICK)])] == []
    decode = [plan for plan in Builders(Owns).lanes(QUICK) if str(plan) == LANES["decode"]]
    assert [each.name for each in Builders(Owns).uncalled(decode)] == ["update_block_table"]


def test_the_engines_own_defaults_are_not_reported() -> None:
    """A method inherited from the engine's base class is not listed."""
    base = type("AttentionMetadataBuilder", (PagedBuilder,), {"use_cascade_attention": lambda *_: False})
    plans = [*Builders(base).lanes(QUICK)]
    inherits = type("Inherits", (base,), {})
    overrides = type("Overrides", (base,), {"use_cascade_attention": lambda *_: True})
    assert [*Builders(inherits).uncalled(plans)] == []
    assert [each.name for each in Builders(overrides).uncalled(plans)] == ["use_cascade_attention"]


def test_a_report_says_what_was_never_called() -> None:
    """A run of the suite lists the uncalled method, and this is no failure."""
    catalog = PluginCatalog.scan()
    (target,) = targets([f"adapter:vllm:{NAME}"], catalog)
    listener = _Listener()
    options = replace(QUICK, lanes=(LANES["decode"],))
    plugin = examine(target, options, listener)
    told = unchecked(plugin.model_copy(update={"results": listener.results}))
    said = "use_cascade_attention: never called here; the engine calls it in eager steps"
    assert any(line.startswith(said) for line in told)
    assert not any(result.counts_against for result in listener.results)
