"""The words of findings about other engines' code: what is missing, too small, or wrongly read."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from adapter_checks import findings_of
from sglang_backends import LANES, PagedBackend, SlotsBackend, under_test
from test_vllm_lanes import QUICK, Builder, Support

from graphpact.errors import ConfigError
from graphpact_adapters.sglang import Backends
from graphpact_adapters.vllm import Builders
from graphpact_conformance.suite.adapter import Adapter


def reasons_of(subject: Adapter) -> Iterator[tuple[str, str | None]]:
    """Yield the kind of each lane of a quick run, and why it has no graphs."""
    for plan in subject.lanes(QUICK):
        yield str(plan).partition("-")[0], plan.lane.no_graphs_declared


class WithoutUpdates(Builder):
    """A builder without the method that updates metadata between the steps of a draft."""

    update_draft_decode_metadata = property()  # type: ignore[assignment]
    supports_draft_decode_metadata_update = False


class OfDecodes(Builder):
    """A builder of graphs for one token per request."""

    support = Support.UNIFORM_SINGLE_TOKEN_DECODE


def test_graphs_that_a_builder_lacks_are_named_by_its_method() -> None:
    """A lane without graphs says which method is missing, or which support vLLM is told."""
    missing = dict(reasons_of(Builders(WithoutUpdates)))["draft_decode"]
    assert "WithoutUpdates has no method update_draft_decode_metadata" in str(missing)
    told = dict(reasons_of(Builders(OfDecodes)))["target_verify"]
    assert "OfDecodes declares the graph support UNIFORM_SINGLE_TOKEN_DECODE" in str(told)
    assert "need UNIFORM_BATCH" in str(told)


def test_extends_of_sglang_run_without_graphs_by_its_rules() -> None:
    """SGLang captures no extends; a mode that graph_modes leaves out is named. No level of ours is."""
    plain, narrow = PagedBackend, Backends(PagedBackend, graph_modes=frozenset())
    found = dict(reasons_of(under_test(plain)))
    assert "SGLang captures no graph of extend" in str(found["extend"])
    assert found["decode"] is None
    assert "graph_modes of Backends leaves out decode" in str(dict(reasons_of(narrow))["decode"])


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda runner, more: None, "makes no backend: TypeError"),
        (lambda runner: object(), "makes a object, which has no init_forward_metadata"),
        (Builder, "makes no backend: TypeError"),
    ],
)
def test_a_class_that_is_no_backend_is_one_line(made: Any, says: str) -> None:
    """A wrong class or factory is refused with one line that says what it is called with."""
    with pytest.raises(ConfigError) as caught:
        list(Backends(made).lanes(QUICK))
    assert says in caught.value.message
    assert "\n" not in caught.value.message
    assert "model runner" in str(caught.value.hint)


class ListsAllKeys(SlotsBackend):
    """A backend whose lists contain the new keys of an extend, as FlashInfer's do."""

    def write(self, metadata: Any, batch: Any) -> None:
        """Write offsets and slots of all keys."""
        super().write(metadata, batch)
        mode = batch.forward_mode
        if mode.is_extend() and not mode.is_target_verify():
            lens = batch.seq_lens[: batch.batch_size]
            metadata.kv_indptr[1:].copy_(lens.cumsum(0))
            self.write_slots(metadata, batch, lens)


def test_a_list_with_new_keys_needs_another_reader() -> None:
    """The default reader refuses a list of another form by its name, and does not blame the metadata."""
    (finding, *_) = findings_of(under_test(ListsAllKeys, page_sizes=(1,)), "extend-page1-*float32")
    assert finding.rule is None
    assert "kv_indptr counts all keys of each request, as FlashInfer's lists do" in finding.actual
    assert "write a reader" in str(finding.help)


class WorkspaceOfFew(PagedBackend):
    """A backend with a workspace of half the requests, into which a replay copies all lengths."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.workspace = self.int32(max(1, max_bs // 2))

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Copy the lengths of a replay first."""
        if not in_capture:
            self.workspace[: batch.batch_size].copy_(batch.seq_lens)
        super().refresh(metadata, batch, in_capture=in_capture)


def test_an_error_of_a_small_buffer_in_a_replay_is_one_of_its_size() -> None:
    """A replay that raises, but does not with more room, breaks GP13; the finding has the line."""
    found = [f for f in findings_of(under_test(WorkspaceOfFew), LANES["decode"]) if f.rule == "GP13"]
    assert found
    assert "RuntimeError" in found[0].actual
    assert "WorkspaceOfFew.refresh" in str(found[0].raised_at)
    assert found[0].field == "a buffer of the backend"


class OffsetsOfTheDummy(PagedBackend):
    """A backend whose offsets are wrong in captures alone."""

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Write offsets that end after the last query, in a capture."""
        super().refresh(metadata, batch, in_capture=in_capture)
        step = 2 if in_capture else 1
        metadata.cu_seqlens_q.copy_(torch.arange(len(metadata.cu_seqlens_q)) * step)


def test_wrong_offsets_in_a_capture_are_no_illegal_work() -> None:
    """What a kernel refuses in a capture has the rule of the refusal, and no help about graph_modes."""
    found = findings_of(under_test(OffsetsOfTheDummy), LANES["decode"])
    captures = [each for each in found if each.experiment == "captures_dummies"]
    assert captures
    assert {each.rule for each in captures} <= {"GP04", "GP05", "GP07", "GP13"}
    assert not [each for each in captures if "graph_modes" in str(each.help)]
