"""Plugins in processes of their own, which may hang, exit, crash, print or lie.

    supervise                 what a run asks of processes, and what their ends mean
    processes, keeper         how they are started, watched and ended
    nursery, worker           the process that a worker is forked from, and the one that examines a plugin
    blind, blind_program      the same batches where the suite is not imported, judged where the plugin is not
    job_wire, blind_wire      what these processes tell each other
    integrity                 functions that a plugin replaced

Does not: check a rule; see `graphpact_conformance.suite`.
"""
