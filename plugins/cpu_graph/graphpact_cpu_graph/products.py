"""Products of rows with a weight, which the compiled kernel computes.

A decode step multiplies a few rows with every weight of the model. The compiled kernel reads a weight once,
in the layout of the checkpoint. Torch's products are made for many rows and take up to three times as long.
`most_rows` says for how many rows the kernel is faster.

Does not: replace a product that torch computes faster, or one of float64 or float16.
"""

import functools
import logging
from typing import NamedTuple

import torch

from graphpact_kernels.compiled import load, most_rows
from graphpact_tape.recorder import RecordedCall

_log = logging.getLogger(__name__)

_aten = torch.ops.aten
_SMALLEST = 4096
"""The smallest number of elements of a weight. With a smaller weight nothing is gained, so torch computes the
same bits as in an eager run.
"""


class Product(NamedTuple):
    """``x @ weight + bias``: ``x`` ``[rows, n]``, ``weight`` ``[n, m]`` in column order, ``bias`` ``[m]``."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


@functools.cache
def _is_built() -> bool:
    fault = load()
    if fault is not None:
        _log.warning("cpu_graph uses torch's products instead of the compiled kernel: %s", fault)
    return fault is None


def product_of(call: RecordedCall) -> Product | None:
    """Return the product that the compiled kernel computes instead of ``call``, or None."""
    found = None
    if call.op is _aten.mm.default:
        x, weight = call.args
        found = Product(x, weight, None)
    elif call.op is _aten.addmm.default and not call.kwargs and call.args[0].dim() == 1:
        bias, x, weight = call.args
        found = Product(x, weight, bias)
    return found if found is not None and _fits(found) and _is_built() else None


def _fits(product: Product) -> bool:
    x, weight, bias = product
    is_transposed = weight.stride() == (1, weight.shape[0])
    is_large = weight.numel() >= _SMALLEST
    is_plain = x.device.type == "cpu" and x.dtype is weight.dtype and (bias is None or bias.dtype is x.dtype)
    return is_large and is_transposed and is_plain and x.shape[0] <= most_rows(x.dtype)
