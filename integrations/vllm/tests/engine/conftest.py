"""Fixtures of the tests with the real vLLM: each engine lives in a forked child of this process.

An import of vLLM takes half a minute, a start of its engine five seconds. So this process imports once, and
children fork. `make vllm-test` runs these tests, in the environment that `make vllm` makes.
"""

import gc
import os

os.environ["GRAPHPACT"] = "tape"  # read when vLLM chooses its platform; children choose their own words
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # Triton is looked for once; children choose their runner
os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"  # read at the import too; children choose at their start

import pytest
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu.model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401

os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "0"
gc.collect()
gc.freeze()
# vLLM collects garbage around its captures, half a second each if all that is imported here is looked at.
_unfreeze, gc.unfreeze = gc.unfreeze, gc.freeze


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run take more steps."""
    parser.addoption("--steps", type=int, default=100, help="Replays of each right builder.")


def pytest_sessionfinish() -> None:
    """Let the interpreter collect everything at its end; Triton complains of what is left."""
    _unfreeze()


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> int:
    """How many replays each right builder makes."""
    found: int = request.config.getoption("--steps")
    return found
