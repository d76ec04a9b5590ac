"""`Bridge`: attention as an eager call between two segments of a graph.

Queries, keys, values and the result pass between the segments in four workspaces of the registry, which all
layers and all shapes share. The largest shape determines their size. So a graph does not keep extra memory
alive for an eager call, and the call writes into given memory.

Does not: make metadata; the lane makes it once in each step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpact import GraphSlot, LayerSpec, RegionContext, metadata_slot
from graphpact.errors import CaptureError, EngineError
from graphpact.runners import RunnerContext


def _widths(layer: LayerSpec) -> dict[str, tuple[int, int]]:
    """Return the heads and width of the tensors that pass between segments, by name."""
    return {
        "q": (layer.num_q_heads, layer.head_dim),
        "k": (layer.num_kv_heads, layer.head_dim),
        "v": (layer.num_kv_heads, layer.v_head_dim),
        "out": (layer.num_q_heads, layer.v_head_dim),
    }


def bridge_slots(context: RunnerContext) -> Sequence[GraphSlot]:
    """Return the workspaces: ``[max_num_tokens, n]`` each, for the widest layer.

    Raises:
        EngineError: The context has no layers.
    """
    if not context.layers:
        raise EngineError(
            f"lane {context.lane!r}: the runner's context has no layers, but the workspaces between "
            "segments need their widths",
            hint="RunnerContext(..., layers=the model's layers)",
        )
    names = _widths(context.layers[0])
    widest = {n: max(math.prod(_widths(layer)[n]) for layer in context.layers) for n in names}
    return [_workspace(name, width, context.dtype) for name, width in widest.items()]


def _workspace(name: str, width: int, dtype: torch.dtype) -> GraphSlot:
    return metadata_slot(f"bridge.{name}", lambda _, num_tokens: (num_tokens, width), dtype, role="workspace")


@dataclass(frozen=True, slots=True)
class Bridge:
    """The attention of a region: an eager call in every layer, and in an eager step an ordinary call.

    Args:
        step: The context of the region.
    """

    step: RegionContext

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec, metadata: Any
    ) -> torch.Tensor:
        """Return ``[num_tokens, num_q_heads, v_head_dim]``, in memory of the segment after the call.

        ``metadata`` is the metadata of the capture. The eager call uses the metadata of its replay instead.

        Raises:
            CaptureError: Queries, keys or values have another dtype than the workspaces.
        """
        del metadata
        step = self.step
        if step.is_eager:
            return step.attend(q, k, v, layer)
        q = self._put("q", q, layer)
        k = None if k is None else self._put("k", k, layer)
        v = None if v is None else self._put("v", v, layer)
        out = self._place("out", layer)
        return step.driver.eager_call(step.attend, q, k, v, layer, out).clone()

    def _put(self, name: str, tensor: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
        """Copy ``tensor`` to its workspace and return it there."""
        place = self._place(name, layer)
        if (tensor.dtype, tensor.shape) != (place.dtype, place.shape):
            raise CaptureError(
                f"layer {layer.layer_id} attends with {name} {tuple(tensor.shape)} {tensor.dtype}; declared"
                f" are {tuple(place.shape)} {place.dtype}",
                hint="the runner's context must have the layers and the dtype of the model",
                rule="GP07",
            )
        return place.copy_(tensor)

    def _place(self, name: str, layer: LayerSpec) -> torch.Tensor:
        """Return the workspace ``name`` in the shape that ``layer`` needs."""
        registry = self.step.registry
        assert registry is not None  # noqa: S101  in a capture there is a registry
        heads, width = _widths(layer)[name]
        whole = registry.get_slot(f"bridge.{name}").slice_for(0, 0).view(-1)
        return whole[: self.step.num_tokens * heads * width].view(self.step.num_tokens, heads, width)
