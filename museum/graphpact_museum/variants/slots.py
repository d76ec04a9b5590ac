"""`own_slot`: declares a slot of a variant."""

from typing import Any

import torch

from graphpact.buffers import GraphSlot, PaddingPolicy

CPU = torch.device("cpu")


def own_slot(name: str, *shape: Any, **more: Any) -> GraphSlot:
    """Return a slot with a length for each request; ``more`` replaces attributes of it."""
    declared: dict[str, Any] = {
        "axis": "bs",
        "role": "lengths",
        "padding_policy": PaddingPolicy.KEEP_PAD,
        "reason": "every step writes the rows that its kernels read",
        "owner": "variant",
        "copy_from_fb": False,
    }
    return GraphSlot(f"variant.{name}", *shape, **(declared | more))
