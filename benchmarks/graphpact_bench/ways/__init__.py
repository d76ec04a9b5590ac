"""What is compared: ways to continue prompts greedily, each by its name on the command line.

    base                 `Way` and the `WaySetting` that it is built for
    engines              graphpact's engine: eager, tape, tape-strict, cpu_graph, cuda
    generate             `generate` of transformers: growing cache, static cache, compiled by torch.compile
    continuous_batching  the continuous batching of transformers
    other_process        engines in a process and an environment of their own: vLLM, llama.cpp
    table                the names, and how each way is built

Does not: time anything.
"""
