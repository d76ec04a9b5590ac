"""Attention builders of other engines under graphpact's suite: the adapters.

    calls             methods that an engine calls and no lane does
    stand_ins         modules in the place of absent ones, for authors
    needs             what code reads and an adapter lacks
    kernel_reads      what a recorded kernel reads of a builder's metadata, and models of the kernels
    recurrent         the same of layers with recurrent states
    tasks             kernels whose arguments an engine updates in the graph, as on an NPU
    backend           a builder as the backend of a lane, with the engine's part around it
    builder_lanes     a lane of builders
    recurrent_states  recurrent states as memory of a lane, and an oracle for them
    diagnosis         why a replay is wrong
    faults            the fields that make a graph wrong, and their rules
    experiments       what is checked
    vllm              builders of vLLM: `graphpact_adapters.vllm.Builders`
    sglang            backends of SGLang: `graphpact_adapters.sglang.Backends`

Does not: import an engine, or contain code of one.
"""
