"""`SglangOffer`: SGLang for commands that start an engine, found in the group ``graphpact.engines``.

Does not: import SGLang; each run is a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

from graphpact.engines import EngineJob, EngineOffer, EngineResult
from graphpact.errors import EngineError
from graphpact.files import write_file
from graphpact_sglang import SUPPORTED

_TAIL = 30  # lines of a failed run's log


class SglangOffer(EngineOffer):
    """SGLang, as it is installed in this environment."""

    name: ClassVar[str] = "SGLang"

    def unavailable(self) -> str | None:
        """Return why SGLang cannot run here, or None if it can."""
        try:
            installed = version("sglang")
        except PackageNotFoundError:
            return "SGLang is not installed in this environment; `make sglang` makes one for it"
        return None if installed in SUPPORTED else f"SGLang {installed} is none of {', '.join(SUPPORTED)}"

    def run(self, words: str, job: EngineJob) -> EngineResult:
        """Run a job in SGLang's own processes; faults of replays are written to stderr.

        Raises:
            EngineError: It failed; the message has the end of its log.
        """
        environment = os.environ | {"GRAPHPACT": words, "TRITON_INTERPRET": "1"}
        with tempfile.TemporaryDirectory(prefix="graphpact-sglang-") as folder:
            asked, result = Path(folder, "job.json"), Path(folder, "result.json")
            write_file(asked, json.dumps(asdict(job)))
            done = subprocess.run(
                [sys.executable, "-m", "graphpact_sglang.job", str(asked), str(result)],
                check=False,
                env=environment,
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
                    f"SGLang ended with status {done.returncode}:\n{tail}",
                    hint="the first error in this log is SGLang's own, or names what graphpact refused",
                )
            return EngineResult.load(result)
