"""Tests that every block of code on the pages is run, or says why it is not.

The blocks ``bash`` of a page are one script, which runs in a copy of the examples of the repository. Its
`graphpact` has more options, so that a command does less (`LESS`); its `pip` makes a distribution known
without a build. Blocks of Python and TOML have tests in `test_recipes`, and those of other engines in
`integrations`.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from pages import PAGES, Block, blocks_of

ROOT = Path(__file__).parents[1]
LESS = {
    "check": ("--quick", "--examples", "1", "--only", "GP12"),
    "generate": ("--max-new-tokens", "4"),
    "swarm": ("--seeds", "0:1"),
}
"""Options that a command gets in addition, so that it does less."""
INSTALLED = {
    "my_backend": "flashinfer",
    "my_runner": "cuda_graph",
    "driver:my_driver": "driver:tape",
    "driver:timed": "driver:tape",
}
"""Plugins of the pages that nobody has, and plugins of the same kind."""
PROGRAMS = ("graphpact", "make", "pip", "python", "pytest", "torchrun")
HERE = [
    page
    for page in PAGES
    if any(b.language == "bash" and not (b.not_run or b.run_by) for b in blocks_of(page))
]


def _name(page: Path) -> str:
    return f"{page.relative_to(ROOT)}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    """A block is a command, code or a table that a test runs, a file of the page, output, or marked."""
    for block in blocks_of(page):
        where = f"{_name(page)}:{block.line}"
        if block.not_run is not None:
            assert len(block.not_run.split()) > 2, f"{where}: why is it not run?"
        elif block.run_by is not None:
            _require_runs(block, where, page)
        elif block.language.startswith("{"):
            assert page.name == "index.md", f"{where}: a directive; forges show it unprocessed"
        elif block.language == "text":
            begins = [
                line for line in block.text.splitlines() if line.startswith(tuple(f"{p} " for p in PROGRAMS))
            ]
            assert [line for line in begins if not line.startswith("graphpact guard: ")] == [], where
        elif block.file is None:
            assert block.language in ("bash", "python", "toml"), f"{where}: no test runs {block.language!r}"


def _require_runs(block: Block, where: str, page: Path) -> None:
    """Raise if the file that runs a block does not name the page or, for `.ci/run`, a target of the block."""
    assert block.run_by is not None
    text = (ROOT / block.run_by).read_text(encoding="utf-8")
    if block.run_by != ".ci/run":
        assert page.name in text, f"{where}: {block.run_by} does not name the page"
        return
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    called = set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE))
    for target, needs in re.findall(r"^([\w-]+):([^#\n]*)", rules, re.MULTILINE):
        called |= {*needs.split()} if target in called else set()
    for line in block.text.splitlines():
        assert shlex.split(line, comments=True)[1] in called, f"{where}: .ci/run does not call {line}"


def test_a_block_that_nothing_runs_is_found(tmp_path: Path) -> None:
    """A block without language, and a mark without a reason, are refused."""
    page = ROOT / "docs/how-to/page.md"
    for text in ("```\ngraphpact plugins\n```\n", "<!-- not run: long -->\n```bash\nmake bench\n```\n"):
        file = tmp_path / "page.md"
        file.write_text(text)
        blocks = blocks_of(file)
        assert len(blocks) == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "blocks_of", lambda _, found=blocks: found)
            with pytest.raises(AssertionError, match=r"no test runs ''|why is it not run"):
                test_every_block_is_run_or_says_why_not(page)


# -- the commands ------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("page", HERE, ids=_name)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """The commands of a page, one after the other, end with the status that the page says."""
    work, tools, site = tmp_path / "work", tmp_path / "bin", tmp_path / "site"
    for folder in (work, tools, site):
        folder.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("examples", "build", "out") and not path.name.startswith("."):
            (work / path.name).symlink_to(path)
    shutil.copytree(ROOT / "examples", work / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name, program in _TOOLS.items():
        (tools / name).write_text(f"#!{sys.executable}\n{program}", encoding="utf-8")
        (tools / name).chmod(0o755)
    folder = work / page.parent.relative_to(ROOT) if page.parent.parent == ROOT / "examples" else work
    done = subprocess.run(
        ["/bin/bash", "-c", _script(blocks_of(page))],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("GRAPHPACT")}
        | {
            "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(site), str(ROOT / "docs/tools")]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def _script(blocks: Sequence[Block]) -> str:
    """Return the blocks of a page as a program of bash, which ends at the first wrong status."""
    lines = ["set -eu"]
    for block in blocks:
        if block.file is not None:
            lines += [f"mkdir -p {shlex.quote(str(Path(block.file).parent))}"]
            lines += [
                f"cat > {shlex.quote(block.file)} <<'END OF THE BLOCK'",
                f"{block.text}END OF THE BLOCK",
            ]
        elif block.language == "bash" and not (block.not_run or block.run_by):
            commands = block.text.replace("\\\n", " ").rstrip().splitlines()
            last = commands.pop()
            code, _, _ = last.partition("  #")
            lines += [*commands, "status=0", f"{code} || status=$?", f'test "$status" = {block.exits}']
    return "\n".join(lines)


_GRAPHPACT = f"""
import os, sys
less, installed = {LESS!r}, {INSTALLED!r}
words = [installed.get(word, word) for word in sys.argv[1:]]
more = list(less.get(words[0], ())) if not {{"--list", "--probe"}} & {{*words}} else []
if {{"--only", "--ranks", "driver:tape"}} & {{*words}}:
    more = [word for word in more if word not in ("--only", "GP12")]
program = os.path.join(os.path.dirname(sys.executable), "graphpact")
os.execv(program, [program, *words, *more])
"""
_PIP = """
import os, pathlib, sys
from importlib import metadata
import tomllib
import site_folder
site = pathlib.Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
action, *words = sys.argv[1:]
if action == "uninstall":
    site_folder.remove(words[-1], site)
    sys.exit()
for before, word in zip(words, words[1:]):
    if before == "-e":
        project = pathlib.Path(word.partition("[")[0])
        name = tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"]
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            site_folder.add(project, site)
"""
_TOOLS = {
    "graphpact": _GRAPHPACT,
    "pip": _PIP,
    "pytest": "import sys, pytest\nsys.exit(pytest.main(['-p', 'no:cacheprovider', *sys.argv[1:]]))\n",
    "python": "import os, sys\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n",
}
"""The programs that a page runs, as programs of Python."""
