"""The sweep: a small model of every causal architecture of transformers, held against transformers itself.

    python -m model_sweep                writes docs/models.md; `make models`
    python -m model_sweep llama gpt2     prints the rows of these two

Does not: try trained weights.
"""
