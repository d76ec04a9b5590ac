"""The tape: SGLang's platform, graph runners and graphs on a CPU.

    taping      the tape's hooks and attention backends, in SGLang's registries
    platform    the platform of the tape: graph runners and backends on a CPU
    segments    SGLang's breakable graphs on a tape
    memory      what a graph may write, for the strict tape
    experts     layers of experts that can be recorded

Does not: record or replay; `graphpact_tape` does.
"""
