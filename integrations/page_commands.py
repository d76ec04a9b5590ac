"""The blocks and commands of a page, and a server as a page starts it, for the tests of integrations.

Does not: judge what a command gives.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def blocks(page: Path, language: str = "bash") -> list[str]:
    """Return the blocks of a page in a language."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for its, block in found if its == language]


def commands(page: Path, part: str) -> list[str]:
    """Return the commands of a page that contain ``part``."""
    return [line for block in blocks(page) for line in block.splitlines() if part in line]


def parts(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a command sets, and its words behind the program's name."""
    words = shlex.split(command)
    at = next(at for at, word in enumerate(words) if not re.fullmatch(r"[A-Z_0-9]+=.*", word))
    return dict(word.split("=", 1) for word in words[:at]), words[at + 1 :]


def unchosen_environment() -> dict[str, str]:
    """Return the variables of this process without those by which tests choose how an engine runs."""
    chosen = ("GRAPHPACT", "VLLM_USE_", "TRITON_INTERPRET")
    return {name: value for name, value in os.environ.items() if not name.startswith(chosen)}


def run(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose program is ``graphpact``, by the one of this environment."""
    settings, words = parts(command)
    program = str(Path(sys.executable).parent / "graphpact")
    return subprocess.run(
        [program, *words],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=unchosen_environment() | settings,
    )


def get(url: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the answer to a request, which posts ``body`` if there is one; JSON is read."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310  our own
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        text = answer.read().decode()
    return json.loads(text) if text.startswith(("{", "[")) else text


@contextlib.contextmanager
def serving(folder: Path, settings: Mapping[str, str], command: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Start a server of Python in ``folder``; yield its address and its log, and end it by SIGTERM.

    Args:
        folder: Where it runs and where its log is.
        settings: Environment variables.
        command: The words behind ``python``; a free port is added.

    Raises:
        RuntimeError: It ended before it served; the message has its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "server.log"
    with log.open("w") as lines:
        server = subprocess.Popen(
            [sys.executable, *command, "--port", str(port)],
            env=unchosen_environment() | settings,
            cwd=folder,
            stdout=lines,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            if server.poll() is not None:
                raise RuntimeError(f"the server has ended:\n{log.read_text()}")
            with contextlib.suppress(OSError):
                get(f"{address}/health")
                break
            time.sleep(1)
        yield address, log
    finally:
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
