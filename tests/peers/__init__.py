"""Builders of released engines, unedited, on a machine that has neither the engine nor a GPU.

The job unpacks the released wheel into a cache, puts stand-ins in the place of what is absent, and constructs
each builder that can be constructed. Nothing of an engine is in this repository.

Does not: run with ``make test``, but for its own unit tests; they need no wheel.
"""
