"""Multi-head latent attention (MLA) in absorbed form: heads that all attend over one cached latent.

An MLA layer of transformers keeps a latent of each token and multiplies it by ``kv_b_proj`` into keys and
values of every head before it attends. Absorbed, the two halves of that weight move to the other side: a
query is multiplied by the keys' half before it meets the latents, and what comes back of the latents by
the values' half after. Scores and outputs are the same; the cache holds a latent instead of all heads.

The seam is the layers' own method ``expand_kv``, which transformers has since 5.15; it is replaced while a
forward pass runs and stands as it was afterwards.

Does not: attend, or copy weights.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from graphpact_engine.errors import UnsupportedModelError

_EXPANDED = "an attention backend without MLA runs it expanded, with keys and values of every head"


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """The halves of the weight with which an MLA layer expands latents.

    Args:
        key_up: ``[heads, qk_nope_head_dim, kv_lora_rank]``: from the latent to the keys.
        value_up: ``[heads, v_head_dim, kv_lora_rank]``: from the latent to the values.
    """

    key_up: torch.Tensor
    value_up: torch.Tensor

    @property
    def kv_lora_rank(self) -> int:
        """Width of the latent."""
        return self.key_up.shape[2]

    def absorb_query(self, q: torch.Tensor) -> torch.Tensor:
        """Return ``[T, heads, rank + rope]``, which meets latents, of ``[T, heads, nope + rope]``."""
        width = self.key_up.shape[1]
        latent = torch.einsum("thn,hnr->thr", q[..., :width], self.key_up)
        return torch.cat((latent, q[..., width:]), dim=-1)

    def expand_output(self, out: torch.Tensor) -> torch.Tensor:
        """Return ``[T, heads, v_head_dim]`` of ``[T, heads, rank]``."""
        return torch.einsum("thr,hvr->thv", out, self.value_up)


def latent_modules(model: Any) -> list[Any]:
    """Return the MLA attention modules of a transformers model, in the order of its layers."""
    return [m for m in model.modules() if hasattr(m, "kv_lora_rank") and hasattr(m, "kv_b_proj")]


def latent_layers(model: Any) -> dict[Any, LatentLayer]:
    """Return every MLA layer of ``model`` by its attention module; none for a model without MLA.

    Raises:
        UnsupportedModelError: The installed transformers has no seam in this model, or a layer's
            ``kv_b_proj`` is no plain linear map, so that it has no halves to move.
    """
    return {module: _latent_layer(module) for module in latent_modules(model)}


@contextmanager
def latents_as_keys(modules: Iterable[Any]) -> Iterator[None]:
    """Have MLA ``modules`` attend over latents while the context is open.

    Their one key head is then ``[1, 1, T, rank + rope]``, its value the first ``rank`` of it.
    """
    modules = list(modules)
    for module in modules:
        module.expand_kv = _join
    try:
        yield
    finally:
        for module in modules:
            del module.expand_kv


def _join(kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for a module's ``expand_kv``: the latent and the rotated key are one key."""
    key = torch.cat((kv_nope, k_rot), dim=-1)
    return key, key[..., : kv_nope.shape[-1]]


def _latent_layer(module: Any) -> LatentLayer:
    name = type(module).__name__
    if not hasattr(module, "expand_kv"):
        raise UnsupportedModelError(
            f"{name} of transformers {transformers.__version__} has no expand_kv, without which its latents"
            " cannot be attended over",
            hint=f'pip install "transformers>=5.15", or: {_EXPANDED}',
        )
    up = module.kv_b_proj
    weight: Any = getattr(up, "weight", None)
    bias = getattr(up, "bias", None)
    for part, plain in ((up, torch.nn.Linear), (weight, torch.nn.Parameter)):
        if type(part) is not plain:
            raise UnsupportedModelError(
                f"{name}: kv_b_proj is a {type(part).__name__}; only a plain Linear can be absorbed",
                hint=_EXPANDED,
            )
    if bias is not None:
        raise UnsupportedModelError(
            f"{name}: kv_b_proj has a bias, which cannot be absorbed", hint=_EXPANDED
        )
    nope, width = module.qk_nope_head_dim, module.qk_nope_head_dim + module.v_head_dim
    by_head = weight.detach().view(-1, width, module.kv_lora_rank)
    return LatentLayer(by_head[:, :nope], by_head[:, nope:])
