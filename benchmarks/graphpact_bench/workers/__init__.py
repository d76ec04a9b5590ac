"""Other engines, each in a process and an environment of its own, for `graphpact_bench.ways.other_process`.

    serve      the program that the named Python runs: lines of JSON in and out
    vllm_cpu   vLLM on a CPU
    llama_cpp  llama.cpp, on the same weights as the GGUF file that it writes

The environment of another engine need not have graphpact or torch. So these files import neither, and run as
files, not as modules of this package.

Does not: compare.
"""
