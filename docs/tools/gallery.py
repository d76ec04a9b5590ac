"""The gallery of bugs: for each rule the story of one real bug, and the exhibits of the museum that show it.

The pages of the gallery are ``docs/explanation/bugs``, one for each class of bugs in `CLASSES`. Their texts
come from `graphpact_conformance.rules`, `graphpact_conformance.real_bugs` and `graphpact_museum`.

Does not: run an exhibit. ``docs/reference/museum.md`` has the results of a run.
"""

from collections.abc import Mapping

from graphpact_conformance.real_bugs import REAL_BUGS
from graphpact_conformance.rules import RULES, Rule
from graphpact_museum.collection import EXHIBITS

CLASSES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "memory": ("Memory that a graph reads", ("GP01", "GP13", "GP14", "GP15")),
    "padding": ("Padding rows", ("GP03", "GP04", "GP05", "GP06")),
    "metadata": ("Metadata and plans of a step", ("GP02", "GP07", "GP08", "GP09", "GP21")),
    "capture": ("What a capture records", ("GP10", "GP11", "GP12", "GP19", "GP20")),
    "order": ("Copies, ranks and kept state", ("GP16", "GP17", "GP18")),
}
"""The classes of bugs: the name of the page, what they have in common, and their rules."""


def classes() -> str:
    """Return the table of the gallery's landing page: each rule, its class, and where its story is."""
    lines = ["| class | rule | what holds | a real bug | exhibits |", "|---|---|---|---|---|"]
    for page, (title, ids) in CLASSES.items():
        for rule in map(RULES.__getitem__, ids):
            bug, count = REAL_BUGS[rule.id], sum(each.rule == rule.id for each in EXHIBITS)
            cells = (
                f"[{title}]({page}.md)",
                f"[{rule}]({page}.md#{_anchor(rule)})",
                rule.requirement,
                f"[{bug.thread}]({bug.url})",
                f"{count}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def bugs(page: str) -> str:
    """Return the stories of one class of bugs, with the exhibits of each rule."""
    return "\n".join(_story(RULES[each]) for each in CLASSES[page][1])


def _story(rule: Rule) -> str:
    bug = REAL_BUGS[rule.id]
    lines = [
        f"## {rule}",
        "",
        f"**What holds.** {rule.requirement}",
        "",
        f"**A real bug**, [{bug.thread}]({bug.url}). {bug.story}",
        "",
        f"**How it is seen.** {bug.detection}",
        "",
        f"**How it is fixed.** {bug.fix}",
        "",
        "**Exhibits** of the museum that break this rule:",
        "",
        "| exhibit | what is planted in it | thread |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{each.name}` | {each.planted} | [{each.thread}]({each.url}) |"
        for each in EXHIBITS
        if each.rule == rule.id
    ]
    return "\n".join(lines) + "\n"


def _anchor(rule: Rule) -> str:
    """Return the anchor that forges and the site give to the heading of a rule."""
    return str(rule).lower().replace(" ", "-")
