"""Speculative decoding: runners that record drafts, and the algorithms that use them.

Does not: contain a draft model, verify drafts, or choose tokens; engines do.
"""
