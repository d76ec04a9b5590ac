"""Settings for sphinx-autodoc2: annotations without command-line options, and docstrings as Markdown.

Does not: read code; autodoc2 finds signatures and docstrings in the source without importing it.
"""

import ast
import re
from collections.abc import Iterator, Sequence

from autodoc2.render.myst_ import MystRenderer
from autodoc2.utils import ItemData
from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_ITEM = re.compile(r" {4}(\*{0,2}[\w.]+): (.*)")


class Renderer(MystRenderer):
    """A renderer that omits the metadata of `typing.Annotated`, which `--help` shows."""

    def render_data(self, item: ItemData) -> Iterator[str]:
        """Yield an item, with its value if it has one; autodoc2 writes None, or several lines for none."""
        value, lines = item.get("value"), iter(super().render_data(item))
        for line in lines:
            if value is None and line == ":value: >":
                next(lines)
            else:
                yield ":value: ''" if value == "" and line.startswith(":value:") else line

    def format_annotation(self, annotation: str | None) -> str:
        """Return an annotation as a signature shows it."""
        if annotation and annotation.startswith("typing.Annotated["):
            annotation = ast.unparse(ast.parse(annotation, mode="eval").body.slice.elts[0])
        return super().format_annotation(annotation)


class Parser(MystParser):  # autodoc2 requires this class name
    """A parser of one docstring: Markdown, with the sections of Google's style as lists."""

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Parse a docstring into ``document``."""
        super().parse("\n".join(_markdown(inputstring.splitlines())), document)


def _markdown(lines: Sequence[str]) -> Iterator[str]:
    """Yield one output line for each line of a docstring, so that warnings name the right line."""
    in_section = False
    for line in lines:
        if section := _SECTION.fullmatch(line):
            in_section = True
            yield f"**{section[1]}**"
        elif in_section and (item := _ITEM.fullmatch(line)):
            yield f"- `{item[1]}`: {item[2]}"
        else:
            in_section = in_section and (not line or line.startswith("    "))
            yield line.removeprefix("    ") if in_section else line
