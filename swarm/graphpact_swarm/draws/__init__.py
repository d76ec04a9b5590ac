"""What a seed means: a configuration, and requests for an engine that was started with it.

    configurations.py   the values of all features; seeds of one block share an engine
    loads.py            requests at the landmarks of the started engine

The same seed of the same release gives the same scenario, on every machine.

Does not: start an engine, or look at results.
"""

from graphpact_swarm.draws.configurations import (
    LOAD_FEATURES,
    SEEDS_PER_START,
    Space,
    pairs_of,
)
from graphpact_swarm.draws.loads import draw_scenario

__all__ = ["LOAD_FEATURES", "SEEDS_PER_START", "Space", "draw_scenario", "pairs_of"]
