"""Plugins in child processes, which may hang, exit, crash or print.

    supervise      what a run asks of processes, and the report of what they found
    target_task    the processes of one target: its results, and what their ends mean
    worker         the process that imports a plugin and examines it
    messages       what a worker tells besides results

`graphpact_cli.children` starts, watches and ends the processes.

Does not: check a rule; see `graphpact_conformance.suite`.
"""
