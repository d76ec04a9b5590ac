"""The types of a step: `StepOutputs`, `Step`, and those of a forward pass.

    forward(batch, metadata, attend) -> StepOutputs       one forward pass of a model
    runner.compose(forward, step) -> () -> StepOutputs    the region that a graph records

Does not: run a step; `graphpact.lane` does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
            token, ``"none"`` for neither; such a tensor is never cut.

    Raises:
        EngineError: A value is no tensor, has an unknown axis, or has an axis and no first dimension.
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
        """The output ``logits``; an `EngineError` if the forward pass returned none."""
        return self["logits"]

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise EngineError(
                f"the step has no output {name!r}; it has {', '.join(self._tensors) or 'none'}",
                hint="the model defines its outputs: see its documentation",
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
        """Return the first rows of each output: as many as requests or tokens, by its axis. No copy."""
        outputs = object.__new__(StepOutputs)
        outputs._axes = axes = self._axes
        outputs._tensors = cut = dict(self._tensors)
        for name, axis in axes.items():
            if axis != "none":
                cut[name] = cut[name][: batch_size if axis == "bs" else num_tokens]
        return outputs

    def require_rows(self, shape: GraphShape) -> None:
        """Raise `EngineError` for an output whose number of rows is not that of its axis in ``shape``."""
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
    """Return outputs of ``leaves``, unchecked: while drivers map them as a tree, leaves may be no tensors."""
    outputs = object.__new__(StepOutputs)
    outputs._axes = dict(axes)
    outputs._tensors = dict(zip(outputs._axes, leaves, strict=True))
    return outputs


pytree.register_pytree_node(StepOutputs, _flatten, _unflatten, serialized_type_name="graphpact.StepOutputs")


class Attend(Protocol):
    """Attention as a forward pass calls it: `AttentionBackend.forward`, or a runner's replacement."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec, metadata: Any
    ) -> torch.Tensor:
        """Return ``[T, num_q_heads, v_head_dim]``; see `AttentionBackend.forward`."""


class Forward(Protocol):
    """One forward pass of a model."""

    def __call__(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return the outputs for ``batch``; every layer attends through ``attend``, with ``metadata``."""


Region: TypeAlias = Callable[[], StepOutputs]
"""A callable that a graph records."""


@dataclass(slots=True)
class Step:
    """A captured shape, for the recorded work and the eager calls between its segments.

    There is one per captured shape. The lane sets `live`, `rows` and `metadata` before each replay.

    Args:
        shape: The captured shape; `num_tokens` is its static count.
        view: The static inputs.
        driver: The lane's driver; `GraphDriver.eager_call` breaks a graph.
        backend: The lane's backend.
        metadata: The backend's metadata for ``rows``.
        live: The batch of this replay; before the first one, the batch of the capture.
        rows: The batch that the metadata was made from: the view, or for eager attention `attended_rows`.
        registry: The lane's registry; None in an eager step.
    """

    shape: GraphShape
    view: ForwardBatch
    driver: GraphDriver
    backend: AttentionBackend = field(repr=False)
    metadata: Any
    live: ForwardBatch
    rows: ForwardBatch
    registry: CudaGraphBufferRegistry | None = field(default=None, repr=False)

    @property
    def num_tokens(self) -> int:
        """The static token count, padding included."""
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
        """Attend with the metadata of this replay; eager calls between two segments use it.

        Args:
            q: ``[num_tokens, num_q_heads, head_dim]``; with ``k`` and ``v`` as `AttentionBackend.forward`
                takes them. Padding tokens that are not among ``rows`` are cut off.
            k: Keys, or None.
            v: Values, or None.
            layer: The layer.
            out: ``[num_tokens, num_q_heads, v_head_dim]``: receives the result, zeros for tokens that were
                cut off. None: new memory.
        """
        count = self.rows.num_tokens
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


def attended_rows(view: ForwardBatch, live: ForwardBatch, backend: AttentionBackend) -> ForwardBatch:
    """Return the batch that eager attention between segments makes its metadata from.

    These are the rows of ``live``. A backend that declares ``eager_rows="padded"`` gets the tokens of
    ``view``, in a ragged batch after the tokens of the live requests.
    """
    if backend.capabilities.eager_rows == "live":
        return live
    if not view.forward_mode.is_ragged:
        return view
    return replace(
        live,
        forward_mode=view.forward_mode,
        input_ids=view.input_ids,
        positions=view.positions,
        out_cache_loc=view.out_cache_loc,
    )
