"""graphpact: the agreement between the capture of a graph and the preparation of its replays.

This module re-exports the names that plugins and engines share. Each name is imported when it is first used,
because torch takes seconds to import and a command such as ``graphpact --version`` does not need it. Type
checkers read ``__init__.pyi``.

Does not: import transformers, a plugin, or the command line.
"""

import importlib
from typing import Any

from graphpact._version import __version__ as __version__
from graphpact.errors import UsageError

_NAMES = {
    "attention": ("AttentionBackend", "BackendContext", "Capabilities", "LayerSpec", "Limits"),
    "batch": ("ForwardBatch", "ForwardMode"),
    "buffers": ("CudaGraphBufferRegistry", "FillContext", "GraphSlot", "PaddingPolicy", "metadata_slot"),
    "errors": ("GraphpactError",),
    "graphs": ("Graph", "GraphDriver", "TaskKey", "declare_kernel"),
    "hookspecs": ("CONTRACT_VERSION", "hookimpl", "hookspec"),
    "lane": ("Lane", "PreparedStep"),
    "pact": ("Pact", "bounded", "updated"),
    "runners": ("GraphRunner",),
    "shapes": ("CaptureSizes", "EagerReason", "GraphShape"),
    "speculation": ("SpeculationAlgorithm",),
    "step": ("RegionContext", "StepOutputs"),
}
_MODULE_OF = {name: f"graphpact.{module}" for module, names in _NAMES.items() for name in names}
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


def __getattr__(name: str) -> Any:
    if name == "conformance":
        return _conformance()
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    try:
        return importlib.import_module(f"graphpact.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"graphpact.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def _conformance() -> Any:
    """Return the decorator `graphpact_conformance.conformance` of another distribution."""
    try:
        return importlib.import_module("graphpact_conformance").conformance
    except ModuleNotFoundError as error:
        if error.name != "graphpact_conformance":
            raise
        raise UsageError(
            "graphpact.conformance needs graphpact_conformance, which is not installed",
            hint='pip install "graphpact[conformance]"',
        ) from error
