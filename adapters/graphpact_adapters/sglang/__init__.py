"""Attention backends of SGLang as graphpact backends.

Does not: import SGLang.
"""
