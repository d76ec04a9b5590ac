"""Collectives of ``torch.distributed`` in words that drivers and ranks share.

Does not: call one, or import ``torch.distributed``, which some builds of torch lack.
"""

import torch

NAMESPACES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::")
"""The namespaces of operators that communicate through ``torch.distributed``."""


def shape_and_dtype(tensor: torch.Tensor) -> str:
    """Return shape and dtype of a tensor as text, such as ``[2, 64] float32``."""
    return f"{list(tensor.shape)} {str(tensor.dtype)[6:]}"
