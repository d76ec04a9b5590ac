"""The subject that is a lane of graphpact: a backend, a runner and a driver, one of which is checked.

    lane_under_test   the checked plugin in one configuration
    rig               an instance of it: a lane, its memory, and a record of each step
    reference         the suite's own backend and runner, as partners of the checked plugin
    memory            what the graphs of a lane read, outside the slots that each step writes
    holders           the name under which a plugin holds a tensor
    tracer            the operations of an eager call
    watched_hooks     which hook changes the state of the process

Does not: judge anything; experiments see it through `graphpact_conformance.subject`.
"""
