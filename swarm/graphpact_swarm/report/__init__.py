"""The results of many runs.

    results.py   one line of JSON for each run, in a file that a later run continues
    page.py      one HTML page: what was found, and features by verdict

Does not: judge.
"""
