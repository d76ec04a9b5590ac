"""Runs of an engine on a tape, in processes.

    in_process.py       one run of a started engine in this process
    clock.py            virtual time
    forks.py            a function in a forked child
    engine_process.py   an engine that is started once, and forked for each run
    worker.py           a process that imported one engine, and is told what to run

Does not: choose what to run.
"""
