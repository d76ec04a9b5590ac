"""The pages of the documentation, and the blocks of code in them, with the comments that say what tests do.

A comment in the line before a block says something about it: ``<!-- not run: WHY -->``,
``<!-- run by FILE -->``, ``<!-- exits STATUS -->``, ``<!-- file PATH -->``. The page `docs/how-to/develop.md`
describes them.

Does not: run a block.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
API = DOCS / "reference/api"
"""Where `make docs` writes the reference of names; git ignores it."""
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "*/README.md",
        "plugins/*/README.md",
        "integrations/*/README.md",
        "examples/*/README.md",
        "examples/models/*/README.md",
    )
    for path in ROOT.glob(pattern)
    if API not in path.parents
)
"""Every page: the README, those of `docs`, and the READMEs of distributions and examples."""
INCLUDED = re.compile(r"(<!-- include (\w+)(.*?) -->\n).*?(<!-- /include -->)", re.DOTALL)
"""A part that `docs/tools/reference.py` writes: its begin, its kind, its arguments, its end."""
_BLOCK = re.compile(
    r"(?P<marks>(?:^<!-- (?!/?include ).*? -->\n)*)"
    r"^```(?P<language>.*)\n(?P<text>(?s:.*?))^```$",
    re.MULTILINE,
)
_MARK = re.compile(r"<!-- (not run: |run by |exits |file )(.*?) -->")


@dataclass(frozen=True)
class Block:
    """A block of code that is written in a page by hand.

    Args:
        language: As the fence has it.
        text: Its lines; those that end with a backslash are as they stand.
        line: The number of its first line.
        not_run: Why no test runs it.
        run_by: The file of the test that runs it.
        exits: The exit status of its last command.
        file: The path of the file that it is.
    """

    language: str
    text: str
    line: int
    not_run: str | None = None
    run_by: str | None = None
    exits: int = 0
    file: str | None = None


@cache
def blocks_of(page: Path) -> tuple[Block, ...]:
    """Return the blocks of a page that are not included from code, in order."""
    text = page.read_text(encoding="utf-8")
    text = INCLUDED.sub(lambda part: "\n" * part[0].count("\n"), text)
    found = []
    for block in _BLOCK.finditer(text):
        marks = dict(_MARK.findall(block["marks"]))
        found.append(
            Block(
                language=block["language"],
                text=block["text"],
                line=text.count("\n", 0, block.start("text")) + 1,
                not_run=marks.get("not run: "),
                run_by=marks.get("run by "),
                exits=int(marks.get("exits ", 0)),
                file=marks.get("file "),
            )
        )
    return tuple(found)
