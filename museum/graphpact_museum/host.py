"""Exhibits and variants of host memory: host tensors of the view, and copies to the host: GP02 to GP04, GP16.

Plans read host tensors in every step. The suite's own backend reads few of them, so wrong rows change no
output.

Does not: plant bugs in copies from the host; see `graphpact_museum.plans`.
"""

from dataclasses import replace
from typing import Any

import torch

from graphpact.buffers import GraphSlot, PaddingPolicy
from graphpact_museum.edits.override import overrides
from graphpact_museum.edits.runners import keeps, keeps_tails, pads
from graphpact_museum.exhibit import exhibit, variant

# -- host tensors of the view ------------------------------------------------------------------------


@exhibit("GP03", "sgl-project/sglang#22958", on="breakable_cuda_graph", lanes="extend")
def breakable_keeps_new_tokens_of_padding_on_the_host(base: type[Any]) -> type[Any]:
    """extend_seq_lens_cpu of padding rows is that of an earlier batch; on the device it is reset."""
    return keeps_tails(base, "extend_seq_lens_cpu")


@exhibit("GP04", "sgl-project/sglang#22958", on="reference_runner", lanes="mixed")
@pads("extend_seq_lens_cpu")
def mixed_runner_pads_new_tokens_on_the_host_with_one(_: Any, __: torch.Tensor) -> int:
    """Padding requests have one new token on the host, and none on the device."""
    return 1


@exhibit("GP02", "sgl-project/sglang#25512", on="reference_runner", lanes="extend")
def extend_runner_misses_new_tokens_on_the_host(base: type[Any]) -> type[Any]:
    """extend_seq_lens_cpu stays that of the capture; on the device it is that of the batch."""
    return keeps(base, "extend_seq_lens_cpu")


@variant(on="reference_runner", lanes="extend")
@overrides("slots")
def host_rows_kept_for_a_reason(_: Any, right: Any) -> list[GraphSlot]:
    """The new tokens on the host keep their padding rows, for a declared reason: plans read live rows."""
    keeps_rows = {
        "padding_policy": PaddingPolicy.KEEP_PAD,
        "pad_value": None,
        "reason": "plans read the rows of the batch only",
    }
    return [replace(slot, **keeps_rows) if slot.name == "extend_seq_lens_cpu" else slot for slot in right()]


@variant(on="reference_runner", lanes="extend")
@overrides("slots")
def host_lengths_of_32_bits(_: Any, right: Any) -> list[GraphSlot]:
    """The host lengths are int32, for a planner in C; those on the device are int64."""
    narrow = {"dtype": torch.int32, "narrows": True}
    return [replace(slot, **narrow) if slot.name.endswith("_cpu") else slot for slot in right()]
