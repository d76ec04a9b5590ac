"""What the suite draws: lanes, the batches in them, and the values of their fields.

    lanes      the dimensions of lanes, and the lanes of a run
    problems   random batches of a lane
    fields     what rows of optional fields hold
    scenario   recorded batches in place of drawn ones
    coverage   what a run drew

Does not: know a backend, a runner or a graph.
"""
