"""`TieJudge`: whether two tokens are as good as equal where a model computes in bfloat16.

In bfloat16, ways that add in another order choose another token where two logits are close, and continue
with another text. That is no fault, and the work is the same. So the first difference is judged by the
logits of the same weights in float32: tokens that are far apart there are a fault of one of the ways.

Does not: judge float32, in which every difference is a fault.
"""

from typing import Any

import torch

from graphpact_bench.ways.base import WaySetting
from graphpact_bench.ways.generate import load_model

TIE = 0.25
"""Two logits are a tie if they differ by at most this share of the deviation of all logits. A bfloat16 has 8
bits; every operation of every layer rounds to them, and the errors add up."""


class TieJudge:
    """Judges the first difference between two ways: ``judge(tokens, one, other)``.

    Args:
        setting: The model, in bfloat16.
    """

    def __init__(self, setting: WaySetting) -> None:
        self.device = setting.device
        self.model: Any = load_model(setting).float()

    @torch.inference_mode()
    def __call__(self, tokens: list[int], one: int, other: int) -> bool:
        """Return whether ``one`` and ``other`` are as good as equal after ``tokens``."""
        ids = torch.tensor([tokens], device=self.device)
        logits = self.model(ids, logits_to_keep=1).logits[0, -1]
        return bool((logits[one] - logits[other]).abs() <= TIE * logits.std())
