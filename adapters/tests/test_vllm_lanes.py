"""Drafts, decodes of different lengths, and declared graph support of vLLM's builders."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch

from graphpact.plugins import PluginCatalog
from graphpact_adapters.vllm import Builders, CommonAttentionMetadata
from graphpact_conformance.results import Finding, Outcome
from graphpact_conformance.suite import examine, examine_lane, targets
from graphpact_conformance.targets import Options
from graphpact_conformance.testing import _Listener

QUICK = Options(size="quick", shrink=False)


class Support(Enum):
    """The values of vLLM's ``AttentionCGSupport``."""

    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclass
class Metadata:
    """What a paged kernel with one launch reads."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    causal: bool = True


class Builder:
    """A builder whose metadata refers to lent buffers, except for its own lengths."""

    support = Support.ALWAYS
    supports_draft_decode_metadata_update = True

    def __init__(self, spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        self.lens = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)
        self.lent = self.lens

    def get_cudagraph_support(self, vllm_config: Any, kv_cache_spec: Any) -> Support:
        """Return the declared support."""
        return self.support

    def build(self, prefix: int, common: CommonAttentionMetadata, fast_build: bool = False) -> Metadata:
        """Return the metadata of a step."""
        lens = self.lens[: common.num_reqs]
        self.lent = common.seq_lens
        lens.copy_(common.seq_lens)
        return Metadata(
            common.num_actual_tokens,
            common.max_query_len,
            common.max_seq_len,
            common.query_start_loc,
            lens,
            common.block_table_tensor,
        )

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Metadata:
        """Return the metadata that a graph keeps."""
        return self.build(0, common)

    def build_for_drafting(self, common: CommonAttentionMetadata, draft_index: int) -> Metadata:
        """Return the metadata of a step of a draft."""
        return self.build(0, common, fast_build=True)

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Bring the captured metadata up to date."""
        metadata.seq_lens.copy_(self.lent[: len(metadata.seq_lens)])


def findings_of(make: Callable[..., object], lane: str, options: Options = QUICK) -> list[Finding]:
    """Return the findings of the lanes whose names contain ``lane``; there is at least one."""
    plans = [plan for plan in Builders(make).lanes(options) if lane in str(plan)]
    assert plans
    found: list[Finding] = []
    for plan in plans[:1]:
        results = list(examine_lane(plan.of("", Builders(make).experiments), options))
        assert any(result.outcome.ran for result in results)
        assert not any(result.outcome is Outcome.ERROR for result in results)
        found += [finding for result in results for finding in result.findings]
    return found


# -- drafts --------------------------------------------------------------------------------------------


def test_a_builder_that_updates_its_metadata_in_the_graph_drafts_right() -> None:
    """A draft of several steps in one graph, without any build in between, attends what was drafted."""
    assert findings_of(Builder, "draft_decode-") == []


class Forgets(Builder):
    """Brings nothing up to date between the steps of a draft."""

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Bring the captured metadata up to date."""


class Rebinds(Builder):
    """Gives the metadata a new tensor in each step, but the graph keeps the old one."""

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Bring the captured metadata up to date."""
        metadata.seq_lens = self.lent[: len(metadata.seq_lens)].clone()


