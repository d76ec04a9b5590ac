"""`EngineOffer` and `ProcessOffer`: what an integration offers of the engine into which it puts graphpact.

Commands find an engine by the entry-point group ``graphpact.engines``, and import nothing of it:

    offer = PluginCatalog.scan().select("engine", "sglang")()
    result = offer.run("tape,guard", EngineJob(engine={...}, prompts=["The "], max_new_tokens=8))

Does not: know an engine, or import torch.
"""

import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from graphpact.engines.jobs import EngineJob, EngineResult
from graphpact.engines.load import LoadOffer
from graphpact.errors import EngineError

_TAIL = 30  # lines of a failed run's log


class EngineOffer(ABC):
    """An engine that runs with graphpact inside. It is built without arguments, and imports no engine.

    Attributes:
        name: The engine's own name, such as ``SGLang``.
    """

    name: ClassVar[str]

    @abstractmethod
    def unavailable(self) -> str | None:
        """Return why the engine cannot run in this environment, with what to do; None if it can."""

    def is_installed(self) -> bool:
        """Return whether the engine is installed in this environment, in any release."""
        return self.unavailable() is None

    def release(self) -> str:
        """Return the installed release of the engine, for reports."""
        return ""

    def builder_values(self) -> Any:
        """Return what an adapter gives to the engine's own builders, in this process; None for stand-ins.

        What it has is up to the adapter: for vLLM see `graphpact_adapters.vllm.values.Values`.
        """
        return None

    def under_load(self) -> LoadOffer | None:
        """Return how `graphpact swarm` runs the engine; None if the integration does not offer it."""
        return None


class ProcessOffer(EngineOffer):
    """An engine of which each run is a process, ``python -m JOB_MODULE JOB RESULT``.

    The module reads the file JOB (`EngineJob.load`), runs the engine, and writes the file RESULT
    (`EngineResult.save`).

    Attributes:
        distribution: The name of the engine's distribution, such as ``sglang``.
        supported: The releases that the integration knows.
        job_module: The dotted name of the module.
        make_target: The target of ``make`` that makes an environment for the engine.
    """

    distribution: ClassVar[str]
    supported: ClassVar[tuple[str, ...]]
    job_module: ClassVar[str]
    make_target: ClassVar[str]

    def unavailable(self) -> str | None:
        """Return why the engine cannot run in this environment, or None if it can."""
        try:
            installed = self.installed()
        except PackageNotFoundError:
            remedy = f"`make {self.make_target}` makes one for it"
            return f"{self.name} is not installed in this environment; {remedy}"
        if installed in self.supported:
            return None
        return f"{self.name} {installed} is none of {', '.join(self.supported)}"

    def is_installed(self) -> bool:
        """Return whether the engine is installed in this environment, in any release."""
        try:
            self.installed()
        except PackageNotFoundError:
            return False
        return True

    def installed(self) -> str:
        """Return the installed release of the engine.

        Raises:
            PackageNotFoundError: It is not installed.
        """
        return version(self.distribution)

    def release(self) -> str:
        """Return the installed release of the engine; empty if it is not installed."""
        return self.installed() if self.is_installed() else ""

    def environment(self, words: str) -> dict[str, str]:
        """Return the environment variables of a run; ``words`` is the value of ``GRAPHPACT``."""
        return os.environ | {"GRAPHPACT": words, "TRITON_INTERPRET": "1"}

    def run(self, words: str, job: EngineJob) -> EngineResult:
        """Run a job in a process of its own; faults of replays are written to stderr.

        Raises:
            EngineError: It failed; the message has the end of its log.
        """
        with tempfile.TemporaryDirectory(prefix=f"graphpact-{self.distribution}-") as folder:
            asked, result = Path(folder, "job.json"), Path(folder, "result.json")
            job.save(asked)
            done = subprocess.run(
                [sys.executable, "-m", self.job_module, str(asked), str(result)],
                check=False,
                env=self.environment(words),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
            lines = done.stdout.decode(errors="replace").splitlines()
            for line in lines:
                if "graphpact guard: GP" in line:
                    sys.stderr.write(f"{line}\n")
            if done.returncode or not result.exists():
                tail = "\n".join(lines[-_TAIL:])
                raise EngineError(
                    f"{self.name} ended with status {done.returncode}:\n{tail}",
                    hint=f"the first error in this log is {self.name}'s own, or names what graphpact refused",
                )
            return EngineResult.load(result)
