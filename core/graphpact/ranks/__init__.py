"""Ranks that step together: who they are, what they exchange before a step, and what they must do alike.

    layout       `RankLayout`: which ranks share attention, requests, and the other layers
    exchange     `RankExchange`: one exchange on the CPU before each step, and what it must agree in
    agreement    `agreed`: shape, graph or eager, and counts, as a function of the exchanged numbers
    collectives  `RecordedCollectives`: the sequence of collectives of a region
    watch        `RankWatch`: names the rank that is missing if a collective fails
    observer     `RankObserver`: holds every capture of a lane, and in strict lanes every step, to the others

Does not: start processes, split a model, or decide anything on one rank.
"""

from graphpact.ranks.agreement import agreed
from graphpact.ranks.collectives import Collective, RecordedCollectives
from graphpact.ranks.exchange import RankExchange, RankStep
from graphpact.ranks.layout import RankLayout
from graphpact.ranks.observer import RankObserver
from graphpact.ranks.watch import RankWatch

__all__ = [
    "Collective",
    "RankExchange",
    "RankLayout",
    "RankObserver",
    "RankStep",
    "RankWatch",
    "RecordedCollectives",
    "agreed",
]
