"""The tape: vLLM's worker, model runners and graphs on a CPU.

    taping      what the tape gives to vLLM before it starts
    platform    the platform of the tape: graphs on a CPU
    worker      the worker of the tape, for both model runners
    segments    vLLM's breakable graphs on a tape
    memory      what a graph may write, for the strict tape
    uneven      collectives that vLLM's communicator for CPUs lacks
    adapters    operations with LoRA adapters that can be recorded

Does not: record or replay; `graphpact_tape` does.
"""
