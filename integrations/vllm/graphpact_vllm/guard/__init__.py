"""The guard: what is checked at a replay, in a step of many ranks, and after the capture.

    guarding         the guard around captures and replays
    contents         what a graph must find in its memory
    rank_steps       the graph that each rank takes in a step, compared
    after_capture    what is checked once, after the capture
    start            synthetic steps of every shape before vLLM serves
    recording        gives each step to a recording
    dispatching      the graph that vLLM takes for each batch

Does not: know the pact; `graphpact_guard` does.
"""
