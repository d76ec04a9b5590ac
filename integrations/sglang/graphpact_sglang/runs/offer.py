"""`SglangOffer`: SGLang for commands that start an engine, found in the group ``graphpact.engines``.

Does not: import SGLang; each run is a process of its own.
"""

from typing import ClassVar

from graphpact.engines import LoadOffer, ProcessOffer
from graphpact_sglang import SUPPORTED


class SglangOffer(ProcessOffer):
    """SGLang, as it is installed in this environment."""

    name: ClassVar[str] = "SGLang"
    distribution: ClassVar[str] = "sglang"
    supported: ClassVar[tuple[str, ...]] = SUPPORTED
    job_module: ClassVar[str] = "graphpact_sglang.runs.job"
    make_target: ClassVar[str] = "sglang"

    def under_load(self) -> LoadOffer:
        """Return how `graphpact swarm` runs SGLang."""
        from graphpact_sglang.load.offer import SglangLoadOffer  # noqa: PLC0415  only for that command

        return SglangLoadOffer()
