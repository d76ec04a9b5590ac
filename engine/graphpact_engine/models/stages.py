"""Stages of a pipeline: a transformers model that keeps only some of its layers.

transformers chooses the layers (`apply_pipeline_parallelism`) and leaves out all other modules. Here hidden
states enter and leave a stage outside of its forward pass, so that a graph can hold it:

    in     the layer before the first own one returns the hidden states of `receiving`. Whatever a model does
           with its embedding before the first layer, such as scaling it, is done by the first stage alone.
    out    the base model returns the output of the last own layer: its final norm is left out too

Does not: communicate; `graphpact_engine.ranks.stages` does.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from graphpact.errors import ConfigError
from graphpact_engine.models.active import activated, active

_PARTS = {"embed_tokens", "layers", "norm"}
"""The parts of a model that transformers can split: nothing but hidden states goes from layer to layer."""


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The layers of a stage.

    Args:
        own: The numbers of its layers in the model.
        is_first: Whether it is the first stage, which has the embedding.
        is_last: Whether it is the last stage, which has the language model head.
    """

    own: range
    is_first: bool
    is_last: bool


def split_stages(model: Any, mesh: DeviceMesh) -> None:
    """Leave out what other stages have.

    Args:
        model: A transformers model for causal language modelling, without weights.
        mesh: The stages, of which this process has one.

    Raises:
        ConfigError: transformers has no plan for the model, or it has fewer layers than there are stages.
    """
    from transformers.distributed.pipeline_parallel import (  # noqa: PLC0415  not in older versions
        apply_pipeline_parallelism,
    )

    base = model.base_model
    plan = getattr(base.config, "base_model_pp_plan", None) or {}
    if plan.keys() != _PARTS:
        raise ConfigError(
            f"parallel.pipeline = {mesh.size()}, but transformers has no plan that splits a model of type"
            f" {model.config.model_type!r} into stages",
            hint="split it by parallel.tensor",
        )
    if len(base.layers) < mesh.size():
        raise ConfigError(
            f"parallel.pipeline = {mesh.size()}, but the model has {len(base.layers)} layers",
            hint="each stage needs a layer: lower parallel.pipeline",
        )
    apply_pipeline_parallelism(model, mesh)
    del model.forward  # it would communicate inside of the forward pass
    layers = stage_of(model)
    if layers is not None and not layers.is_first:
        base.layers[layers.own.start - 1] = _StageInput()


def stage_of(model: Any) -> StageLayers | None:
    """Return the layers of a model's stage; None for a whole model."""
    stage = getattr(model, "_pp_stage", None)
    if stage is None:
        return None
    own = range(*stage.layer_range_for_rank(stage.pp_rank, len(model.base_model.layers)))
    return StageLayers(own, is_first=stage.pp_is_first_stage, is_last=stage.pp_is_last_stage)


def receiving(hidden: torch.Tensor | None) -> AbstractContextManager[None]:
    """Begin the forward passes inside the context with the hidden states of the stage before.

    Args:
        hidden: ``[T, hidden_size]``; None in the first stage.
    """
    return activated("hidden", hidden)


class _StageInput(torch.nn.Module):
    """Stands for the last layer of the stage before."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return ``[1, T, hidden_size]``."""
        hidden: torch.Tensor = active.hidden
        return hidden[None]
