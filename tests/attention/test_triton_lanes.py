"""Lanes of all backends on the Triton kernels, under Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
    ),
]

HERE = Path(__file__).parent


def test_lanes_of_every_mode_answer_what_the_oracle_says() -> None:
    """Lanes agree with the oracle; in a process, because Triton chooses its interpreter at import."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "triton_lanes.py")]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
