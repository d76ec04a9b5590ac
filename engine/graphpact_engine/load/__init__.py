"""This engine under generated load, for `graphpact swarm graphpact`.

    offer.py     features and their configurations
    engine.py    a started engine, driven step by step
    watching.py  an observer that notes batches and probabilities, and injects faults

Does not: draw or judge; `graphpact_swarm` does.
"""
