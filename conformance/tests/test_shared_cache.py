"""Attention without new keys and values: every mode calls it, and a backend that is wrong there is found."""

from typing import Any

import pytest
import torch

from graphpact.attention import AttentionBackend
from graphpact_conformance import suite
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.results import Finding
from graphpact_conformance.targets import Options

QUICK = Options(size="quick", shrink=False)
ALONE = [each for each in EXPERIMENTS if each.name == "without_new_keys"]
KINDS = (
    *("decode", "extend", "mixed", "target_verify", "target_verify_tree", "draft_decode"),
    *("draft_decode_tree", "draft_extend", "idle", "extend_segments"),
)


class Counts(ReferenceBackend):
    """The suite's backend, which notes the modes in which attention got no new keys."""

    seen: set[str] = set()  # noqa: RUF012  reset by each test

    def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> torch.Tensor:
        """Note the mode of the lane."""
        if k is None:
            self.seen.add(self.context.mode.value)
        return super().forward(q, k, v, layer, metadata)


class WritesAgain(ReferenceBackend):
    """Writes scaled keys of the layer before where a layer has none, into the cache that both share."""

    last: Any = None

    def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> torch.Tensor:
        """Attend with the keys of the layer before where there are none."""
        if k is None and self.last is not None:
            k, v = self.last
        elif k is not None:
            self.last = k * 2, v * 2
        return super().forward(q, k, v, layer, metadata)


def found(backend: type[AttentionBackend], kind: str) -> list[Finding]:
    """Return the findings of the experiment in the plain lane of a kind of step."""
    plans = suite.planned_lanes(backend, ReferenceRunner, QUICK, values=())
    (plan,) = [plan for plan in plans if str(plan.lane.config.case) == kind]
    results = list(suite.examine_lane(plan, QUICK, experiments=ALONE))
    assert results
    assert not [result.reason for result in results if result.outcome == "error"]
    return [finding for result in results for finding in result.findings]


@pytest.mark.parametrize("kind", KINDS)
def test_every_mode_has_a_layer_without_new_keys(kind: str) -> None:
    """In each kind of step of a backend alone attention gets None for both, and the right backend passes."""
    Counts.seen.clear()
    assert found(Counts, kind) == []
    assert len(Counts.seen) == 1


@pytest.mark.parametrize("kind", ["decode", "extend", "target_verify", "draft_extend"])
def test_a_layer_that_writes_keys_it_did_not_get_is_found(kind: str) -> None:
    """A layer without new keys that writes others is a finding, already in an eager step."""
    finding, *_ = found(WritesAgain, kind)
    assert finding.rule is None
    assert "layer without new keys" in finding.field if finding.field else False
    assert "k and v None" in str(finding.help)
