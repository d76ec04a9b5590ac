"""Runs of SGLang's engine, for commands.

    cli           ``graphpact sglang``
    offer         SGLang for commands that start an engine
    job           one run, in a process of its own
    surface       what others build on, for ``graphpact sglang diff``

Does not: put anything into SGLang; the other rooms do.
"""
