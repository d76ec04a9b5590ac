"""``graphpact explain``: a rule, a real bug that breaks it, and the fix.

Does not: load any plugin.
"""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from graphpact.cli.console import data
from graphpact_conformance.cli.check import complete_rule, print_rules
from graphpact_conformance.rules import RULES, Rule, find_rule

if TYPE_CHECKING:
    from graphpact_conformance.stories import Story

_WIDEST = 100  # columns of prose


def explain(
    rule: Annotated[
        str | None,
        typer.Argument(
            metavar="RULE",
            help="Its id or name, such as GP03.",
            show_default=False,
            autocompletion=complete_rule,
        ),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Show a rule, a real bug that breaks it, how the suite detects it, and the fix.

    Without a rule, list all rules.
    """
    if rule is None:
        print_rules(RULES.values(), as_json=as_json)
        return
    found = find_rule(rule)
    from graphpact_conformance.stories import STORIES  # noqa: PLC0415  long texts

    story = STORIES[found.id]
    if as_json:
        sys.stdout.write(json.dumps({**asdict(found), **asdict(story)}, indent=2) + "\n")
        return
    _print(data(), found, story)


def _print(console: Console, rule: Rule, story: "Story") -> None:
    about = f"  {rule.level}, since contract {rule.since}; {', '.join(rule.hooks)}"
    console.print(Text.assemble((str(rule), "bold"), (about, "dim")), soft_wrap=True)
    _paragraph(console, rule.requirement, "italic")
    for heading, text in (
        ("A real bug", story.story),
        ("Detection", story.detection),
        ("Fix", story.fix),
    ):
        console.print(Text(f"\n{heading}", "bold cyan"))
        _paragraph(console, text)
    console.print(Text(f"\n{story.thread}  {story.url}", "dim"), soft_wrap=True)


def _paragraph(console: Console, text: str, style: str = "") -> None:
    width = min(_WIDEST, console.width) if console.is_terminal else console.width
    console.print(Padding(Text(text, style), (0, 0, 0, 2), expand=False), width=width)
