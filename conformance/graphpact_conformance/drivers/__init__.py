"""Checks of graph drivers.

    driver_requirement  one requirement on a driver
    promises            the promises of the driver contract, for every driver
    acts                legal and illegal acts in and around graphs, from ``graph_acts.toml``
    strictness          the acts as checks of drivers with a strict mode
    driver_lanes        the lanes of a driver, fast and strict

Does not: check lanes; see `graphpact_conformance.suite`.
"""
