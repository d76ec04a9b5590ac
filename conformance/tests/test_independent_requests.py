"""Each request of a batch has the outputs that it has alone, in regions that runners compose."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.runners import GraphRunner
from graphpact.shapes import GraphShape
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_conformance.experiments.independent_requests import independent_requests
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.results import Finding
from graphpact_conformance.suite import planned_lanes
from graphpact_conformance.targets import Options
from graphpact_speculative import EagleDraftExtendRunner, EagleDraftRunner, FrozenKvMtpRunner

OPTIONS = Options(size="quick")


def lane_of(runner: type[GraphRunner], kind: str) -> LaneUnderTest:
    """Return the plain lane of a runner and a kind of step."""
    options = replace(OPTIONS, lanes=(f"{kind}-page16-gqa-float32",))
    (plan,) = planned_lanes(ReferenceBackend, runner, options, kind="runner")
    return plan.lane


@torch.inference_mode()
def found(lane: LaneUnderTest) -> list[Finding]:
    """Return what the experiment finds in the first batches of a lane."""
    (steps,) = lane.drawn(1, 0)
    return [*independent_requests(lane, steps)]


Edit = Callable[[RegionContext, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def returning(base: type[GraphRunner], edit: Edit) -> type[GraphRunner]:
    """Return a runner whose region returns other tensors of the same names."""

    class Edited(base):  # type: ignore[misc, valid-type]
        def compose(self, forward: Forward, step: RegionContext) -> Region:
            """Return the region with edited outputs."""
            region: Region = super().compose(forward, step)

            def edited() -> StepOutputs:
                outputs = region()
                rows = edit(step, dict(outputs))
                given: dict[str, Any] = {name: (rows[name], axis) for name, axis in outputs.axes.items()}
                return StepOutputs(**given)

            return edited

    return Edited


def of_the_first(_: RegionContext, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the rows of the first request in place of those of every request."""
    return {name: tensor[:1].expand_as(tensor).clone() for name, tensor in rows.items()}


RIGHT = (
    (EagleDraftRunner, "draft_decode"),
    (EagleDraftRunner, "draft_decode_tree"),
    (EagleDraftExtendRunner, "draft_extend_tree"),
    (FrozenKvMtpRunner, "decode_frozen_tree"),
)


@pytest.mark.parametrize(("runner", "kind"), RIGHT)
def test_a_right_region_has_no_finding(runner: type[GraphRunner], kind: str) -> None:
    """The outputs of right regions do not depend on other requests, in chains and in trees."""
    assert not found(lane_of(runner, kind))


@pytest.mark.parametrize(("runner", "kind"), RIGHT)
def test_a_row_of_another_request_is_found(runner: type[GraphRunner], kind: str) -> None:
    """A region that returns the first request's rows for all is GP05, and another request is named."""
    (only,) = found(lane_of(returning(runner, of_the_first), kind))
    assert only.rule == "GP05"
    assert only.field is not None
    assert only.field.startswith(("a replay: request 1 of", "a replay: request 2 of"))
    assert "of the batch, output " in only.field
    assert "alone" in only.expected


def test_an_index_in_the_batch_is_no_finding() -> None:
    """An integer output may name requests or tokens of the batch, with -1 for none; another one may not."""

    def right(step: RegionContext, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        first = torch.arange(len(rows["next_tokens"])) * step.view.tokens_per_request
        return rows | {"next_tokens": torch.stack([first + 1, torch.full_like(first, -1)], dim=1)}

    def wrong(step: RegionContext, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shown = right(step, rows)
        return shown | {"next_tokens": 2 * shown["next_tokens"]}

    assert not found(lane_of(returning(EagleDraftExtendRunner, right), "draft_extend_tree"))
    (only,) = found(lane_of(returning(EagleDraftExtendRunner, wrong), "draft_extend_tree"))
    assert "next_tokens" in str(only.field)


def test_eager_steps_have_no_rule() -> None:
    """A region that takes rows of another request only in eager steps is a finding without a rule."""

    def edit(step: RegionContext, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return of_the_first(step, rows) if step.is_eager and step.view.batch_size > 1 else rows

    lane = lane_of(returning(EagleDraftExtendRunner, edit), "draft_extend")
    (only,) = found(lane)
    assert only.rule is None
    assert str(only.field).startswith("an eager run: request ")


def test_a_wrong_step_is_left_to_other_experiments() -> None:
    """A replay that disagrees with the oracle is not reported here, although requests alone are right."""

    class Misses(EagleDraftExtendRunner):
        def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
            """Copy the batch, with token 0 for all requests but the first."""
            super().populate(registry, batch, shape)
            width = shape.num_tokens // shape.batch_size
            registry.get_slot("input_ids").slice_for(shape.batch_size, shape.num_tokens)[width:] = 0

    assert not found(lane_of(Misses, "draft_extend"))


def test_pooling_over_the_batch_is_no_finding() -> None:
    """The model's column of pooling depends on the batch by design, and is left out."""
    lane = lane_of(EagleDraftExtendRunner, "draft_extend")
    assert not found(lane.like(replace(lane.config, counts=True, gathers=False)))
