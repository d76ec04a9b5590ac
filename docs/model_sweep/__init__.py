"""The sweep: small models of every causal architecture of transformers, each held against transformers itself.

Does not: test an architecture with the weights that somebody trained.
"""
