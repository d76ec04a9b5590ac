"""What is said about a run.

    reference.py   what the model says about an answer, each request by itself
    judging.py     what is wrong
    coverage.py    what the run went through

Does not: run anything but the reference.
"""
