"""What the suite draws: lanes, the batches in them, and the values of their fields.

    cases      the kinds of steps
    lanes      the configuration of a lane
    choice     the lanes of a run
    problems   one batch, as lists and as tensors
    batches    the batches of a lane
    fields     what rows of optional fields hold
    scenario   recorded batches in place of drawn ones
    coverage   what a run drew

Does not: run a backend, a runner or a graph.
"""