class ReadsOnHost(Builder):
    """Looks at the longest request of a step on the host."""

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Bring the captured metadata up to date."""
        super().update_draft_decode_metadata(metadata)
        metadata.max_seq_len = int(metadata.seq_lens.max().item())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("cls", "rule", "field"),
    [(Forgets, "GP02", "seq_lens"), (Rebinds, "GP02", "seq_lens"), (ReadsOnHost, "GP20", None)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_update_between_draft_steps_that_does_not_reach_the_graph_is_found(
    cls: type[Builder], rule: str, field: str | None
) -> None:
    """Each way to miss the captured tensors in an update of a draft has its rule and its field."""
    found = findings_of(cls, "draft_decode-")
    assert {finding.rule for finding in found} == {rule}
    if field is not None:
        assert field in str(found[0].field)
        assert "step 0 of the draft" in str(found[0].field)


def test_a_builder_without_updates_in_graphs_drafts_eagerly() -> None:
    """Without the update method, ``build_for_drafting`` makes each step, and no drafts are captured."""

    class Eager(Builder):
        supports_draft_decode_metadata_update = False

    (plan,) = [plan for plan in Builders(Eager).lanes(QUICK) if str(plan).startswith("draft_decode-")]
    results = list(examine_lane(plan.of("", Builders(Eager).experiments), QUICK))
    by_rule = {result.rule: result.outcome for result in results}
    assert by_rule[None] is Outcome.PASS
    assert by_rule["GP02"] is Outcome.UNSUPPORTED


# -- decodes of different lengths ------------------------------------------------------------------------


class OfLengths(Builder):
    """Declares graphs for decodes of 1 to 1 + K tokens."""

    support = Support.UNIFORM_BATCH

    def get_varlen_cudagraph_max_query_len(self, vllm_config: Any, kv_cache_spec: Any) -> int:
        """Return the most tokens of a request."""
        return 1 + int(vllm_config.num_speculative_tokens)


class OfHostLengths(OfLengths):
    """Takes the tokens of each request from the host, which knows only their total."""

    def build(self, prefix: int, common: CommonAttentionMetadata, fast_build: bool = False) -> Metadata:
        """Return the metadata of a step."""
        metadata = super().build(prefix, common, fast_build)
        self.starts = torch.zeros(len(self.lens) + 1, dtype=torch.int32)
        metadata.query_start_loc = self.starts[: common.num_reqs + 1]
        metadata.query_start_loc.copy_(common.query_start_loc_cpu)
        return metadata


def test_declared_graphs_of_different_lengths_are_checked() -> None:
    """A builder with ``get_varlen_cudagraph_max_query_len`` gets a lane of such decodes, and passes it."""
    assert findings_of(OfLengths, "-varlen") == []


def test_lengths_from_the_host_are_wrong_in_graphs_of_different_lengths() -> None:
    """The host's offsets share the tokens evenly, so a builder that takes them is found."""
    found = findings_of(OfHostLengths, "-varlen")
    assert found
    assert "query_start_loc" in str(found[0].help)


def test_a_builder_that_declares_no_graphs_of_different_lengths_has_no_lane_of_them() -> None:
    """Without the class method, or with a bound below the lane's, there is no such lane."""
    names = [str(plan) for plan in Builders(Builder).lanes(QUICK)]
    assert not any("varlen" in name for name in names)


# -- declared support ----------------------------------------------------------------------------------


class Humble(Builder):
    """Declares only graphs of single-token decodes, but supports more."""

    support = Support.UNIFORM_SINGLE_TOKEN_DECODE


