"""What vLLM has that graphpact watches: its builders, graphs, steps and ranks.

    hooking     wraps a method, or ends the start
    graphs      where vLLM captures and replays graphs, and their names
    shapes      the shapes of graphs
    builders    what each metadata builder made last
    batches     steps as graphpact's batches
    steps       counts of replays and of eager steps
    ranks       the place among the ranks of a model

Does not: compare anything, or change what vLLM does.
"""
