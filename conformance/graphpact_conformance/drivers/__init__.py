"""Checks of graph drivers.

    requirement `Requirement`: one requirement on a driver
    promises    the promises of the driver contract, for every driver
    acts        legal and illegal acts in and around graphs, from ``graph_acts.toml``
    strictness  the acts as checks of drivers with a strict mode
    examine     all checks of one driver, with results

Does not: check lanes; see `graphpact_conformance.suite`.
"""
