"""Runs of vLLM's engine and its classes, for commands.

    cli               ``graphpact vllm``
    arguments         the arguments of a run on a laptop
    offer             vLLM for commands that start an engine
    job               one run, in a process of its own
    in_process        vLLM's engine in this process, driven step by step
    dispatch_job      the choices of its dispatchers, in a process of its own
    choices_report    these as a table, and a verdict
    builder_values    its specs, configurations and batches, for checks of builders
    surface           what others build on, for ``graphpact vllm diff``

Does not: put anything into vLLM; the other rooms do.
"""
