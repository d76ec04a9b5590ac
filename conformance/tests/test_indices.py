"""Padding rows and dummies that a consumer indexes with: fields of the contract, and indices by their use."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphpact.batch import ForwardMode
from graphpact.buffers import GraphSlot
from graphpact.shapes import GraphShape
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.experiments.indices import _Indices
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.results import Finding
from graphpact_conformance.suite import examine_lane, planned_lanes
from graphpact_conformance.targets import Options

OPTIONS = Options(size="quick", examples=1, shrink=False)


def findings(
    experiment: str,
    case: Case,
    backend: type[ReferenceBackend] = ReferenceBackend,
    runner: type[ReferenceRunner] = ReferenceRunner,
) -> list[Finding]:
    """Return the findings of one experiment in the plain lane of a kind of step."""
    kind: Any = "attention_backend" if runner is ReferenceRunner else "runner"
    plans = planned_lanes(backend, runner, OPTIONS, kind=kind, values=())
    plan = next(plan for plan in plans if plan.lane.config.case == case)
    chosen = [each for each in EXPERIMENTS if each.name == experiment]
    return [f for result in examine_lane(plan, OPTIONS, experiments=chosen) for f in result.findings]


# -- the watch ---------------------------------------------------------------------------------------


def test_a_negative_index_is_noted_where_torch_counts_it_from_the_end() -> None:
    """Reads and writes by a negative number are noted; masks, and indices from 0, are not."""
    rows, at = torch.arange(4.0), torch.tensor([0, -2])
    with _Indices() as seen:
        rows[at.clamp(min=0)]
        rows[rows > 1]
        assert not seen.found
        rows[at]
        rows[at] = 1.0
        torch.take(rows, at)
    assert [each.values for each in seen.found.values()] == [[-2]] * 3
    assert all(each.tensor is at for each in seen.found.values())


def test_the_second_run_gives_0_in_place_of_negative_numbers() -> None:
    """The step to compare with indexes with 0, and the index itself keeps its numbers."""
    rows, at = torch.arange(1.0, 5.0), torch.tensor([2, -1])
    with _Indices(replaces=True):
        assert rows[at].tolist() == [3.0, 1.0]
    assert at.tolist() == [2, -1]


# -- by use ------------------------------------------------------------------------------------------


def scaled(scale_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> type[ReferenceBackend]:
    """Return a backend that scales results by a table, in which padding tokens have row -1."""

    class Scaled(ReferenceBackend):
        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> torch.Tensor:
            out = super().forward(q, k, v, layer, metadata)
            scales = torch.arange(3, device=out.device) < 2
            rows = (metadata.out_cache_loc > 0).long() - 1
            return out * scale_of(scales.to(out.dtype), rows)[:, None, None]

    return Scaled


def test_a_negative_index_of_padding_tokens_that_changes_a_result_is_gp04() -> None:
    """The finding is about the padding rows, not also about the dummy, and names the line of the index."""
    (found,) = findings("indices", Case(ForwardMode.DECODE), scaled(lambda scales, rows: scales[rows]))
    assert found.rule == "GP04"
    assert "test_indices.py" in (found.field or "")
    assert found.actual.startswith("-1")


@pytest.mark.parametrize(
    "scale_of",
    [
        lambda scales, rows: torch.where(rows < 0, 1, scales[rows.clamp(min=0)]),
        lambda scales, rows: torch.where(rows < 0, 1, scales[rows]),
    ],
    ids=["before", "after"],
)
def test_a_sentinel_that_is_masked_before_or_after_indexing_is_right(scale_of: Any) -> None:
    """No result depends on the row at the end, so -1 is a legal sentinel."""
    assert not findings("indices", Case(ForwardMode.DECODE), scaled(scale_of))


def test_a_negative_index_of_live_rows_too_is_not_about_padding() -> None:
    """An operation that counts from the end in every batch means to."""

    class FromTheEnd(ReferenceBackend):
        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> torch.Tensor:
            out = super().forward(q, k, v, layer, metadata)
            return out.flip(0)[-1 - torch.arange(len(out), device=out.device)]

    assert not findings("indices", Case(ForwardMode.DECODE), FromTheEnd)


# -- by the contract ---------------------------------------------------------------------------------


def accepting(value: int, *, dummy: bool) -> type[ReferenceRunner]:
    """Return a runner whose padding rows or dummies have ``value`` accepted drafts."""

    class Accepting(ReferenceRunner):
        def slots(self) -> Any:
            declared = super().slots()
            return declared if dummy else [_padded(slot, value) for slot in declared]

        def dummy(self, shape: GraphShape) -> Any:
            batch = super().dummy(shape)
            if dummy and batch.num_correct_drafts is not None:
                batch.num_correct_drafts = torch.full_like(batch.num_correct_drafts, value)
            return batch

    return Accepting


def _padded(slot: GraphSlot, value: int) -> GraphSlot:
    return replace(slot, pad_value=value) if slot.name == "num_correct_drafts" else slot


@pytest.mark.parametrize(("experiment", "rule"), [("padding", "GP04"), ("dummies", "GP11")])
def test_accepted_drafts_select_a_row_of_their_request(experiment: str, rule: str) -> None:
    """A negative number of accepted drafts selects a row of another request, without an error."""
    case = Case(ForwardMode.DRAFT_EXTEND)
    found = findings(experiment, case, runner=accepting(-1, dummy=experiment == "dummies"))
    assert any(each.rule == rule and "num_correct_drafts" in (each.field or "") for each in found)


# -- rows of live tokens -----------------------------------------------------------------------------


def test_padding_tokens_that_copy_a_live_row_are_gp04_in_every_lane_of_prefill() -> None:
    """A clamped index is seen without luck: whatever the token ids of live and padding rows are."""

    class Copies(ReferenceBackend):
        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> torch.Tensor:
            out = super().forward(q, k, v, layer, metadata)
            live = metadata.out_cache_loc > 0
            last = (live.long().sum() - 1).clamp(min=0)
            return torch.where(live[:, None, None], out, out.index_select(0, last[None]))

    found = findings("padding", Case(ForwardMode.EXTEND), Copies)
    assert {each.rule for each in found} == {"GP04"}
    assert "bit by bit" in found[0].actual


def test_padding_rows_that_hold_a_number_made_from_live_rows_are_right() -> None:
    """A scale over live rows makes padding rows depend on them, but not equal to one."""

    class Scale(ReferenceBackend):
        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> torch.Tensor:
            out = super().forward(q, k, v, layer, metadata)
            live = (metadata.out_cache_loc > 0)[:, None, None]
            return torch.where(live, out, out.masked_fill(~live, 0).abs().amax())

    assert not findings("padding", Case(ForwardMode.EXTEND), Scale)
