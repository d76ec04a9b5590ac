"""The types of a step: `StepOutputs`, `RegionContext`, and the types of a forward pass.

    forward(batch, metadata, attend) -> StepOutputs       one forward pass of a model
    runner.compose(forward, step) -> () -> StepOutputs    the region that a graph records

Does not: run a step; `graphpact.lane` does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils import _pytree as pytree

from graphpact.attention import AttentionBackend, LayerSpec
from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.buffers.slots import Axis
from graphpact.errors import EngineError
from graphpact.graphs import GraphDriver
from graphpact.shapes import GraphShape


class StepOutputs(Mapping[str, torch.Tensor]):
    """The outputs of a forward pass: named tensors, each with the axis of its rows.

        StepOutputs(logits=(logits, "bs"), hidden_states=(hidden, "tokens"))

    Args:
        tensors: A tensor and its axis by name: ``"bs"`` for one row per request, ``"tokens"`` for one row per
            token, ``"none"`` for neither. A tensor with the axis ``"none"`` is never cut.

    Raises:
        EngineError: A value is not a tensor, has an unknown axis, or has an axis but no first dimension.
    """

    __slots__ = ("_axes", "_tensors")

    def __init__(self, **tensors: tuple[torch.Tensor, Axis]) -> None:
        for name, value in tensors.items():
            tensor, axis = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
            if axis not in ("bs", "tokens", "none"):
                raise EngineError(
                    f"output {name!r} has the axis {axis!r}",
                    hint="give (tensor, axis), with axis 'bs', 'tokens' or 'none'",
                )
            if not isinstance(tensor, torch.Tensor) or (axis != "none" and not tensor.dim()):
                raise EngineError(
                    f"output {name!r} is {tensor!r}, which has no rows",
                    hint="give a tensor whose first dimension follows the axis",
                )
        self._tensors = {name: tensor for name, (tensor, _) in tensors.items()}
        self._axes: dict[str, Axis] = {name: axis for name, (_, axis) in tensors.items()}

    @property
    def axes(self) -> Mapping[str, Axis]:
        """The axis of each output, by name."""
        return self._axes

    @property
    def logits(self) -> torch.Tensor:
        """The output ``logits``. Raises `EngineError` if the forward pass returned none."""
        return self["logits"]

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise EngineError(
                f"the step has no output {name!r}; it has {', '.join(self._tensors) or 'none'}",
                hint="the model defines its outputs; see the model's documentation",
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        parts = (f"{n}={tuple(t.shape)} {t.dtype} by {self._axes[n]}" for n, t in self.items())
        return f"StepOutputs({', '.join(parts)})"

    def rows(self, batch_size: int, num_tokens: int) -> "StepOutputs":
        """Return the first rows of each output, without a copy; its axis selects one of the two counts."""
        outputs = object.__new__(StepOutputs)
        outputs._axes = axes = self._axes
        outputs._tensors = cut = dict(self._tensors)
        for name, axis in axes.items():
            if axis != "none":
                cut[name] = cut[name][: batch_size if axis == "bs" else num_tokens]
        return outputs

    def require_rows(self, shape: GraphShape) -> None:
        """Raise `EngineError` for an output that does not have as many rows as its axis has in ``shape``."""
        counts = {"bs": shape.batch_size, "tokens": shape.num_tokens}
        for name, tensor in self._tensors.items():
            axis = self._axes[name]
            if axis != "none" and tensor.shape[0] != counts[axis]:
                raise EngineError(
                    f"output {name!r} has {tensor.shape[0]} rows; its axis {axis!r} has {counts[axis]}"
                    f" in {shape}",
                    hint="declare the axis that its rows follow, or 'none'",
                )

    def clone(self) -> "StepOutputs":
        """Return a copy that stays valid after the driver's next replay."""
        return _unflatten((tensor.clone() for tensor in self.values()), self._axes.items())


def _flatten(outputs: StepOutputs) -> tuple[list[torch.Tensor], tuple[tuple[str, Axis], ...]]:
    return list(outputs.values()), tuple(outputs.axes.items())


def _unflatten(leaves: Iterable[Any], axes: Iterable[tuple[str, Axis]]) -> StepOutputs:
    """Return outputs made of ``leaves``, unchecked, because drivers may map a leaf to a non-tensor."""
    outputs = object.__new__(StepOutputs)
    outputs._axes = dict(axes)
    outputs._tensors = dict(zip(outputs._axes, leaves, strict=True))
    return outputs


pytree.register_pytree_node(StepOutputs, _flatten, _unflatten, serialized_type_name="graphpact.StepOutputs")


class Attend(Protocol):
    """The attention function of a forward pass: `AttentionBackend.forward`, or a runner's replacement."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec, metadata: Any
    ) -> torch.Tensor:
        """Return ``[T, num_q_heads, v_head_dim]``; see `AttentionBackend.forward`."""


class Forward(Protocol):
    """One forward pass of a model."""

    def __call__(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return the outputs for ``batch``. Every layer calls ``attend`` with ``metadata``."""


Region: TypeAlias = Callable[[], StepOutputs]
"""A callable that a graph records."""


@dataclass(slots=True)
class RegionContext:
    """The context of one captured shape's region, at capture and in the eager calls of every replay.

    There is one context per captured shape. The lane sets `live`, `attended` and `metadata` before each
    replay.

    Args:
        shape: The captured shape; `num_tokens` is its static count.
        view: The static inputs.
        driver: The lane's driver; `GraphDriver.eager_call` breaks a graph.
        backend: The lane's backend.
        metadata: The backend's metadata for ``attended``.
        live: The batch of this replay. Before the first replay it is the batch of the capture.
        attended: The batch that the metadata was made from. It is the view, unless attention runs outside the
            graph; see `graphpact.metadata.EagerMetadata.attended`.
        registry: The lane's registry; None in an eager step.
    """

    shape: GraphShape
    view: ForwardBatch
    driver: GraphDriver
    backend: AttentionBackend = field(repr=False)
    metadata: Any
    live: ForwardBatch
    attended: ForwardBatch
    registry: CudaGraphBufferRegistry | None = field(default=None, repr=False)

    @property
    def num_tokens(self) -> int:
        """The static token count, including padding."""
        return self.shape.num_tokens

    @property
    def is_eager(self) -> bool:
        """Whether the region runs once, without a graph."""
        return self.registry is None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention with the metadata of this replay, in an eager call between two segments.

        Args:
            q: ``[num_tokens, num_q_heads, head_dim]``. With ``k`` and ``v`` it is cut to the tokens of
                `attended`, which may lack the padding tokens; see `AttentionBackend.forward`.
            k: ``[num_tokens, num_kv_heads, head_dim]``, or None.
            v: ``[num_tokens, num_kv_heads, v_head_dim]``, or None.
            layer: The layer.
            out: ``[num_tokens, num_q_heads, v_head_dim]`` for the result, or None for new memory.

        Returns:
            ``[num_tokens, num_q_heads, v_head_dim]``, with zeros for the tokens that were cut off.
        """
        count = self.attended.num_tokens
        if count < q.shape[0]:
            q, k, v = q[:count], None if k is None else k[:count], None if v is None else v[:count]
        result = self.backend.forward(q, k, v, layer, self.metadata)
        if out is None:
            if count == self.num_tokens:
                return result
            out = result.new_empty(self.num_tokens, *result.shape[1:])
        out[:count].copy_(result)
        out[count:].zero_()
        return out
