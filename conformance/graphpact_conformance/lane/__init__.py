"""What is tested, and an instance of it: a lane of a backend, a runner and a driver, one of which is checked.

    lane_under_test   the checked plugin in one configuration; it makes rigs, and findings about them
    rig               an instance of it: a lane, its memory, and its steps
    runners           the runner of a lane, and the batches that it gets
    snapshots         what is seen of a step
    tested_code       the line of the tested code that raised an error, its caches, and code of other engines
    reference_backend, reference_runner
                      the suite's own backend and runners, as partners of the checked plugin
    memory            what the graphs of a lane read, outside the slots that each step writes
    holders           the name under which a plugin holds a tensor
    tracer            the operations of an eager call, and of the runs of a capture
    watched_hooks     which hook changes the state of the process

Does not: judge anything; see `graphpact_conformance.experiments`.
"""
