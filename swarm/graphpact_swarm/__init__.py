"""Whole engines under generated load, one seed a run.

    draws/         what a seed means: a configuration, and requests at the landmarks of the started engine
    runs/          the engine on a tape: started once for a configuration, forked for each run
    verdicts/      what is wrong with a run, and what it went through
    report/        results as lines of JSON, and one HTML page
    scenario.py    one run, as a file
    records.py     dataclasses from JSON
    outcome.py     everything that came of a run
    models.py      small models with random weights
    shrink.py      a smaller scenario with the same finding
    swarm.py       workers side by side, and what is done about a finding
    cli.py         ``graphpact swarm``

Does not: know an engine. Integrations offer theirs by `graphpact.engines.LoadOffer`.
"""
