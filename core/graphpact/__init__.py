"""graphpact: the agreement between the capture of a graph and the preparation of its replays.

This module re-exports the names that plugins and engines share. Each is imported on first access, so that
``graphpact --version`` does not wait for torch. ``__init__.pyi`` declares them for type checkers.

Does not: import transformers, a plugin, or the command line.
"""

import importlib
from typing import Any

from graphpact._version import __version__ as __version__
from graphpact.errors import UsageError

_NAMES = {
    "attention": "AttentionBackend BackendContext Capabilities LayerSpec Limits",
    "batch": "ForwardBatch ForwardMode",
    "buffers": "CudaGraphBufferRegistry FillContext GraphSlot PaddingPolicy metadata_slot",
    "errors": "GraphpactError",
    "graphs": "Graph GraphDriver TaskKey declare_kernel",
    "hookspecs": "CONTRACT_VERSION hookimpl hookspec",
    "lane": "Lane PreparedStep",
    "pact": "Pact bounded updated",
    "runners": "GraphRunner",
    "shapes": "CaptureSizes EagerReason GraphShape",
    "speculation": "SpeculationAlgorithm",
    "step": "Step StepOutputs",
}
_HOMES = {name: f"graphpact.{home}" for home, names in _NAMES.items() for name in names.split()}
__all__: list[str] = [*sorted(_HOMES)]  # noqa: PLE0604  strings
_HOMES["conformance"] = "graphpact_conformance"  # of another distribution: no part of `import *`


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name, f"graphpact.{name}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name != home:
            raise
        if name == "conformance":
            raise UsageError(
                "graphpact.conformance needs graphpact_conformance, which is not installed",
                hint='pip install "graphpact[conformance]"',
            ) from error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(module, name) if name in _HOMES else module
