"""Values that say whether the compiled kernels can be tested on this machine.

With a compiler nothing is skipped: a failing build is an error.
"""

import pytest

from graphpact_kernels.compiled import load, missing

_fault = None if missing() else load()
if _fault is not None:
    raise RuntimeError(_fault)

COMPILED = () if missing() else ("compiled",)
"""Test parameters for the C++ kernels; empty without a compiler."""

needs_compiled = pytest.mark.skipif(not COMPILED, reason="compiled kernels need a C++ compiler")
"""The mark for tests that run the compiled kernels."""
