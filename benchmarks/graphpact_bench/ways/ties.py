"""`TieJudge`: decides whether two tokens are practically equal for a model in bfloat16.

In bfloat16, ways that add in another order choose another token where two logits are close, and continue
with another text. That is no fault, and the work is the same. So the first difference is judged by the logits
of the same weights in float32, and by the distance of transformers' logits in bfloat16 from them, which grows
with the number of layers. Tokens that are further apart are a fault of one of the ways.

Does not: judge float32, in which every difference is a fault.
"""

import copy
from typing import Any

import torch

from graphpact_bench.ways.base import WaySetting
from graphpact_bench.ways.generate import load_model

TIE = 6
"""Two logits are a tie if they differ by at most this many times the error of a logit in bfloat16. Each of
two ways has such an error in both logits, so together they have twice the error of one logit; this factor is
three times that."""


class TieJudge:
    """Judges the first difference between two ways: ``judge(tokens, one, other)``.

    Args:
        setting: The model, in bfloat16.
    """

    def __init__(self, setting: WaySetting) -> None:
        self.device = setting.device
        self.narrow: Any = load_model(setting)
        self.exact: Any = copy.deepcopy(self.narrow).float()

    @torch.inference_mode()
    def __call__(self, tokens: list[int], one: int, other: int) -> bool:
        """Return whether ``one`` and ``other`` are as good as equal after ``tokens``."""
        ids = torch.tensor([tokens], device=self.device)
        logits = self.exact(ids, logits_to_keep=1).logits[0, -1]
        error = (self.narrow(ids, logits_to_keep=1).logits[0, -1].float() - logits).square().mean().sqrt()
        return bool((logits[one] - logits[other]).abs() <= TIE * error)
