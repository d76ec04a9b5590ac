"""Exhibits of runners, of the registry, of the capture sizes, and of the batches that a scheduler makes.

Bugs of runners are planted in the decode runners and in the suite's own runner, which captures every mode.
Code outside plugins is edited in place while the exhibit runs.

    graph_choice    which graph a batch takes: GP12
    ranks           ranks that record or replay different graphs: GP17
    rank_processes  the same with ranks as processes, whose collectives are real: GP06, 11, 17; and right ones
    dummy_batches   the batch of a capture: GP11
    padding_rows    padding rows and their number: GP03 to 06
    steps           views, copies, memory, outputs and waits of runners: GP01, 02, 13 to 15, 19, 20

Does not: plant bugs in attention backends, except where ranks record different work.
"""

from graphpact_museum.runners import (
    dummy_batches,
    graph_choice,
    padding_rows,
    rank_processes,
    ranks,
    steps,
)

__all__ = ["dummy_batches", "graph_choice", "padding_rows", "rank_processes", "ranks", "steps"]
