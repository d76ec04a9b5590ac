"""`WithHidden`: a runner whose graphs read a field of its own, ``acme.hidden`` of `ForwardBatch.extra`.

Does not: require the field: the slot is optional, and holds zeros in a step whose batch has none.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from recipes.runner import AttentionOutside

from graphpact import ForwardBatch, GraphShape, GraphSlot, PaddingPolicy

WIDTH = 8
"""Columns of the field."""


class WithHidden(AttentionOutside):
    """A runner with one more static input than the mode has."""

    def slots(self) -> Sequence[GraphSlot]:
        """Return the inputs of the mode and one more; a list of one's own would lack some of a lane's."""
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
