"""What a step gives and what a graph is made of: `StepOutputs`, `Step`, and the types of a forward pass.

    forward(batch, metadata, attend) -> StepOutputs       one forward pass of a model
    runner.compose(forward, step) -> () -> StepOutputs    what a graph records of it

Does not: run a step; `graphpact.lane` does.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils import _pytree as pytree

from graphpact.attention import AttentionBackend, LayerSpec
from graphpact.batch import ForwardBatch
from graphpact.buffers.slots import Axis
from graphpact.errors import EngineError
from graphpact.graphs import GraphDriver
from graphpact.shapes import GraphShape


class StepOutputs(Mapping[str, torch.Tensor]):
    """What a forward pass gives: named tensors, each with the axis of its rows.

        StepOutputs(logits=(logits, "bs"), hidden_states=(hidden, "tokens"))

    Args:
        tensors: By name, a tensor and its axis: ``"bs"`` for a row a request, ``"tokens"`` for a row a token,
            ``"none"`` for what follows neither and is never cut.

    Raises:
        EngineError: No tensor in the place of one, an unknown axis, or rows without a first dimension.
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
        """The output ``logits``.

        Raises:
            EngineError: The forward pass gave none.
        """
        return self["logits"]

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise EngineError(
                f"the step has no output {name!r}; it has {', '.join(self._tensors) or 'none'}",
                hint="the model decides what it gives: see its documentation",
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        said = (f"{n}={tuple(t.shape)} {t.dtype} by {self._axes[n]}" for n, t in self.items())
        return f"StepOutputs({', '.join(said)})"

    def rows(self, batch_size: int, num_tokens: int) -> "StepOutputs":
        """Return the first rows of each output: as many as requests or tokens, by its axis. No copy."""
        counts: dict[Axis, int] = {"bs": batch_size, "tokens": num_tokens}
        return self._like(
            {
                name: tensor if (axis := self._axes[name]) == "none" else tensor[: counts[axis]]
                for name, tensor in self._tensors.items()
            }
        )

    def require_rows(self, shape: GraphShape) -> None:
        """Refuse outputs that have another number of rows than their axis says.

        Raises:
            EngineError: Names the output, its rows and the shape.
        """
        due = {"bs": shape.batch_size, "tokens": shape.num_tokens}
        for name, tensor in self._tensors.items():
            axis = self._axes[name]
            if axis != "none" and tensor.shape[0] != due[axis]:
                raise EngineError(
                    f"output {name!r} has {tensor.shape[0]} rows; by its axis {axis!r} it has to have"
                    f" {due[axis]} in {shape}",
                    hint="declare the axis that its rows follow, or 'none'",
                )

    def clone(self) -> "StepOutputs":
        """Return a copy in memory of its own, for who reads it after the driver's next replay."""
        return self._like({name: tensor.clone() for name, tensor in self._tensors.items()})

    def _like(self, tensors: dict[str, torch.Tensor]) -> "StepOutputs":
        made = object.__new__(StepOutputs)
        made._tensors, made._axes = tensors, self._axes
        return made


def _flatten(outputs: StepOutputs) -> tuple[list[torch.Tensor], tuple[tuple[str, Axis], ...]]:
    return list(outputs.values()), tuple(outputs.axes.items())


def _unflatten(leaves: Any, names: tuple[tuple[str, Axis], ...]) -> StepOutputs:
    made = object.__new__(StepOutputs)
    made._tensors = {name: leaf for (name, _), leaf in zip(names, leaves, strict=True)}
    made._axes = dict(names)
    return made


# Drivers walk what a region returns as a tree, which may hold other leaves than tensors on the way.
pytree.register_pytree_node(
    StepOutputs, _flatten, _unflatten, serialized_type_name="graphpact.StepOutputs"
)


class Attend(Protocol):
    """Attention as a forward pass calls it: `AttentionBackend.forward`, or a runner's own."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: Any,
    ) -> torch.Tensor:
        """Return ``[T, num_q_heads, v_head_dim]``; see `AttentionBackend.forward`."""


class Forward(Protocol):
    """One forward pass of a model."""

    def __call__(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return the outputs for ``batch``; every layer attends through ``attend``, with ``metadata``."""


Region: TypeAlias = Callable[[], StepOutputs]
"""What a graph records."""


@dataclass(slots=True)
class Step:
    """One captured shape as the recorded work, and the eager calls between its segments, see it.

    It exists once per captured shape. The lane sets `live` and `metadata` before each replay.

    Args:
        shape: What is captured; `num_tokens` is its static count.
        view: The static inputs.
        driver: The lane's: breaks a graph by `GraphDriver.eager_call`.
        backend: The lane's.
        metadata: What the backend made for the view.
        live: The batch of this replay; that of the capture until there is one.
    """

    shape: GraphShape
    view: ForwardBatch
    driver: GraphDriver
    backend: AttentionBackend = field(repr=False)
    metadata: Any
    live: ForwardBatch

    @property
    def num_tokens(self) -> int:
        """The static token count: rows of every tensor by token, padding included."""
        return self.shape.num_tokens

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
    ) -> torch.Tensor:
        """Attend with the metadata of this replay: what an eager call between two segments does."""
        return self.backend.forward(q, k, v, layer, self.metadata)
