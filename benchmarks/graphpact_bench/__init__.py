"""The command `graphpact bench`: times of graphpact, as ratios inside one process.

    cli            the command: which measurements, with which options
    options        what every measurement is given
    models         the models that are measured: random Llamas of chosen widths and depths
    timing         interleaving, median and quartiles, the check for equal tokens
    report         tables for the terminal, JSON and pictures
    machine        the hardware and the versions that a report names
    ways           what is compared: the engine's lanes, transformers, torch.compile, vLLM, llama.cpp
    workers        other engines, each in a process and an environment of its own
    repeated_step  one decode step that can be repeated, for the modules that measure parts of it
    *              one module for each measurement, named as on the command line

Does not: import anything when it is imported.
"""
