"""Runs of SGLang's engine, for commands.

    cli           ``graphpact sglang``
    arguments     the arguments of a run on a laptop
    offer         SGLang for commands that start an engine
    job           one run, in a process of its own
    in_process    SGLang's engine in this process, driven pass by pass
    surface       what others build on, for ``graphpact sglang diff``

Does not: put anything into SGLang; the other rooms do.
"""
