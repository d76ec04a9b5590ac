"""vLLM under generated load, for `graphpact swarm`.

    offer         its features, and how it starts with a choice of them
    arguments     the arguments of vLLM that follow from a choice
    in_process    vLLM's engine in this process, driven step by step
    engine        the started engine: runs, faults, what is left over
    steps         what each batch of a run was
    ownership     poison of KV blocks that no request owns
    injected      faults that a run gets on purpose
    leaks         what is still held after a run
    known         bugs of vLLM that were looked into

Does not: draw or judge; `graphpact_swarm` does.
"""
