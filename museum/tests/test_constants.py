"""Constants of a backend: right ones pass, and one that a step writes or should write is caught.

The right one is the museum's variant ``constant-in-a-slot``.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphpact import ForwardBatch, GraphShape, hookimpl
from graphpact.attention import Buffers
from graphpact_conformance import suite
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.results import Outcome, Result
from graphpact_conformance.targets import Options
from graphpact_museum.collection import VARIANTS

OPTIONS = Options(size="quick", examples=1, shrink=False)
RIGHT: type[Any] = next(v for v in VARIANTS if v.name == "constant-in-a-slot").make(ReferenceBackend)


class WritesInTheGraph(RIGHT):
    """A backend whose recorded work writes the constant."""

    def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Fill the metadata, and write the same values again."""
        super().fill_metadata(view, metadata)
        torch.arange(len(metadata.index), out=metadata.index)


class WritesInTheHook(WritesInTheGraph):
    """A backend whose replay hook writes the constant."""

    fill_is_device_only = False


class WritesAtCapture(RIGHT):
    """A backend whose capture hook writes a number of its shape into the constant, which all shapes share."""

    fill_is_device_only = False

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
        """Bind, and write."""
        metadata = RIGHT.init_metadata_capture(self, view=view, shape=shape)
        metadata.index.clamp_(max=shape.batch_size - 2)
        return metadata


class DependsOnTheBatch(RIGHT):
    """A backend whose kernel reads lengths from a constant, which holds the lengths of the capture."""

    fill_is_device_only = False

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> Any:
        """Write the last key of every token, once."""
        metadata = super().allocate_metadata(view, shape, buffers)
        self.fill_metadata(view, metadata)
        metadata.index.copy_(metadata.inner.last)
        return metadata

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Refresh the metadata, but not the constant."""
        return RIGHT.init_metadata_replay(self, view=view, shape=shape, captured=captured)

    def forward(self, *args: Any) -> torch.Tensor:
        """Attend up to the last key that the constant has."""
        *given, metadata = args
        inner = replace(metadata.inner, last=metadata.index)
        return ReferenceBackend.forward(self, *given, inner)


def results_of(backend: type[Any], case: str, *rules: str) -> list[Result]:
    """Return the results of the lane of a kind of step, for some rules or for all."""
    options = replace(OPTIONS, only=frozenset(rules))
    (plan,) = [
        plan
        for plan in suite.planned_lanes(backend, ReferenceRunner, OPTIONS)
        if str(plan.lane.config.case) == case and not plan.lane.config.unusual
    ]
    return list(suite.examine_lane(plan, options))


@pytest.mark.parametrize("case", ["decode", pytest.param("draft_decode", marks=pytest.mark.sweep)])
def test_a_constant_is_no_missed_refresh(case: str) -> None:
    """A slot of the role ``constant`` that no step writes breaks no rule about refreshes, even in drafts."""
    found = results_of(RIGHT, case, "GP02", "GP03", "GP09", "GP19")
    assert {r.outcome for r in found} == {Outcome.PASS}


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", [WritesInTheGraph, WritesInTheHook])
def test_a_write_to_a_constant_is_reported(backend: type[Any]) -> None:
    """A strict lane refuses work that writes a constant, even with the same values, and names the slot."""
    (found,) = results_of(backend, "decode", "GP19")
    assert found.outcome is Outcome.FAIL
    assert any("writes slot 'variant.index'" in finding.actual for finding in found.findings)


def test_a_constant_that_a_capture_writes_is_reported() -> None:
    """A strict lane refuses a capture that changes a constant, and names the slot."""
    (found,) = results_of(WritesAtCapture, "decode", "GP19")
    assert found.outcome is Outcome.FAIL
    assert any("wrote slot 'variant.index'" in finding.actual for finding in found.findings)


def test_a_constant_that_depends_on_the_batch_is_a_missed_refresh() -> None:
    """A constant with values of one batch is a finding of GP02 with the slot; the help defines constants."""
    (found,) = results_of(DependsOnTheBatch, "decode", "GP02")
    assert found.outcome is Outcome.FAIL
    (finding,) = [f for f in found.findings if "slot 'variant.index'" in str(f.field)]
    assert "a constant must be the same for every batch" in str(finding.help)


class OwnHook(ReferenceBackend):
    """A backend whose replay hook does not write the request of each token."""

    fill_is_device_only = False

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Refresh all but one tensor."""
        spare = replace(captured, request=captured.request.clone())
        ReferenceBackend.init_metadata_replay(self, view=view, shape=shape, captured=spare)
        return captured


class OwnBody(ReferenceBackend):
    """A backend whose second body does not write the request of each token."""

    fill_is_device_only = False

    def refresh_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Refresh all but one tensor."""
        self.fill_metadata(view, replace(metadata, request=metadata.request.clone()))


class OneBody(ReferenceBackend):
    """A backend with one body, which writes the request of each token only at the captures of two shapes."""

    fill_is_device_only = False
    calls = 0

    def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Fill the metadata, but after the captures not the request of each token."""
        self.calls += 1
        spare = replace(metadata, request=metadata.request.clone())
        super().fill_metadata(view, spare if self.calls > 2 else metadata)


class RecordedBody(ReferenceBackend):
    """A backend whose recorded body does not write the request of each token; its second body is right."""

    def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Fill the metadata, but in a capture not the request of each token."""
        assert self.driver is not None
        spare = replace(metadata, request=metadata.request.clone())
        super().fill_metadata(view, spare if self.driver.is_capturing else metadata)

    def refresh_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Refresh everything."""
        super().fill_metadata(view, metadata)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("backend", "body"),
    [
        (OwnHook, "init_metadata_replay"),
        pytest.param(OwnBody, "refresh_metadata", marks=pytest.mark.sweep),
        pytest.param(OneBody, "fill_metadata", marks=pytest.mark.sweep),
        (RecordedBody, "fill_metadata"),
    ],
)
def test_the_help_of_a_missed_refresh_names_the_body_and_the_role(backend: type[Any], body: str) -> None:
    """The help for an entry that a replay does not write names the method that ran and the slot's role."""
    (found,) = results_of(backend, "decode", "GP02")
    first = str(found.findings[0].help)
    assert f"write `request` in `{body}`" in first
    assert "role='constant'" in first
    told = " ".join(str(finding.help) for finding in found.findings)
    assert {*re.findall(r"init_metadata_replay|refresh_metadata|fill_metadata", told)} == {body}
