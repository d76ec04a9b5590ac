"""Write the pictures of commands, ``docs/pictures/*.svg``: real output, with colours, at a fixed width.

    python docs/tools/screenshots.py [NAME...]

The commands run in a folder of their own with a link to `examples`. Two plugins are made known there: `acme`,
which is that of the lesson about a first backend, and `my_attention`, with a planted bug. A test holds the
pages to `PICTURES`; the numbers in a picture are those of its last run.

Does not: judge the output; the same commands on the pages are tests.
"""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import site_folder
from pages import DOCS, ROOT, blocks_of
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

FOLDER = DOCS / "pictures"
RIGHT = "page_table.copy_(torch.where(first_key < view.seq_lens[:, None], pages, 0))"
WRONG = (
    "pages = torch.where(first_key < view.seq_lens[:, None], pages, 0)\n"
    "        page_table.copy_(torch.where(view.req_pool_indices[:, None] > 0, pages, page_table))"
)
"""The bug of `my_attention`: padding rows keep the pages of an earlier batch."""
_LESSON = DOCS / "tutorial/first-backend.md"


@dataclass(frozen=True)
class Picture:
    """One picture.

    Args:
        command: The command, as it is shown.
        width: Columns of the terminal.
        status: The exit status of the command.
        stream: What is shown, ``stdout`` or ``stderr``.
        lines: The number of lines that are shown; None for all.
    """

    command: str
    width: int = 100
    status: int = 0
    stream: str = "stdout"
    lines: int | None = None


_GP03 = "graphpact check my_attention --quick --lane decode-page16-gqa-float32 --only GP03"
PICTURES: Mapping[str, Picture] = {
    "check-fails": Picture(_GP03, status=1),
    "check-passes": Picture("graphpact check acme --quick"),
    "plugins": Picture("graphpact plugins", width=150, lines=24),
    "generate": Picture(
        "graphpact generate --config examples/demo.toml --file examples/prompts.txt --verify", stream="stderr"
    ),
    "explain": Picture("graphpact explain GP03"),
}
"""The pictures, by the name of their file."""


def write(names: Sequence[str]) -> None:
    """Run the commands of pictures and write their files.

    Raises:
        RuntimeError: A command ended with another exit status than its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        _prepare(work)
        for name in names:
            picture = PICTURES[name]
            screen = _run(picture, work)
            svg = _drawn(picture, screen)
            (FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")


def _prepare(work: Path) -> None:
    """Link the examples, and make both plugins known in the folder ``site``."""
    (work / "examples").symlink_to(ROOT / "examples")
    acme = work / "acme"
    (acme / "acme_attention").mkdir(parents=True)
    (table,) = (block for block in blocks_of(_LESSON) if block.file == "acme/pyproject.toml")
    (acme / "pyproject.toml").write_text(table.text, encoding="utf-8")
    shutil.copy(ROOT / "examples/recipes/backend.py", acme / "acme_attention/__init__.py")
    shutil.copytree(ROOT / "examples/third_party", work / "third_party")
    file = work / "third_party/my_attention/backend.py"
    text = file.read_text(encoding="utf-8")
    if text.count(RIGHT) != 1:
        raise RuntimeError(f"the line of the planted bug is not in {file.name}: {RIGHT}")
    file.write_text(text.replace(RIGHT, WRONG), encoding="utf-8")
    for project in (acme, work / "third_party"):
        site_folder.add(project, work / "site")


def _run(picture: Picture, work: Path) -> str:
    """Return what a command writes to the shown stream, with the codes of colours."""
    program = str(Path(sys.executable).parent / "graphpact")
    done = subprocess.run(
        [program, *shlex.split(picture.command)[1:]],
        cwd=work,
        env=os.environ
        | {
            "PYTHONPATH": str(work / "site"),
            "COLUMNS": str(picture.width),
            "FORCE_COLOR": "1",
            "TTY_INTERACTIVE": "0",
            "TERM": "xterm-256color",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != picture.status:
        raise RuntimeError(f"{picture.command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return str(getattr(done, picture.stream)).replace(f"{work}/", "")


def _drawn(picture: Picture, screen: str) -> str:
    """Return a terminal with a command and its output as SVG."""
    console = Console(
        record=True,
        width=picture.width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(Text(f"$ {picture.command}", "bold"))
    lines = screen.rstrip().splitlines()
    console.print(Text.from_ansi("\n".join(line.rstrip() for line in lines[: picture.lines])))
    if picture.lines is not None and len(lines) > picture.lines:
        console.print(Text("...", "dim"))
    svg = console.export_svg(title="graphpact", theme=MONOKAI, unique_id="graphpact")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts of a server
    svg = svg.replace("Fira Code, monospace", "monospace")
    return re.sub(r"\s*\n+", "\n", svg)


if __name__ == "__main__":
    write(sys.argv[1:] or [*PICTURES])
