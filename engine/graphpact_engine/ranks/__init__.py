"""An engine on several processes, one for each rank, started by ``torchrun``.

    processes  `EngineRanks`: process groups, and the layout that the configuration asks for
    steps      `RankSteps`: what the ranks run next, and the batches of ranks without requests
    stages     `PipelineStage`: hidden states and tokens between the stages of a pipeline
    outputs    the answers of all ranks, on rank 0

Does not: start processes, or split a model; `graphpact_engine.models.sharding` does the latter.
"""

from graphpact_engine.ranks.processes import EngineRanks, connect
from graphpact_engine.ranks.stages import PipelineStage
from graphpact_engine.ranks.steps import RankSteps

__all__ = ["EngineRanks", "PipelineStage", "RankSteps", "connect"]
