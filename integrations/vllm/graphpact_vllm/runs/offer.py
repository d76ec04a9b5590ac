"""`VllmOffer`: vLLM for commands that start an engine, found in the group ``graphpact.engines``.

Does not: import vLLM for runs; each is a process of its own.
"""

from typing import Any, ClassVar

from graphpact.engines import LoadOffer, ProcessOffer
from graphpact_vllm import SUPPORTED, installed_release


class VllmOffer(ProcessOffer):
    """vLLM, as it is installed in this environment."""

    name: ClassVar[str] = "vLLM"
    distribution: ClassVar[str] = "vllm"
    supported: ClassVar[tuple[str, ...]] = SUPPORTED
    job_module: ClassVar[str] = "graphpact_vllm.runs.job"
    make_target: ClassVar[str] = "vllm"

    def installed(self) -> str:
        """Return the installed release of vLLM, which several distributions have."""
        return installed_release()

    def builder_values(self) -> Any:
        """Return what vLLM gives to its metadata builders."""
        from graphpact_vllm.runs.builder_values import BuilderValues  # noqa: PLC0415  it imports vLLM

        return BuilderValues()

    def under_load(self) -> LoadOffer:
        """Return how `graphpact swarm` runs vLLM."""
        from graphpact_vllm.load.offer import VllmLoad  # noqa: PLC0415  only for that command

        return VllmLoad()


class VllmDispatchers(VllmOffer):
    """The same, for runs that only ask for the choices of vLLM's dispatchers."""

    job_module: ClassVar[str] = "graphpact_vllm.runs.dispatch_job"
