"""Write and parse ``docs/reference/models.md``, the page of the sweep's results.

Architectures with the same verdict and reason share a row, so that the table fits a screen.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import transformers

from model_sweep.comparison import NEW_TOKENS, PROMPT_LENGTHS, Result, Verdict

PAGE = Path(__file__).parents[2] / "reference/models.md"

_VERSION = "transformers "
_TEXT = """\
# Models

Every causal architecture of {version}, as a small random model, held against transformers itself. Written by
`make models`; the tests hold the page to what they measure.

{counts}

- **equal**: prompts of {lengths} tokens run together and get {new} more tokens each. The logits of every
  step equal those of one full forward pass of transformers: with prefill in chunks and decode steps in graphs
  on the tape, and with prefill at once and no graphs.
- **refused**: the engine does not load the model, and says why. A model runs only if each token depends on
  its own sequence alone, through its position and its attention. A probe of a few forward passes finds out.
- **not built**: transformers itself cannot make the small model, or cannot run it.

Decode is *captured*, or *eager* where the model's own code does what a graph cannot hold. A capture of it
fails with the reason below; `--set lanes.decode.runner=eager` runs the model.

| verdict | decode | reason | architectures |
|---|---|---|---|
"""


def render(results: Iterable[Result]) -> str:
    """Return the page."""
    results = sorted(results, key=lambda result: result.case)
    found = Counter(result.verdict for result in results)
    shown = [v for v in get_args(Verdict) if found[v] or v in ("wrong", "crashed")]
    text = _TEXT.format(
        version=_VERSION + transformers.__version__,
        counts=", ".join(f"{found[verdict]} {verdict}" for verdict in shown) + f"; {len(results)} in all.",
        lengths=", ".join(map(str, sorted(PROMPT_LENGTHS))),
        new=NEW_TOKENS,
    )
    groups: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        groups.setdefault(_cells(result), []).append(f"`{result.case}`")

    def place(group: tuple[str, ...]) -> tuple[int, int, tuple[str, ...]]:
        return get_args(Verdict).index(group[0]), -len(groups[group]), group

    rows = (f"| {' | '.join(group)} | {', '.join(groups[group])} |\n" for group in sorted(groups, key=place))
    return text + "".join(rows)


def row(result: Result) -> str:
    """Return the line of one result."""
    return f"| {' | '.join((result.case, *_cells(result)))} |\n"


def rows(page: str) -> dict[str, str]:
    """Return the line of each result of a page, as `row` writes it, by case."""
    lines = page.splitlines()
    found = {}
    for line in lines[lines.index("|---|---|---|---|") + 1 :]:
        *group, cases = line.removeprefix("| ").removesuffix(" |").split(" | ")
        for case in re.findall("`(.*?)`", cases):
            found[case] = f"| {' | '.join((case, *group))} |\n"
    return dict(sorted(found.items()))


def _cells(result: Result) -> tuple[str, ...]:
    return result.verdict, result.decode, result.reason.replace("|", r"\|")


def is_of_this_version(page: str) -> bool:
    """Return whether a page was written with the installed version of transformers."""
    return f"{_VERSION}{transformers.__version__}," in page
