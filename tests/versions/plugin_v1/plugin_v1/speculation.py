"""`V1Repeat`: drafts that repeat the newest token of a request; the target verifies them.

Does not: draft well, except for text that repeats a token.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from graphpact import ForwardMode, SpeculationAlgorithm
from graphpact.speculation import DecodeStep, ExtendStep, LaneRole


class V1Repeat(SpeculationAlgorithm):
    """One lane, in which the target verifies a chain of ``num_draft_tokens - 1`` tokens."""

    lanes: ClassVar[Mapping[str, LaneRole]] = {
        "verify": LaneRole(ForwardMode.TARGET_VERIFY, "target", "cuda_graph"),
    }

    def state(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return one number for each request: the tokens that it accepted."""
        return {"accepted": ((1,), torch.int64)}

    def extend(self, step: ExtendStep) -> None:
        """Forget what an earlier request of the row accepted."""
        step.state["accepted"][step.batch.req_pool_indices] = 0

    def decode(self, step: DecodeStep) -> None:
        """Repeat the newest token, verify, and count."""
        drafts = step.token_ids[:, None].expand(-1, self.context.draft.num_draft_tokens - 1)
        verified = step.verify(drafts.contiguous(), None)
        step.state["accepted"][step.req_pool_indices, 0] += verified.num_correct_drafts
