"""Multi-head latent attention (MLA) in absorbed form: all heads attend over one cached latent.

In expanded form, an MLA layer of transformers multiplies the latent of each token by ``kv_b_proj`` to get the
keys and values of every head, then attends. In absorbed form, the query is multiplied by the key half of that
weight before attention over the latents, and the output by the value half afterwards. Scores and outputs are
the same; the cache holds one latent per token instead of keys and values of all heads.

The layers of an absorbed model get a subclass of their class. Its ``expand_kv`` (transformers >= 5.15) makes
latents the keys while an `AbsorbedAttention` serves the forward pass; in all other passes it expands them.
``torch.compile`` can trace both.

Does not: attend over latents, or copy weights.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from graphpact_engine.errors import UnsupportedModelError
from graphpact_engine.models.interface import Attention, active_attention
from graphpact_engine.models.products import PLAIN

_EXPANDED = "use an attention backend without MLA, which runs the model in expanded form"


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """The two halves of the up-projection ``kv_b_proj`` of an MLA layer.

    Args:
        key_up: ``[heads, qk_nope_head_dim, kv_lora_rank]``: latent to keys.
        value_up: ``[heads, v_head_dim, kv_lora_rank]``: latent to values.
    """

    key_up: torch.Tensor
    value_up: torch.Tensor

    @property
    def kv_lora_rank(self) -> int:
        """Width of the latent."""
        return self.key_up.shape[2]

    def absorb_query(self, q: torch.Tensor) -> torch.Tensor:
        """Return the query for latents ``[T, heads, rank + rope]`` from ``q`` ``[T, heads, nope + rope]``."""
        width = self.key_up.shape[1]
        latent = torch.einsum("thn,hnr->thr", q[..., :width], self.key_up)
        return torch.cat((latent, q[..., width:]), dim=-1)

    def expand_output(self, out: torch.Tensor) -> torch.Tensor:
        """Return the output ``[T, heads, v_head_dim]`` from ``out`` ``[T, heads, rank]``."""
        return torch.einsum("thr,hvr->thv", out, self.value_up)


@dataclass(slots=True)
class AbsorbedAttention:
    """An attention implementation that absorbs MLA layers and passes other layers on unchanged.

    Args:
        inner: The attention implementation that attends: over latents in the absorbed layers.
        latents: The absorbed layers, by their attention modules.
    """

    inner: Attention
    latents: dict[Any, LatentLayer]

    def attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        asked: dict[str, Any],
    ) -> torch.Tensor:
        """See `Attention.attend`."""
        layer = self.latents.get(module)
        if layer is None:
            return self.inner.attend(module, q, k, v, asked)
        asked["kv_lora_rank"] = layer.kv_lora_rank
        return layer.expand_output(self.inner.attend(module, layer.absorb_query(q), k, v, asked))


def latent_modules(model: Any) -> list[Any]:
    """Return the MLA attention modules of a transformers model, in the order of its layers."""
    return [m for m in model.modules() if hasattr(m, "kv_lora_rank") and hasattr(m, "kv_b_proj")]


def absorb_layers(model: Any) -> dict[Any, LatentLayer]:
    """Let an `AbsorbedAttention` absorb the MLA layers of ``model``; return them by their attention modules.

    Other forward passes of ``model`` stay as they are. The result is empty for a model without MLA.

    Raises:
        UnsupportedModelError: The installed transformers has no ``expand_kv`` in this model, or the
            ``kv_b_proj`` of a layer is not a plain linear map.
    """
    layers = {module: _latent_layer(module) for module in latent_modules(model)}
    for module in layers:
        if not isinstance(module, _Joining):
            module.__class__ = _joining(type(module))  # type: ignore[arg-type]  # a class is hashable
    return layers


class _Joining:
    """A base class that is put before an MLA attention class."""

    def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values; in an absorbed pass one key head ``[1, 1, T, rank + rope]`` of latents.

        The first ``rank`` elements of that key are the value.
        """
        attention = active_attention()
        if isinstance(attention, AbsorbedAttention) and self in attention.latents:
            key = torch.cat((kv_nope, k_rot), dim=-1)
            return key, key[..., : kv_nope.shape[-1]]
        expanded: tuple[torch.Tensor, torch.Tensor] = super().expand_kv(kv_nope, k_rot)  # type: ignore[misc]
        return expanded


@functools.cache
def _joining(kind: type) -> type:
    """Return the subclass of ``kind`` for absorbed layers.

    A bound method set on the module instead would be a reference cycle, which delays freeing the weights.
    """
    return type(kind.__name__, (_Joining, kind), {"__module__": kind.__module__})


def _latent_layer(module: Any) -> LatentLayer:
    name = type(module).__name__
    if not hasattr(module, "expand_kv"):
        raise UnsupportedModelError(
            f"{name} of transformers {transformers.__version__} has no expand_kv, which absorbed MLA needs",
            hint=f'pip install "transformers>=5.15", or: {_EXPANDED}',
        )
    up = module.kv_b_proj
    weight: Any = getattr(up, "weight", None)
    bias = getattr(up, "bias", None)
    for part, plain in ((up, PLAIN), (weight, (torch.nn.Parameter,))):
        if type(part) not in plain:
            raise UnsupportedModelError(
                f"{name}: kv_b_proj is a {type(part).__name__}; only a plain Linear can be absorbed",
                hint=_EXPANDED,
            )
    if bias is not None:
        raise UnsupportedModelError(f"{name}: kv_b_proj has a bias, which cannot be absorbed", hint=_EXPANDED)
    nope, width = module.qk_nope_head_dim, module.qk_nope_head_dim + module.v_head_dim
    by_head = weight.detach().view(-1, width, module.kv_lora_rank)
    return LatentLayer(by_head[:, :nope], by_head[:, nope:])
