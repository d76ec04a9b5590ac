"""Runs of vLLM's engine and its classes, for commands.

    cli               ``graphpact vllm``
    offer             vLLM for commands that start an engine
    job               one run, in a process of its own
    dispatch_job      the choices of its dispatchers, in a process of its own
    choices_report    these as a table, and a verdict
    builder_values    its specs, configurations and batches, for checks of builders
    surface           what others build on, for ``graphpact vllm diff``

Does not: put anything into vLLM; the other rooms do.
"""
