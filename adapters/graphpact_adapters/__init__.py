"""Attention builders of other engines under graphpact's suite: the adapters.

    calls             methods that the engine calls and that no lane calls
    stand_ins         replacements for modules that are not installed, for authors
    needs             names that an author's code reads and that the adapter does not provide
    kernel_reads      what a recorded kernel reads from a builder's metadata, and models of the kernels
    read_leaves       the tensors and host numbers of these reads, by path
    recurrent         the same for layers with recurrent states
    tasks             kernels whose arguments the engine updates in the graph, as on an NPU
    backend           a builder as the backend of a lane, with the calls that its engine makes
    builder_lanes     a lane of builders, as experiments see it
    recurrent_states  recurrent states in the memory of a lane, and an oracle for them
    diagnosis         why a replay is wrong
    faults            the fields that make a graph wrong, and their rules
    experiments       what is checked
    vllm              builders of vLLM: `graphpact_adapters.vllm.Builders`
    sglang            backends of SGLang: `graphpact_adapters.sglang.Backends`

Does not: import an engine, or contain code of one.
"""
