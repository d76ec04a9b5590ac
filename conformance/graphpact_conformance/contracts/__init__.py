"""Checks of plugins by the requirements of their contract: drivers, speculation algorithms and observers.

    requirement   `Requirement`: one requirement, with the function that verifies it
    examine       all requirements of one plugin, in the lanes of its contract, with results

Does not: define requirements; see `drivers`, `algorithms` and `observers` of the suite.
"""
