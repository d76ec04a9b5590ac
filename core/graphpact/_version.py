"""The versions, alone in a file that is read without importing torch."""

__version__ = "0.1.0"
CONTRACT_VERSION = 1
"""The version of the contract; see `graphpact.hookspecs`."""
