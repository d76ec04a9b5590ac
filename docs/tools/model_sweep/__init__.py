"""The sweep: small models of all causal architectures of transformers, compared with transformers itself.

    python -m model_sweep                writes docs/reference/models.md; `make models`
    python -m model_sweep llama gpt2     prints the rows of these two

The weights are random.
"""
