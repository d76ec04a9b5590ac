"""Compare a backend in one configuration with the oracle, with the suite's experiments (`hold_to_oracle`).

Does not: decide about rules; `graphpact check` does that.
"""

from typing import Any

import torch

from graphpact.attention import AttentionBackend
from graphpact_conformance.draws.batches import draw
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.experiments import outputs, replay_order
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.results import Finding


def findings_of(
    backend: type[AttentionBackend],
    config: Config,
    *,
    strict: bool = True,
    max_examples: int = 3,
    **lane: Any,
) -> list[Finding]:
    """Run drawn batches eagerly, replayed and strictly replayed; return all differences from the oracle.

    Args:
        backend: The backend's class.
        config: One of ``configs_of(backend.capabilities)``.
        strict: Whether to replay the batches on a strict tape too.
        max_examples: Sequences of batches to draw.
        lane: Other arguments of `LaneUnderTest`: driver, provider, device.
    """
    under_test = LaneUnderTest(config, backend, **lane)
    captured = bool(under_test.rig().lane.shapes)
    found: list[Finding] = []
    with torch.inference_mode():
        for steps in draw(config, max_examples, 0):
            found += outputs.answers_eagerly(under_test, steps)
            if captured:
                found += outputs.answers_replayed(under_test, steps)
            if captured and strict:
                found += replay_order.strict_replays(under_test, steps)
    return found


def hold_to_oracle(backend: type[AttentionBackend], config: Config, **more: Any) -> None:
    """Assert that `findings_of` returns no difference."""
    found = findings_of(backend, config, **more)
    assert not found, "\n".join(f.model_dump_json(indent=1) for f in found)
