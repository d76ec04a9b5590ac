"""SGLang's engine under generated load, for ``graphpact swarm``.

    offer        features, the combinations that SGLang refuses, and arguments
    known        bugs of SGLang's release that generated load finds
    in_process   SGLang's engine in this process, driven pass by pass
    engine       a started engine, and one run of requests
    steps        which batches the scheduler ran, and by which graphs
    ownership    poison in memory that no request owns, and the check that it stays
    leaks        what is still allocated at the end
    faults       faults that a run gets on purpose

Does not: draw loads or judge runs; `graphpact_swarm` does.
"""
