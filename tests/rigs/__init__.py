"""Rigs of the tests: a lane over a small model, a draft model with its oracle, and the command line."""
