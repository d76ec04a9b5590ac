"""`VllmLoad`: vLLM under generated load.

Does not: import vLLM, until `prepare`.
"""

import gc
import os
from collections.abc import Mapping, Sequence
from typing import Any

from graphpact.engines import EngineStart, Feature, KnownFinding, LoadedEngine, LoadOffer
from graphpact_vllm.load import arguments
from graphpact_vllm.load.known import KNOWN

_VARIABLES = {
    "GRAPHPACT": "tape",  # read when vLLM chooses its platform
    "HF_HUB_OFFLINE": "1",
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",  # processes fork after they ran models, so torch must have no threads
    "PYTHONHASHSEED": "0",  # vLLM iterates over sets of names, and hashes blocks
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "CRITICAL",  # an error in a step writes all that was scheduled
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",  # it decorates functions of layers when they are imported
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # Triton is looked for once; V1 needs none
}


class VllmLoad(LoadOffer):
    """What vLLM offers for generated load."""

    def features(self) -> Sequence[Feature]:
        """Return the features of configurations."""
        return arguments.FEATURES

    def refused(self, how: EngineStart) -> str | None:
        """Return why vLLM refuses a combination of values, or one with this model; or None."""
        return arguments.refused(how)

    def ranks(self, choice: Mapping[str, Any]) -> int:
        """Return the number of processes: two for two ranks."""
        return 1 if choice["parallel"] == 1 else 2

    def shares_requests(self, choice: Mapping[str, Any]) -> bool:
        """Return whether all ranks run all requests; those of data parallelism have their own."""
        return bool(choice["parallel"] != "dp2")

    def variables(self) -> Mapping[str, str]:
        """Return the environment variables of a process that imports vLLM.

        ``PYTHONHASHSEED`` is read when the interpreter starts.
        """
        return _VARIABLES

    def known(self) -> Sequence[KnownFinding]:
        """Return findings of this release that were looked into."""
        return KNOWN

    def prepare(self) -> None:
        """Import vLLM, and keep what is there out of garbage collections, so that processes fork cheaply."""
        # isort: off
        import vllm.v1.engine.llm_engine  # noqa: PLC0415
        import vllm.v1.worker.cpu.model_runner  # noqa: PLC0415
        import vllm.v1.worker.cpu_worker  # noqa: F401, PLC0415
        # isort: on

        gc.collect()
        gc.freeze()
        # vLLM collects garbage around its captures, half a second each if all that is imported is looked at.
        gc.unfreeze = gc.freeze

    def start(self, how: EngineStart) -> LoadedEngine:
        """Start vLLM's engine in this process, once."""
        os.environ.update(arguments.variables_of(how))
        from graphpact_vllm.load.engine import LoadedVllm  # noqa: PLC0415  it imports vLLM

        return LoadedVllm(how)
