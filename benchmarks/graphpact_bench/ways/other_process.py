"""`OtherProcessWay`: an engine in a process and an environment of its own, as a way.

The named Python, 3.10 or newer, runs ``workers/serve.py`` with the file of the engine, and answers lines of
JSON. Times are taken in that process, which waits for its next line while other ways run. It gets neither the
paths of this environment nor graphpact's words.

Does not: know a particular engine; `graphpact_bench.workers` does.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from graphpact_bench.timing import Tokens, UnavailableWayError, Written
from graphpact_bench.ways.base import Way, WaySetting

_WORKERS = Path(__file__).parents[1] / "workers"
_PATIENCE = 1200.0  # seconds for one answer: the first may compile
_LEAVE = 10.0  # seconds until an idle process is ended
_OURS = {"PYTHONPATH", "PYTHONHOME", "GRAPHPACT"}
"""Variables that the process does not get: they are about this environment, or change the other engine."""


class OtherProcessWay(Way):
    """An engine that another Python runs.

    Args:
        name: Its name in the table.
        setting: What it is built for.
        engine: The file of the engine, see ``workers/serve.py``.
        patience: Seconds to wait for one answer.

    Raises:
        UnavailableWayError: No Python is named for it, it does not start, or the engine does not load.
    """

    is_foreign = True

    def __init__(self, name: str, setting: WaySetting, engine: Path, *, patience: float = _PATIENCE) -> None:
        super().__init__(name)
        self.patience = patience
        self._process: subprocess.Popen[str] | None = None
        if setting.device.type != "cpu":
            raise UnavailableWayError("it is compared on a CPU only")
        if name not in setting.pythons:
            raise UnavailableWayError(
                f"it runs in an environment of its own, and none is named: --python-of {name}=PYTHON"
            )
        self.python = setting.pythons[name]
        threads = torch.get_num_threads()
        environment = {key: value for key, value in os.environ.items() if key not in _OURS}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with the way
        try:
            self._process = subprocess.Popen(
                [self.python, str(_WORKERS / "serve.py"), str(engine)],
                env=environment | {"OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self.close()
            raise UnavailableWayError(f"{self.python} does not start: {error.strerror}") from error
        try:
            loaded = self._ask(
                "load",
                path=str(setting.path),
                dtype=setting.dtype,
                requests=max(setting.batch_sizes),
                prompt=setting.prompt,
                new=setting.new,
                threads=threads,
            )
        except UnavailableWayError:
            self.close()
            raise
        self.versions: Mapping[str, str] = loaded["versions"]

    def write(self, prompts: Tokens, count: int) -> Written:
        """Let the engine continue every prompt, and wait.

        Raises:
            UnavailableWayError: It failed, or its process ended.
        """
        answer = self._ask("write", prompts=prompts, count=count)
        return Written(answer["tokens"], answer["first"], answer["steps"])

    def _ask(self, what: str, **options: Any) -> dict[str, Any]:
        """Return the answer of the process to a request.

        Raises:
            UnavailableWayError: It is an error, there is none, or the process ended.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None  # noqa: S101, PT018
        gone = threading.Event()

        def give_up() -> None:
            gone.set()
            process.kill()

        timer = threading.Timer(self.patience, give_up)
        timer.start()
        try:
            with contextlib.suppress(OSError):  # the process ended; it may have said something
                process.stdin.write(json.dumps({what: options}) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
        finally:
            timer.cancel()
        if gone.is_set():
            raise UnavailableWayError(f"{self.python}: no answer in {self.patience:g} s")
        if not line:
            status = process.wait()
            raise UnavailableWayError(f"its process ended with status {status}: {self._last_words()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            raise UnavailableWayError(
                f"{self.python} answers {line.strip()[:80]!r}: it is not a Python"
            ) from None
        if "error" in answer:
            versions = ", ".join(f"{name} {version}" for name, version in answer["versions"].items())
            raise UnavailableWayError(f"{answer['error']} ({versions or 'none of its packages is there'})")
        return answer

    def _last_words(self) -> str:
        """Return the last line of the process's stderr."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it says nothing"

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101, PT018
            try:
                self._process.stdin.close()  # the process ends with it
                self._process.wait(timeout=_LEAVE)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._process = None
        self._stderr.close()


def vllm_cpu(name: str, setting: WaySetting) -> Way:
    """Return vLLM on a CPU.

    Raises:
        UnavailableWayError: See `OtherProcessWay`.
    """
    return OtherProcessWay(name, setting, _WORKERS / "vllm_cpu.py")


def llama_cpp(name: str, setting: WaySetting) -> Way:
    """Return llama.cpp.

    Raises:
        UnavailableWayError: See `OtherProcessWay`.
    """
    return OtherProcessWay(name, setting, _WORKERS / "llama_cpp.py")
