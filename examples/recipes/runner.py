"""`AttentionOutside`: a runner whose graphs leave attention out (a breakable graph).

Every layer's attention is an eager call between two segments of the graph. No graph reads its metadata, so
any attention backend can serve it.

Does not: choose capture sizes; `DecodeRunner` captures the configured ones.
"""

from typing import Any

import torch

from graphpact import LayerSpec, RegionContext
from graphpact.attention import GraphSupport
from graphpact.runners import DecodeRunner
from graphpact.shapes import default_decode_batch_sizes
from graphpact.step import Forward, Region, StepOutputs


class AttentionOutside(DecodeRunner):
    """A runner of decode graphs, each with one more segment than there are layers."""

    needs = GraphSupport.NEVER
    eager_attention = True  # the lane makes new metadata in each step

    def default_batch_sizes(self) -> list[int]:
        """Return the request counts to capture if none are configured; the last is the largest step."""
        return default_decode_batch_sizes(self.context.limits.max_bs)

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return the region of a graph: one forward pass, broken at every layer."""

        def attend(
            q: torch.Tensor,
            k: torch.Tensor | None,
            v: torch.Tensor | None,
            layer: LayerSpec,
            metadata: Any,
        ) -> torch.Tensor:
            del metadata  # from the capture; `step.attend` reads the metadata of this replay
            return step.driver.eager_call(step.attend, q, k, v, layer)

        def region() -> StepOutputs:
            return forward(step.view, step.metadata, attend)

        return region
