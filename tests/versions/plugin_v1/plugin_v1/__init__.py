"""A plugin of each kind, as a third party wrote them for version 1 of the contract.

Does not: follow later versions; that is its purpose.
"""
