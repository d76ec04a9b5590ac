"""Test data of the suite: lanes, the batches in them, and the values of their fields.

    cases           the kinds of steps
    lanes           the configuration of a lane
    choice          the lanes of a run
    problems        one batch, as lists and as tensors
    layout          a batch from lengths and drafts, in random rows and pages
    batches         random batches of a lane
    chosen_batches  the largest batch of a lane, batches at boundaries, variations of a batch
    fields          the values of optional fields, and of padding rows
    scenario        recorded batches in place of drawn ones
    coverage        the values that the lanes of a run had

Does not: run a backend, a runner or a graph.
"""
