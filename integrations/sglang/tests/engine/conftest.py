"""Fixtures of the tests with the real SGLang: each engine lives in a forked child of this process.

An import of SGLang takes half a minute, a start of its scheduler five seconds. So this process imports once,
and children fork. `make sglang-test` runs these tests, in the environment that `make sglang` makes.
"""

import gc
import os

os.environ["GRAPHPACT"] = "tape"  # read when SGLang chooses its platform; children choose their own words
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")

from graphpact_sglang import stand_ins

stand_ins.install()

import pytest  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402, F401  after the stand-ins

gc.collect()
gc.freeze()
# SGLang collects garbage around its captures, half a second each if all that is imported here is looked at.
_unfreeze, gc.unfreeze = gc.unfreeze, gc.freeze


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run take more steps."""
    parser.addoption("--steps", type=int, default=100, help="Replays of each right backend.")


def pytest_sessionfinish() -> None:
    """Let the interpreter collect everything at its end; Triton complains of what is left."""
    _unfreeze()


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> int:
    """How many replays each right backend makes."""
    found: int = request.config.getoption("--steps")
    return found
