"""graphpact: the agreement between the capture of a graph and the preparation of its replays.

This module re-exports the names that plugins and engines share. It imports no transformers, no plugin, no
command line, and `conformance` only on access.
"""

import importlib
from collections.abc import Callable
from typing import Any

from graphpact.attention import AttentionBackend, BackendContext, Capabilities, LayerSpec, Limits
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import (
    CudaGraphBufferRegistry,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    metadata_slot,
)
from graphpact.errors import GraphpactError, UsageError
from graphpact.graphs import Graph, GraphDriver
from graphpact.hookspecs import CONTRACT_VERSION, hookimpl, hookspec
from graphpact.lane import Lane, PreparedStep
from graphpact.pact import Pact, bounded
from graphpact.runners import GraphRunner
from graphpact.shapes import CaptureSizes, EagerReason, GraphShape
from graphpact.step import Step, StepOutputs

conformance: Callable[..., Callable[[Callable[..., None]], Callable[..., None]]]
"""`graphpact_conformance.conformance`, of another distribution; imported on access."""

__all__ = [
    "CONTRACT_VERSION",
    "AttentionBackend",
    "BackendContext",
    "Capabilities",
    "CaptureSizes",
    "CudaGraphBufferRegistry",
    "EagerReason",
    "FillContext",
    "ForwardBatch",
    "ForwardMode",
    "Graph",
    "GraphDriver",
    "GraphRunner",
    "GraphShape",
    "GraphSlot",
    "GraphpactError",
    "Lane",
    "LayerSpec",
    "Limits",
    "Pact",
    "PaddingPolicy",
    "PreparedStep",
    "Step",
    "StepOutputs",
    "bounded",
    "conformance",
    "hookimpl",
    "hookspec",
    "metadata_slot",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from graphpact._version import __version__  # noqa: PLC0415  lazy

        return __version__
    if name == "conformance":
        try:
            return importlib.import_module("graphpact_conformance").conformance
        except ModuleNotFoundError as error:
            if error.name != "graphpact_conformance":
                raise
            raise UsageError(
                "graphpact.conformance needs graphpact_conformance, which is not installed",
                hint='pip install "graphpact[conformance]"',
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
