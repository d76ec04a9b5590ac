"""Plugins in child processes, which may hang, exit, crash or print.

    supervise      runs the processes, and makes the report of their results
    target_task    the processes of one target: its results, and what their ends mean
    worker         the process that imports a plugin and examines it
    messages       what a worker sends besides results

`graphpact_cli.children` starts, watches and ends the processes.

Does not: check a rule; see `graphpact_conformance.suite`.
"""
