"""An engine: KV pools, a scheduler, a sampler, and the loop that runs lanes.

Does not: import transformers before an `Engine` is built.
"""

from graphpact_engine.deltas import Delta, DeltaStream
from graphpact_engine.engine import Completion, Engine
from graphpact_engine.request import Request, SamplingParams

__all__ = ["Completion", "Delta", "DeltaStream", "Engine", "Request", "SamplingParams"]
