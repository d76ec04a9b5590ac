"""Checks of speculation algorithms: a small engine with random models runs them, and plain decoding judges.

    random_models    `RandomTarget` with its plain decoding, and `RandomDraft`
    draft_lanes      the lanes of a draft model, with the runners that an algorithm names
    lane_batches     what is wrong with a batch that an algorithm gives to a lane
    decoding         `Decoding`: requests, memory, steps and verification
    schedules        orders of steps: batches, chunks, preemption, requests that join and leave
    drafting         the requirements, one for each rule ``SP``
    algorithm_lanes  the lanes of an algorithm: sizes of drafts

Does not: use `graphpact_engine`, or know an algorithm.
"""
