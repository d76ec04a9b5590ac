"""Whether the compiled kernels can be tested on this machine.

Does not: skip what a machine with a compiler can run; a build that fails there is an error.
"""

import pytest

from graphpact_kernels.compiled import load, missing

_fault = None if missing() else load()
if _fault is not None:
    raise RuntimeError(_fault)

COMPILED = () if missing() else ("compiled",)
"""The paths of tests through the C++ kernels: empty without a compiler."""

needs_compiled = pytest.mark.skipif(not COMPILED, reason="compiled kernels need a C++ compiler and ninja")
"""The mark of a test that runs them."""
