"""The commands of the engine: ``generate``, ``doctor``, ``pact``.

Does not: define the command line itself; `graphpact_cli` does, and finds these by entry point.
"""
