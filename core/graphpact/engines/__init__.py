"""What an integration offers of the engine into which it puts graphpact.

    offer.py    `EngineOffer`, which a command finds by the engine's name
    jobs.py     prompts for an engine in processes of its own, and its answers
    load.py     an engine in this process under generated load, for `graphpact swarm`

Does not: know an engine, or import torch.
"""

from graphpact.engines.jobs import EngineAnswer, EngineJob, EngineResult
from graphpact.engines.load import (
    EngineStart,
    EngineStep,
    Feature,
    GraphFault,
    InjectedError,
    InjectedFault,
    KnownFinding,
    Landmarks,
    LoadedEngine,
    LoadOffer,
    NotDoneError,
    PromptRequest,
)
from graphpact.engines.offer import EngineOffer, ProcessOffer

__all__ = [
    "EngineAnswer",
    "EngineJob",
    "EngineOffer",
    "EngineResult",
    "EngineStart",
    "EngineStep",
    "Feature",
    "GraphFault",
    "InjectedError",
    "InjectedFault",
    "KnownFinding",
    "Landmarks",
    "LoadOffer",
    "LoadedEngine",
    "NotDoneError",
    "ProcessOffer",
    "PromptRequest",
]
