"""The commands of the suite: ``check``, ``explain``, ``report``.

Does not: hold the command line itself; `graphpact_cli` does, and finds these by entry point.
"""
