"""`WithHidden`: a runner whose graphs read an additional field, ``acme.hidden`` of `ForwardBatch.extra`.

Does not: require the field. The slot is optional, and contains zeros in a step whose batch lacks the field.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from recipes.runner import AttentionOutside

from graphpact import ForwardBatch, GraphShape, GraphSlot, PaddingPolicy

WIDTH = 8
"""Columns of the field."""


class WithHidden(AttentionOutside):
    """A runner with one static input in addition to those of the mode."""

    def slots(self) -> Sequence[GraphSlot]:
        """Return the inputs of the mode and one more. A new list would lack inputs that a lane needs."""
        return [
            *super().slots(),
            GraphSlot(
                "acme.hidden",
                lambda _, tokens: (tokens, WIDTH),
                torch.float32,
                axis="tokens",
                padding_policy=PaddingPolicy.ZERO,
                optional=True,
                owner="acme",
            ),
        ]

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return the dummy of the mode with the field, so that the captured view has it."""
        batch = super().dummy(shape)
        hidden = torch.zeros(shape.num_tokens, WIDTH, device=batch.device)
        return replace(batch, extra={**batch.extra, "acme.hidden": hidden})
