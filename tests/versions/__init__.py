"""The versions of the contract: what each has, and that plugins of one run under the next.

Does not: hold the versions of distributions together; tests/release does.
"""