def test_support_that_works_and_is_not_declared_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A normal run tries graphs beyond the declaration, and names those that keep every rule."""
    adapter = Builders(Humble)
    monkeypatch.setattr(type(adapter), "lanes", lambda *_: [])
    monkeypatch.setattr("graphpact_conformance.suite.adapter._imported", lambda _: adapter)
    catalog = PluginCatalog.scan()
    (target,) = targets(["adapter:vllm:here:Humble"], catalog)
    plugin = examine(target, Options(shrink=False), _Listener())
    told = " ".join(plugin.hints)
    assert "UNIFORM_BATCH" in told
    assert "ALWAYS" in told


def test_declared_support_that_does_not_hold_fails() -> None:
    """A builder that declares more than it can capture fails in the lanes of its declaration."""

    class Boasts(Builder):
        support = Support.UNIFORM_BATCH

        def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Metadata:
            if common.max_query_len > 1:
                raise NotImplementedError("one token per request")
            return self.build(0, common)

    found = findings_of(Boasts, "target_verify-")
    assert {finding.rule for finding in found} == {None}
    assert "one token per request" in found[0].actual
    assert "test_vllm_lanes.py" in str(found[0].raised_at)


def test_padding_rows_and_dummies_are_those_of_the_model_runner() -> None:
    """Padding rows have no query, no key and no slot; dummies share their tokens evenly."""
    seen: list[CommonAttentionMetadata] = []

    class Looks(Builder):
        def build(self, prefix: int, common: CommonAttentionMetadata, fast_build: bool = False) -> Metadata:
            copies = {n: v.clone() for n, v in vars(common).items() if isinstance(v, torch.Tensor)}
            seen.append(common.replace(**copies))
            return super().build(prefix, common, fast_build)

    assert findings_of(Looks, "target_verify-") == []
    padded = [c for c in seen if c.num_reqs > 1 and int(c.seq_lens[-1]) == 0 and int(c.seq_lens[0]) > 0]
    assert padded
    for common in padded:
        dead = common.seq_lens == 0
        total = int(common.query_start_loc[-1])
        assert bool((common.naive_query_lens()[dead] == 0).all())
        assert bool((common.block_table_tensor[dead] == 0).all())
        assert bool((common.slot_mapping[total:] == -1).all())
        assert bool((common.slot_mapping[:total] >= 0).all())
        assert total < common.num_actual_tokens
        assert bool((common.seq_lens_cpu_upper_bound >= common.seq_lens).all())
    dummies = [c for c in seen if c.seq_lens.any() and bool((c.slot_mapping == -1).all())]
    assert dummies
    for common in dummies:
        assert common.naive_query_lens().tolist() == common.seq_lens.tolist()
        assert common.max_seq_len > int(common.seq_lens.max())


# -- windows -------------------------------------------------------------------------------------------


def windowed(make: Callable[..., object]) -> list[Finding]:
    """Return the findings of the plain decode lane with a window in every second layer."""
    adapter = Builders(make, kind="sliding_window")
    (plan,) = [plan for plan in adapter.lanes(QUICK) if str(plan) == "decode-page16-gqa-float32"]
    results = list(examine_lane(plan.of("", adapter.experiments), QUICK))
    assert all(result.outcome in (Outcome.PASS, Outcome.FAIL) for result in results)
    return [finding for result in results for finding in result.findings]


def test_builders_of_layers_with_windows_are_checked() -> None:
    """The group with a window has a spec with it, and block 0 for the blocks before it; right ones pass."""
    specs, tables = set[tuple[str, int | None]](), list[torch.Tensor]()

    class Windowed(Builder):
        """Checks its spec and its block tables."""

        def __init__(self, spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
            """Keep the window."""
            super().__init__(spec, layer_names, vllm_config, device)
            specs.add((layer_names[0], spec.sliding_window))
            self.window = spec.sliding_window

        def build(self, prefix: int, common: CommonAttentionMetadata, fast_build: bool = False) -> Metadata:
            """Return the metadata of a step."""
            if self.window is not None and common.num_reqs:
                tables.append(common.block_table_tensor[common.seq_lens > 2 * self.window + 16].clone())
            return super().build(prefix, common, fast_build)

    assert windowed(Windowed) == []
    assert len({window for _, window in specs}) == 2
    assert None in {window for _, window in specs}
    long = torch.cat([table for table in tables if len(table)])
    assert bool((long[:, 0] == 0).all())
    assert bool((long > 0).any())


def test_a_table_of_windows_that_only_captures_write_is_found() -> None:
    """A builder that copies the blocks of its window only at captures reads wrong blocks at a replay."""

    class KeepsTable(Builder):
        """Copies block tables in captures, and in eager steps."""

        def __init__(self, spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
            """Allocate the builder's own table."""
            super().__init__(spec, layer_names, vllm_config, device)
            blocks = -(-vllm_config.model_config.max_model_len // spec.block_size)
            self.table = torch.zeros(len(self.lens), blocks, dtype=torch.int32)
            self.captured = 0

        def build(self, prefix: int, common: CommonAttentionMetadata, fast_build: bool = False) -> Metadata:
            """Return metadata with the table, which is not written after a capture."""
            metadata = super().build(prefix, common, fast_build)
            metadata.block_table = self.table[: common.num_reqs]
            if not self.captured:
                metadata.block_table.copy_(common.block_table_tensor)
            return metadata

        def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Metadata:
            """Return the metadata that a graph keeps."""
            self.captured += 1
            return self.build(0, common)

    found = windowed(KeepsTable)
    assert "GP02" in {finding.rule for finding in found}
    assert any("block_table" in str(finding.field) for finding in found)
