"""Attention backends that run on a CPU and can be recorded.

    paged     ours
    drafts    the same for the steps of a draft, and the kernels of its tree
    fa3       a model of FlashAttention-3's kernel, for SGLang's own backend

Does not: compute attention; `graphpact_kernels` does.
"""
