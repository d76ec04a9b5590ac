"""Attention backends that run on a CPU and can be recorded.

    paged            ours, for keys and values in pages
    latents          ours, for latents (MLA)
    plugged          any graphpact attention backend, by name
    plugged_steps    its metadata from vLLM's batches
    registering      all of these in vLLM's registry, in each process

Does not: compute attention; kernels and plugins do.
"""
