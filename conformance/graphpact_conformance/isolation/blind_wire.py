"""What the blind run and its judge agree on: the lanes, and values as JSON.

The blind run loads this module under another name, as `graphpact_conformance.isolation.blind_program`
describes.

Does not: run a plugin, or judge it.
"""

import base64
import ctypes
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from graphpact import Capabilities, ForwardMode, GraphShape
from graphpact.attention import GraphSupport, HeadLayout
from graphpact.runners import GraphRunner
from graphpact_conformance.world.lanes import CASES, Case, Config, configs_of, plainest
from graphpact_conformance.world.problems import Drawn, draw

ANY_RUNNER = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND, ForwardMode.MIXED)
"""Modes in which every runner's region is one forward pass. Drafts of a runner depend on its own code."""

_SEED = 0x6772_6170  # so that the batches are no others than those of the worker


def cases_of_backend(can: Capabilities) -> list[Case]:
    """Return the kinds of steps of a backend below the suite's runner."""
    return [case for case in CASES if case.mode in can.modes]


def cases_of_runner(runner: type[GraphRunner], can: Capabilities) -> list[Case]:
    """Return the kinds of steps of a runner whose results follow from the model alone."""
    modes = frozenset() if runner.frozen_kv else runner.modes
    return [case for case in cases_of_backend(can) if case.mode in ANY_RUNNER and case.lane_mode in modes]


def plain_lanes(can: Capabilities, cases: Sequence[Case], device: torch.device) -> list[Config]:
    """Return the plainest lane of each kind of step that the capabilities allow."""
    return plainest(configs_of(can, device, cases))


def batches_of(config: Config, seed: int) -> Drawn:
    """Return the batches of a lane; others than those of the worker."""
    return draw(config, 1, seed ^ _SEED)[0]


def with_shapes(config: Config, shapes: Sequence[GraphShape]) -> Config:
    """Return a lane with the shapes that its runner captures."""
    return replace(config, capture_shapes=tuple(shapes)) if shapes else config


# -- values ------------------------------------------------------------------------------------------


def shape_to_json(shape: GraphShape) -> list[Any]:
    """Return a shape as JSON values."""
    return [shape.mode.value, shape.batch_size, shape.num_tokens, shape.variant]


def shape_from_json(values: Sequence[Any]) -> GraphShape:
    """Return the shape of `shape_to_json`."""
    mode, *rest = values
    return GraphShape(ForwardMode(mode), *rest)


def capabilities_to_json(can: Capabilities) -> dict[str, Any]:
    """Return capabilities as JSON values."""
    return {field.name: _to_json(getattr(can, field.name)) for field in fields(can)}


def _to_json(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(map(_to_json, value))
    value = getattr(value, "value", value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def capabilities_from_json(values: dict[str, Any]) -> Capabilities:
    """Return the capabilities of `capabilities_to_json`."""
    told: dict[str, Any] = {k: frozenset(v) if isinstance(v, list) else v for k, v in values.items()}
    told["modes"] = frozenset(map(ForwardMode, values["modes"]))
    told["graph_support"] = GraphSupport(values["graph_support"])
    told["head_layouts"] = frozenset(map(HeadLayout, values["head_layouts"]))
    told["dtypes"] = frozenset(getattr(torch, name) for name in values["dtypes"])
    return Capabilities(**told)


def tensors_to_json(tensors: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Return tensors on the host as JSON values: dtype, shape and bytes."""
    told = {}
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        data = ctypes.string_at(whole.data_ptr(), whole.nbytes) if whole.numel() else b""
        told[name] = [_to_json(tensor.dtype), [*tensor.shape], base64.b64encode(data).decode()]
    return told


def tensors_from_json(values: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
    """Return the tensors of `tensors_to_json`."""
    told = {}
    for name, (dtype, shape, text) in values.items():
        kind, data = getattr(torch, dtype), bytearray(base64.b64decode(text))
        flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
        told[name] = flat.reshape(shape)
    return told
