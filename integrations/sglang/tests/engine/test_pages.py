"""The commands of the page about SGLang on a laptop, as they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs/sglang-laptop.md"
OURS = ".venv-sglang/bin/graphpact"


def _commands() -> list[str]:
    """Return the commands of the page that run our command."""
    page = PAGE.read_text(encoding="utf-8").replace("\\\n", "")
    blocks = re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line.startswith(OURS)]


def _run(command: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    words[0] = str(Path(sys.executable).parent / "graphpact")
    environment = {name: value for name, value in os.environ.items() if name != "GRAPHPACT"}
    return subprocess.run(words, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_the_page_has_three_commands() -> None:
    """The page shows the job of a laptop, drafts, and the reproduction of SGLang's own fault."""
    assert len(_commands()) == 3


def test_the_first_command_compares_the_engine_with_itself() -> None:
    """The real engine, in its own processes, gives its eager answers on the tape."""
    done = _run(_commands()[0])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Return the number of bytes from the specified")
    assert "2 of 2 answers have the eager tokens" in done.stderr
    assert "; 0 faults;" in done.stderr
    assert re.search(r"DecodeCudaGraphRunner\[2\] +\d+ ", done.stderr)
