"""`VllmOffer`: vLLM for commands that start an engine, found in the group ``graphpact.engines``.

Does not: import vLLM; each run is a process of its own.
"""

from typing import ClassVar

from graphpact.engines import ProcessOffer
from graphpact_vllm import SUPPORTED, installed_release


class VllmOffer(ProcessOffer):
    """vLLM, as it is installed in this environment."""

    name: ClassVar[str] = "vLLM"
    distribution: ClassVar[str] = "vllm"
    supported: ClassVar[tuple[str, ...]] = SUPPORTED
    job_module: ClassVar[str] = "graphpact_vllm.job"
    make_target: ClassVar[str] = "vllm"

    def installed(self) -> str:
        """Return the installed release of vLLM, which several distributions have."""
        return installed_release()
