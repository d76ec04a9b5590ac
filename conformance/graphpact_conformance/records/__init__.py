"""What is seen of a lane and kept: records of steps, the KV cache, the state of the process, raised errors.

    steps          what one step read and gave
    kv_memory      the KV cache of a lane
    global_state   the state of the process that a plugin must leave as it is
    raised         what a raised error says

Does not: run a step; see `graphpact_conformance.lane`.
"""
