"""``graphpact explain``: a rule with a real bug that breaks it and the fix, or a word of a report.

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

from graphpact.errors import UsageError, did_you_mean
from graphpact_cli.console import data
from graphpact_conformance import vocabulary
from graphpact_conformance.cli.check import complete_rule, print_rules
from graphpact_conformance.rule import Rule
from graphpact_conformance.rules import EVERY_RULE, find_rule
from graphpact_conformance.tier_rules import TIER_RULES

if TYPE_CHECKING:
    from graphpact_conformance.real_bugs import RealBug

_WIDEST = 100  # columns of prose


def explain(
    word: Annotated[
        str | None,
        typer.Argument(
            metavar="WORD",
            help="The id or name of a rule, such as GP03; `batches`, `lanes`, `experiments` or `tiers`; or"
            " the name of a lane, of an experiment or of a rule of the tiers.",
            show_default=False,
            autocompletion=complete_rule,
        ),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Show a rule, a real bug that breaks it, how the suite detects it, and the fix; or a word of a report.

    Without a word, list all rules.
    """
    if word is None:
        print_rules(EVERY_RULE.values(), as_json=as_json)
        return
    found = _find(word.strip())
    if isinstance(found, dict):
        if as_json:
            sys.stdout.write(json.dumps(found, indent=2) + "\n")
        else:
            _print_meanings(data(), found)
        return
    from graphpact_conformance.real_bugs import REAL_BUGS  # noqa: PLC0415  long texts

    if found.id not in REAL_BUGS:
        _explain_check(found, as_json=as_json)
        return
    story = REAL_BUGS[found.id]
    if as_json:
        sys.stdout.write(json.dumps({**asdict(found), **asdict(story)}, indent=2) + "\n")
        return
    _print(data(), found, story)


def _find(word: str) -> Rule | dict[str, str]:
    """Return a rule, or the meanings of a word of reports, by its parts.

    Raises:
        UsageError: There is neither. The hint has the nearest rule, topic or experiment.
    """
    given, word = word, word.lower()
    if word in ("batches", "lanes"):
        return {word: vocabulary.BATCHES if word == "batches" else vocabulary.LANES}
    if word == "tiers" or word in TIER_RULES:
        rules = TIER_RULES.values() if word == "tiers" else [TIER_RULES[word]]
        return {f"{rule.name} ({rule.tier})": rule.text for rule in rules}
    if (parts := vocabulary.parts_of_lane(word)) is not None:
        return {part: text or "not known to this version" for part, text in parts}
    try:
        return find_rule(given)
    except UsageError as error:
        known = vocabulary.experiments()  # imports torch
        if word == "experiments":
            return known
        if word in known:
            return {word: known[word]}
        topics = ("batches", "lanes", "experiments", "tiers", *TIER_RULES, *known)
        near = did_you_mean(word, (*topics, *(rule.name for rule in EVERY_RULE.values())))
        if near not in topics:
            raise
        raise UsageError(
            f"{error.message}, and no experiment and no topic of reports has that name",
            hint=f"did you mean {near}? `graphpact explain experiments` lists experiments",
        ) from None


def _explain_check(rule: Rule, *, as_json: bool) -> None:
    """Show a rule of algorithms or observers, with the check that verifies it."""
    from graphpact_conformance.suite.contract_kinds import checks_of_rule  # noqa: PLC0415  torch

    checks = [{"check": each.name, "at": each.at, "fix": each.fix} for each in checks_of_rule(rule.id)]
    if as_json:
        sys.stdout.write(json.dumps({**asdict(rule), "checks": checks}, indent=2) + "\n")
        return
    _print_rule(data(), rule)
    for each in checks:
        data().print(Text("\nFix", "bold cyan"))
        _paragraph(data(), f"{each['at']}: {each['fix']}")


def _print_rule(console: Console, rule: Rule) -> None:
    about = f"  {rule.level}, since contract {rule.since}; {', '.join(rule.hooks)}"
    console.print(Text.assemble((str(rule), "bold"), (about, "dim")), soft_wrap=True)
    _paragraph(console, rule.requirement, "italic")


def _print(console: Console, rule: Rule, story: "RealBug") -> None:
    _print_rule(console, rule)
    for heading, text in (
        ("A real bug", story.story),
        ("Detection", story.detection),
        ("Fix", story.fix),
    ):
        console.print(Text(f"\n{heading}", "bold cyan"))
        _paragraph(console, text)
    console.print(Text(f"\n{story.thread}  {story.url}", "dim"), soft_wrap=True)


def _print_meanings(console: Console, meanings: dict[str, str]) -> None:
    for name, text in meanings.items():
        console.print(Text(name, "bold"))
        _paragraph(console, text)


def _paragraph(console: Console, text: str, style: str = "") -> None:
    width = min(_WIDEST, console.width) if console.is_terminal else console.width
    console.print(Padding(Text(text, style), (0, 0, 0, 2), expand=False), width=width)
