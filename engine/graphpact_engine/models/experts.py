"""Keeps padding tokens away from the experts of a transformers model.

A graph computes padding rows too, and their routing would read weights of more experts and compute more rows.
So a batch carries the number of its real tokens, and the rows after them go to no expert, whatever they hold:

    grouped_mm    their index is that of no expert, which transformers skips: expert parallelism marks so the
                  tokens of other ranks
    others        their hidden states and weights are 0

In both cases the routed part of their output is exactly 0, also where their hidden states are NaN.

Does not: route, or change what experts compute for real tokens. It leaves experts alone that transformers
calls in another way, such as Llama 4's, which compute every token with all experts.
"""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_active = threading.local()  # torch.compile can trace it, and not a context variable
_NUM_INPUTS = 3  # hidden states [T, H], indices of experts [T, top_k], weights [T, top_k]


def mask_experts(model: Any) -> bool:
    """Make the experts of a transformers model compute no padding inside `routing`.

    Returns:
        Whether the model has experts that transformers calls with indices and weights.
    """
    found = False
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "experts":
            continue
        names = tuple(inspect.signature(module.forward).parameters)
        if len(names) != _NUM_INPUTS:
            continue
        found = True
        if any(isinstance(hook, _SkipPadding) for hook in module._forward_pre_hooks.values()):  # noqa: SLF001  torch has no other list of them
            continue  # another model on the same weights
        module.register_forward_pre_hook(_SkipPadding(names), with_kwargs=True)
        if hasattr(module, "_is_expert_parallel"):  # older transformers skip no index
            module._is_expert_parallel = True  # noqa: SLF001  transformers has no other switch
    return found


@contextmanager
def routing(num_tokens: int, count: torch.Tensor | None) -> Iterator[None]:
    """Let the first ``count`` of ``num_tokens`` tokens of the forward pass inside reach experts.

    Args:
        num_tokens: Rows of the forward pass.
        count: ``[1]`` int32 on the device; None: all rows are real.
    """
    before = getattr(_active, "padding", None)
    _active.padding = None
    if count is not None:
        _active.padding = (torch.arange(num_tokens, device=count.device) >= count)[:, None]
    try:
        yield
    finally:
        _active.padding = before


class _SkipPadding:
    """A forward hook of experts: gives them inputs in which padding rows are routed nowhere.

    Args:
        names: The names of their inputs.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        padding: torch.Tensor | None = getattr(_active, "padding", None)
        if padding is None:
            return None
        named = (kwargs[name] for name in self._names[len(args) :])
        hidden, index, weights = (*args, *named)
        if _skips_indices(module):
            index = index.masked_fill(padding, module.num_experts)
        else:
            hidden = hidden.masked_fill(padding, 0)
        return (hidden, index, weights.masked_fill(padding, 0)), {}


def _skips_indices(module: Any) -> bool:
    """Return whether the implementation of the experts skips rows with an index outside of them."""
    config = getattr(module, "config", None)
    return (
        getattr(module, "_is_expert_parallel", False)
        and getattr(config, "_experts_implementation", None) == "grouped_mm"
    )
