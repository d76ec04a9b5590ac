"""The commands of the pages about SGLang, as they stand there."""

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
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engines import MODEL, ROOT

from graphpact.recording import read_recording
from graphpact_guard import Settings

LAPTOP = ROOT / "docs/sglang-laptop.md"
GUARD = ROOT / "docs/sglang-guard.md"
OURS = ".venv-sglang/bin/graphpact"


def _blocks(page: Path, language: str = "") -> list[str]:
    """Return the blocks of a page in a language."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for its, block in blocks if its == language]


def _commands(page: Path, part: str) -> list[str]:
    """Return the commands of a page that contain ``part``."""
    return [line for block in _blocks(page) for line in block.splitlines() if part in line]


def _run(command: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    words[0] = str(Path(sys.executable).parent / "graphpact")
    environment = {name: value for name, value in os.environ.items() if name != "GRAPHPACT"}
    return subprocess.run(words, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_the_page_has_three_commands() -> None:
    """The page shows the job of a laptop, drafts, and the reproduction of SGLang's own fault."""
    assert len(_commands(LAPTOP, f"{OURS} sglang run")) == 3


def test_the_first_command_compares_the_engine_with_itself() -> None:
    """The real engine, in its own processes, gives its eager answers on the tape."""
    done = _run(_commands(LAPTOP, OURS)[0])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Return the number of bytes from the specified")
    assert "2 of 2 answers have the eager tokens" in done.stderr
    assert "; 0 faults;" in done.stderr
    assert re.search(r"DecodeCudaGraphRunner\[2\] +\d+ ", done.stderr)


# -- the guard of a server -----------------------------------------------------------------------------------


def _server(words: str) -> tuple[dict[str, str], list[str]]:
    """Return environment and command of the page's server on a CPU, for a shipped model, with more words."""
    (by_hand,) = _commands(LAPTOP, "launch_server")
    parts = shlex.split(by_hand.replace("MODEL", str(MODEL)))
    at = parts.index("python")
    settings = dict(part.split("=", 1) for part in parts[:at])
    settings["GRAPHPACT"] += f",{words}"
    return settings, [sys.executable, *parts[at + 1 :]]


def _get(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310  our own
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        text = answer.read().decode()
    return json.loads(text) if text.startswith(("{", "[")) else text


@contextlib.contextmanager
def _serving(folder: Path, words: str) -> Iterator[tuple[str, Path]]:
    """Start the page's server in ``folder``; yield its address and its log."""
    settings, command = _server(words)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "server.log"
    with log.open("w") as lines:
        server = subprocess.Popen(
            [*command, "--port", str(port), "--enable-metrics"],
            env=os.environ | settings,
            cwd=folder,
            stdout=lines,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            assert server.poll() is None, log.read_text()
            with contextlib.suppress(OSError):
                _get(f"{address}/health")
                break
            time.sleep(1)
        yield address, log
    finally:
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def test_a_server_is_guarded_as_the_page_says(tmp_path: Path) -> None:
    """The words of both commands, metrics, ``/server_info``, the last line, and the recorded steps."""
    asked = [
        re.search(r"GRAPHPACT=guard,(\S+)", command)[1]  # type: ignore[index]
        for command in _commands(GUARD, "launch_server")
    ]
    assert asked == ["verify:1024", "record:steps.jsonl"]
    with _serving(tmp_path, ",".join(asked)) as (address, log):
        answer = _get(
            f"{address}/generate",
            {"text": "The ", "sampling_params": {"temperature": 0, "max_new_tokens": 12}},
        )
        assert answer["meta_info"]["completion_tokens"] == 12
        state = _get(f"{address}/server_info")["internal_states"][0]["graphpact"]
        time.sleep(6)
        metrics = _get(f"{address}/metrics")
    assert "graphpact guard: on" in log.read_text()
    graph = state["guard"]["graphs"]["DecodeCudaGraphRunner[1]"]
    assert graph["replays"] >= 11
    assert graph["verified"] == 1
    assert state["guard"]["faults"] == []
    (named,) = [row[0] for row in re.findall(r"`(graphpact_replays\w+)`()", GUARD.read_text("utf-8"))]
    assert re.search(named + r'\{.*runner="DecodeCudaGraphRunner".*\} [1-9]', metrics)
    assert re.search(r"graphpact guard: [1-9]\d* replays of \d+ graphs; .*; 0 faults", log.read_text())
    lanes = {lane.line.lane: lane for lane in read_recording(tmp_path / "steps.jsonl")}
    assert len(lanes["decode"].steps) >= 11
    assert lanes["extend"].steps


def test_the_settings_and_the_predicate_of_the_page_are_read(tmp_path: Path) -> None:
    """The TOML block is a file of settings, and a backend with the page's invariant has it as a predicate."""
    (block,) = _blocks(GUARD, "toml")
    path = tmp_path / "guard.toml"
    path.write_text(block)
    settings = Settings.from_environment({"GRAPHPACT": "guard", "GRAPHPACT_CONFIG": str(path)})
    expected = tomllib.loads(block)
    assert settings.verify == expected["verify"]
    assert [each.rule for each in settings.ignore] == ["GP08"]
    (code,) = _blocks(GUARD, "python")
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102  the page's own block
    backend = names["AcmeBackend"]()
    (predicate,) = backend.graphpact_invariants.values()
    backend.planned_keys = 3
    lengths = torch.tensor([1, 2])
    assert predicate(backend, SimpleNamespace(seq_lens=lengths))
    assert not predicate(backend, SimpleNamespace(seq_lens=lengths + 1))
