"""Tests that commands on the pages can be copied: their files exist, or an earlier command writes them."""

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pages import PAGES, blocks_of

ROOT = Path(__file__).parents[1]
PROGRAMS = ("graphpact", "make", "pip", "python", "pytest", "cd")
WRITES = {"--badge", "--record", "--trace", "--metrics", "--report", "--json", "save", ">"}
"""Options whose argument is a file that the command writes; the word ``record:FILE`` has one too."""
_SETTING = re.compile(r"([A-Z_]+)=(\S*)")
_FILE = re.compile(r"[\w./-]+\.(toml|txt|jsonl?|py|md|prom|svg|html)|[\w.-]+(/[\w.-]+)+/?")
_BUILDER = re.compile(r"(\w+):\w+")


def _blocks(page: Path, language: str) -> Iterator[str]:
    """Yield the blocks of a page in a language."""
    yield from (block.text for block in blocks_of(page) if block.language == language)


def _commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command of a page, with preceding settings, but without program output."""
    for block in _blocks(page, "bash"):
        lines = block.replace("\\\n", " ")
        lines = re.sub(r"-c '[^']*'", "-c ''", lines)  # a program of several lines
        for line in lines.splitlines():
            program = next((word for word in line.split() if not _SETTING.fullmatch(word)), None)
            if program in PROGRAMS or (program is None and line.strip()):
                yield shlex.split(line, comments=True)


class _Reader:
    """A reader of a page who types its commands, from the root or from the folder of an example's page."""

    def __init__(self, page: Path) -> None:
        self.folder = page.parent if page.parent.parent == ROOT / "examples" else ROOT
        self.written = {block.file for block in blocks_of(page)}
        self.variables: dict[str, str] = {}

    def missing(self, words: Sequence[str]) -> Iterator[tuple[str, bool]]:
        """Yield each file that a command names, and whether it is missing."""
        path = self.folder
        for before, word in itertools.pairwise(["", *words]):
            if setting := _SETTING.fullmatch(word):
                name, value = setting.groups()
                self.variables[name] = value
                self.written |= set(re.findall(r"record:([^,]+)", value))
                path = self.folder / value if name == "PYTHONPATH" else path
                if "/" in value:
                    yield value, not (self.folder / value).exists()
                continue
            file = self.variables.get(word[1:], word) if word.startswith("$") else word
            if before in WRITES:
                self.written.add(file)
            elif "--adapter" in words and (builder := _BUILDER.fullmatch(file)):
                yield file, not (path / f"{builder[1]}.py").exists()
            elif _FILE.fullmatch(file):
                was_written = any(file == each or file.startswith(f"{each}/") for each in self.written)
                yield file, not (was_written or (self.folder / file).exists() or (ROOT / file).exists())
        if words[0] == "cd":
            self.folder /= words[1]


def _files(page: Path) -> dict[str, bool]:
    """Return the files that the commands of a page name, and whether each is missing."""
    reader = _Reader(page)
    return {file: missing for words in _commands(page) for file, missing in reader.missing(words)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.relative_to(ROOT)}")
def test_every_file_in_a_command_of_a_page_is_there(page: Path) -> None:
    """A file, folder or module in a command exists, or an earlier command writes it."""
    assert [file for file, missing in _files(page).items() if missing] == []


def test_commands_and_their_files_are_found() -> None:
    """The reader understands settings, variables, redirections, and changes of the folder."""
    found = {file for page in PAGES for file in _files(page)}
    assert {"examples/engine.toml", "examples/prompts.txt", "examples/models/tiny-llama"} <= found
    assert {"acme_backend:AcmeAttnBackend", "examples/sglang", "steps.jsonl", "after.json"} <= found
    assert sum(1 for page in PAGES for _ in _commands(page)) > 60


def test_a_file_that_is_not_there_is_found(tmp_path: Path) -> None:
    """The reader reports commands whose files do not exist."""
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\ngraphpact generate --config engine.toml --file $FILE > out.txt\nDIR=no/folder\n```\n"
    )
    assert _files(page) == {"engine.toml": True, "no/folder": True}


def test_what_pip_installs_is_here() -> None:
    """On the pages, pip installs folders of this repository, since no index has its distributions."""
    for page in PAGES:
        for words in _commands(page):
            if words[0] == "pip":
                assert [word for word in words if word.startswith("graphpact")] == [], f"{page}: {words}"


def test_files_that_python_on_the_pages_opens_are_there() -> None:
    """A configuration or a prompt file that Python code on a page opens is in the repository."""
    for page in PAGES:
        for block in _blocks(page, "python"):
            for path in re.findall(r'Path\("([\w./-]+\.(?:toml|txt))"\)', block):
                assert (ROOT / path).exists(), f"{page.name}: {path}"
