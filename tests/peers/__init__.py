"""Check unedited builders of released engines on a machine without the engine and without a GPU.

The job unpacks the released wheel into a cache, replaces absent modules by stand-ins, and constructs each
builder that can be constructed. Nothing of an engine is in this repository.

Does not: run with ``make test``, except for its unit tests, which need no wheel.
"""
