"""The commands of the pages about SGLang, as they stand there."""

import re
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engines import MODEL, ROOT
from page_commands import blocks, commands, get, parts, run, serving

from graphpact.recording import read_recording
from graphpact_guard import Settings

LAPTOP = ROOT / "docs/how-to/sglang-laptop.md"
GUARD = ROOT / "docs/how-to/sglang-guard.md"
OURS = ".venv-sglang/bin/graphpact"


def test_the_page_has_three_commands() -> None:
    """The page shows the job of a laptop, drafts, and the reproduction of SGLang's own fault."""
    assert len(commands(LAPTOP, f"{OURS} sglang run")) == 3


def test_the_first_command_compares_the_engine_with_itself() -> None:
    """The real engine, in its own processes, gives its eager answers on the tape."""
    done = run(commands(LAPTOP, OURS)[0])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Return the number of bytes from the specified")
    assert "2 of 2 answers have the eager tokens" in done.stderr
    assert "; 0 faults;" in done.stderr
    assert re.search(r"DecodeCudaGraphRunner\[2\] +\d+ ", done.stderr)


# -- the guard of a server -----------------------------------------------------------------------------------


def _server(words: str) -> tuple[dict[str, str], list[str]]:
    """Return environment and command of the page's server on a CPU, for a shipped model, with more words."""
    (by_hand,) = commands(LAPTOP, "launch_server")
    settings, command = parts(by_hand.replace("MODEL", str(MODEL)))
    settings["GRAPHPACT"] += f",{words}"
    return settings, [*command, "--enable-metrics"]


def test_a_server_is_guarded_as_the_page_says(tmp_path: Path) -> None:
    """The words of both commands, metrics, ``/server_info``, the last line, and the recorded steps."""
    asked = [
        re.search(r"GRAPHPACT=guard,(\S+)", command)[1]  # type: ignore[index]
        for command in commands(GUARD, "launch_server")
    ]
    assert asked == ["verify:1024", "record:steps.jsonl"]
    with serving(tmp_path, *_server(",".join(asked))) as (address, log):
        answer = get(
            f"{address}/generate",
            {"text": "The ", "sampling_params": {"temperature": 0, "max_new_tokens": 12}},
        )
        assert answer["meta_info"]["completion_tokens"] == 12
        state = get(f"{address}/server_info")["internal_states"][0]["graphpact"]
        time.sleep(6)
        metrics = get(f"{address}/metrics")
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
    (block,) = blocks(GUARD, "toml")
    path = tmp_path / "guard.toml"
    path.write_text(block)
    settings = Settings.from_environment({"GRAPHPACT": "guard", "GRAPHPACT_CONFIG": str(path)})
    expected = tomllib.loads(block)
    assert settings.verify == expected["verify"]
    assert [each.rule for each in settings.ignore] == ["GP08"]
    (code,) = blocks(GUARD, "python")
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102  the page's own block
    backend = names["AcmeBackend"]()
    (predicate,) = backend.graphpact_invariants.values()
    backend.planned_keys = 3
    lengths = torch.tensor([1, 2])
    assert predicate(backend, SimpleNamespace(seq_lens=lengths))
    assert not predicate(backend, SimpleNamespace(seq_lens=lengths + 1))
