"""Test data of the suite: lanes, the batches in them, and the values of their fields.

    cases      the kinds of steps
    lanes      the configuration of a lane
    choice     the lanes of a run
    problems   one batch, as lists and as tensors
    batches    the batches of a lane
    fields     the values of optional fields, and of padding rows
    scenario   recorded batches in place of drawn ones
    coverage   the values that the lanes of a run had

Does not: run a backend, a runner or a graph.
"""
