"""Keeps padding tokens away from the experts of a transformers model.

A graph computes padding rows too, and their routing would read weights of more experts and compute more rows.
So a batch carries the number of its real tokens, and the rows after them go to no expert, whatever they
contain:

    grouped_mm    they get the index of no expert, which transformers skips; expert parallelism marks tokens
                  of other ranks in the same way
    others        their hidden states and weights are 0

In both cases the routed part of their output is exactly 0, also where their hidden states are NaN.

Does not: route, or change what experts compute for real tokens. Experts that transformers calls in another
way stay unchanged, such as Llama 4's, which compute every token with all experts.
"""

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphpact import declare_kernel
from graphpact_engine.models.active import activated, active

_NUM_INPUTS = 4  # self, hidden states [T, H], indices of experts [T, top_k], weights [T, top_k]
_SKIPPING = "_is_expert_parallel"  # makes ``grouped_mm`` skip rows without an expert; not in transformers 5.0


def mask_experts(model: Any) -> bool:
    """Make the experts of a transformers model compute no padding inside `routing`.

    Returns:
        Whether the model has experts that transformers calls with indices and weights.
    """
    experts = [module for name, module in model.named_modules() if _is_dispatched(name, module)]
    for module in experts:
        if _skip_padding in module._forward_pre_hooks.values():  # noqa: SLF001  torch has no other list of them
            continue  # another `TransformersModel` uses the same weights
        module.register_forward_pre_hook(_skip_padding)
        if hasattr(module, _SKIPPING):
            setattr(module, _SKIPPING, True)
    # Compiled models call this operator instead of torch's grouped product, for dtypes that the latter lacks.
    # It reads offsets on the host. Older versions of transformers do not have it.
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if fallback is not None:
        declare_kernel(fallback)
    return bool(experts)


def routing(padding: torch.Tensor | None) -> AbstractContextManager[None]:
    """Keep rows of the forward pass inside the context away from experts.

    Args:
        padding: ``[rows, 1]`` bool: whether each row is padding; None if all rows are real.
    """
    return activated("padding", padding)


def _is_dispatched(name: str, module: Any) -> bool:
    """Return whether a module is called with hidden states, indices and weights of experts."""
    # A split module has a wrapper of any arguments in place of its own forward pass.
    parameters = inspect.signature(type(module).forward).parameters
    return name.endswith(".experts") and len(parameters) == _NUM_INPUTS


def _skip_padding(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    """Return inputs of experts that send padding rows to no expert; None if no row is padding."""
    padding: torch.Tensor | None = getattr(active, "padding", None)
    if padding is None:
        return None
    hidden, index, weights = inputs
    if getattr(module, _SKIPPING, False) and module.config._experts_implementation == "grouped_mm":  # noqa: SLF001  transformers has no other name for it
        index = index.masked_fill(padding, module.num_experts)
    else:
        hidden = hidden.masked_fill(padding, 0)
    return hidden, index, weights.masked_fill(padding, 0)
