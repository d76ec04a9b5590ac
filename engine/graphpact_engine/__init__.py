"""An engine: KV pools, a scheduler, a sampler, and the loop that runs lanes.

Each name is imported on first access, so that the commands of the engine are listed without torch.

Does not: import transformers before an `Engine` is built.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphpact_engine.deltas import Delta, DeltaStream
    from graphpact_engine.engine import Completion, Engine
    from graphpact_engine.request import Request, SamplingParams

__all__ = ["Completion", "Delta", "DeltaStream", "Engine", "Request", "SamplingParams"]
_HOMES = {"Completion": "engine", "Engine": "engine", "Delta": "deltas", "DeltaStream": "deltas"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'request')}"), name)
