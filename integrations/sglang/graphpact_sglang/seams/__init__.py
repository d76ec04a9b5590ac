"""What SGLang has that graphpact watches: its graph runners, steps and ranks.

    hooking    hooks that are applied, or end the start
    runners    what graph runners hold, and the names of their graphs
    steps      counts of replays and of eager steps
    ranks      the place among the ranks of a model, and which ones refuse the same graphs

Does not: compare anything, or change what SGLang does.
"""
