"""The version numbers, in a separate file that can be read without importing torch."""

__version__ = "0.1.0"
CONTRACT_VERSION = 1
"""The version of the contract; see `graphpact.hookspecs`."""
