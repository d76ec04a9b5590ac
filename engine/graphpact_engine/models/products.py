"""Products of eager steps on a CPU, by the compiled kernel where it was measured to be faster than torch's.

Both read the weight as it is in the checkpoint, so no copy becomes stale when it is changed in place. The
kernel is the operator ``graphpact_compiled::linear``, which an attention backend with compiled kernels loads.
Without it, torch multiplies.

It is called only in lanes without graphs. What is compared with a replay, such as a verified step, must run
the operations that were recorded, and a graph driver has its own choice.

Does not: change layers that are not plain ``torch.nn.Linear``, or the products of experts.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.step import Attend, Forward, StepOutputs
from graphpact_engine.models.active import activated, active

_Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

_SMALLEST = 4096
"""The smallest number of elements of a weight; with a smaller one nothing is gained."""
_KERNEL = "graphpact_compiled::linear"
_OPS: Any = torch.ops


class ChosenLinear(torch.nn.Linear):
    """A linear layer whose product is chosen inside `choosing`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  the name in torch
        """Return the product with the weight, and the bias added."""
        product: _Product = getattr(active, "product", None) or torch.nn.functional.linear
        return product(input, self.weight, self.bias)


PLAIN = (torch.nn.Linear, ChosenLinear)
"""The classes of linear layers that do nothing else."""


def choose_products(model: Any) -> None:
    """Let the plain linear layers of a model choose their product inside `choosing`.

    A layer that is split between ranks has a forward pass of its own, and stays as it is.
    """
    for module in model.modules():
        if type(module) is torch.nn.Linear and "forward" not in vars(module):
            module.__class__ = ChosenLinear


def choosing(product: _Product | None) -> AbstractContextManager[None]:
    """Let ``product`` compute the products of `ChosenLinear` layers inside the context; None for torch's."""
    return activated("product", product)


class EagerProducts:
    """The forward pass of a lane that always runs eagerly, with the products of the compiled kernel.

    Args:
        forward: The forward pass.
    """

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __call__(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return the outputs of ``batch``."""
        # The kernel has no derivative, and torch.compile has products of its own.
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not _is_loaded():
            return self.forward(batch, metadata, attend)
        with choosing(faster_product):
            return self.forward(batch, metadata, attend)


def faster_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` like ``torch.nn.functional.linear``, by the faster kernel."""
    rows = x.numel() // x.shape[-1]
    is_plain = x.dtype is weight.dtype and x.device.type == "cpu" and weight.is_contiguous()
    if not is_plain or weight.numel() < _SMALLEST or not 0 < rows <= _most_rows(weight.dtype):
        return torch.nn.functional.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    _OPS.graphpact_compiled.linear(x.reshape(rows, -1), weight, bias, out.view(rows, -1))
    return out


@functools.cache
def _most_rows(dtype: torch.dtype) -> int:
    """Return for how many rows the compiled kernel was measured to be faster, as its package says."""
    return int(_OPS.graphpact_compiled.most_rows(dtype))


def _is_loaded() -> bool:
    """Return whether the compiled kernel can be called."""
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(_KERNEL, "CPU")  # noqa: SLF001  no public name
    except RuntimeError:  # no such operator
        return False
