"""The guard: what is checked at a replay, and before SGLang serves.

    guarding            the guard's hooks around captures and replays
    contents            what a decode or verify graph must find in its memory
    draft_contents      the same of the graphs of a draft
    prefill_contents    the same of prefill graphs
    live_tokens         the count of live tokens that layers of experts read
    start               synthetic steps of every shape before SGLang serves
    recording           gives each step to a recording

Does not: know the pact; `graphpact_guard` does.
"""
