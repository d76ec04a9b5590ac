from collections.abc import Callable

from graphpact._version import __version__ as __version__
from graphpact.attention import (
    AttentionBackend,
    BackendContext,
    Capabilities,
    LayerSpec,
    Limits,
)
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import (
    CudaGraphBufferRegistry,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    metadata_slot,
)
from graphpact.errors import GraphpactError
from graphpact.graphs import Graph, GraphDriver, TaskKey, declare_kernel
from graphpact.hookspecs import CONTRACT_VERSION, hookimpl, hookspec
from graphpact.lane import Lane, PreparedStep
from graphpact.pact import Pact, bounded, updated
from graphpact.runners import GraphRunner
from graphpact.shapes import CaptureSizes, EagerReason, GraphShape
from graphpact.speculation import SpeculationAlgorithm
from graphpact.step import RegionContext, StepOutputs

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
    "RegionContext",
    "SpeculationAlgorithm",
    "StepOutputs",
    "TaskKey",
    "bounded",
    "declare_kernel",
    "hookimpl",
    "hookspec",
    "metadata_slot",
    "updated",
]
