"""Checks of observers: objects that wrap the hooks of lanes and engines.

    probes          observers of the suite, outside and inside of the checked one
    observed        `ObservedLanes`: the lanes, steps and phases that an observer is checked with
    observing       the requirements, one for each rule ``OB``
    observer_lanes  the lanes of an observer: kinds of steps

Does not: know what an observer prints, measures or keeps of its own.
"""
