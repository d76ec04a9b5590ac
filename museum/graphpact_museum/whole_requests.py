"""Exhibits of requests over several steps: what a plugin keeps of them is wrong in a later step: GP02, GP10.

A lane whose cache is loaded before every step shows none of these bugs.

Does not: contain the correct backends; see `graphpact_museum.variants.requests`.
"""

from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact_museum.edits.override import override, overrides
from graphpact_museum.exhibit import exhibit
from graphpact_museum.variants.requests import CopiesKeys, KeepsRows


@exhibit("GP10", "weicj/vLLM-2080Ti-Definitive#106", on="reference", lanes="decode")
def values_copied_only_by_eager_steps(_: type[Any]) -> type[Any]:
    """A second copy of values is not written during a capture, so replays leave it out; keys are copied."""

    def copy_values(self: Any, right: Any, *args: Any) -> None:
        if self.driver is None or not self.driver.is_capturing:
            right(*args)

    def is_valid(_: Any, __: Any, keys: torch.Tensor, cached: torch.Tensor, *___: Any) -> torch.Tensor:
        return keys[:, :, :1, :1] == cached[:, :, :1, :1]

    return override(CopiesKeys, copy_values, is_valid)


@exhibit("GP02", "gittensor-ai-lab/sparkinfer#150", on="reference", lanes="decode")
@overrides("are_same", of=KeepsRows)
def kept_row_of_a_request_that_ended(
    _: Any, __: Any, kept: torch.Tensor, asked: torch.Tensor, lens: torch.Tensor
) -> torch.Tensor:
    """A row goes on if its length is one more and its first KV slot is the same; another request can have
    both.
    """
    del lens
    return kept[:, 0] == asked[:, 0]


@exhibit("GP02", "kekzl/imp#496", on="reference", lanes="decode")
@overrides("next_slot", of=KeepsRows)
def kept_row_does_not_reach_the_next_page(
    _: Any, __: Any, kept: torch.Tensor, view: ForwardBatch
) -> torch.Tensor:
    """A row that is kept gets the KV slot after its last one, also where a page ends."""
    before = (view.seq_lens - 2).clamp(min=0)[:, None]
    return torch.where(view.seq_lens[:, None] > 1, kept.gather(1, before) + 1, view.out_cache_loc[:, None])
