"""`read_statements`: what ``graphpact.toml`` in a plugin's package says of the rules of the tiers.

    [my_backend]                               # the plugin; ["runner:NAME"] if two kinds have the name
    declared = "done"
    plan-invariants = { exempt = "its kernel has no plan" }
    gpu-run = { done = "evidence/h200.json" }  # a file beside this one
    guarded = "to do"

Does not: verify a statement (see `proofs`).
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graphpact.errors import UsageError, did_you_mean
from graphpact.files import read_file
from graphpact_conformance.tier_rules import TIER_RULES, TierRule

FILE = "graphpact.toml"
Status = Literal["done", "exempt", "to do"]
_FORMS = '"done", "to do", { exempt = "the reason" }'


@dataclass(frozen=True, slots=True)
class Statement:
    """What a plugin says of one rule.

    Args:
        rule: The rule.
        status: Where it stands.
        text: The reason of an exemption, or the file that proves what is done; None otherwise.
    """

    rule: TierRule
    status: Status
    text: str | None = None


def read_statements(home: Path, kind: str, name: str) -> list[Statement] | None:
    """Return the statements of one plugin, in the order of the rules; None if it makes none.

    Args:
        home: The folder of its package.
        kind: Its kind.
        name: Its name.

    Raises:
        UsageError: The file is not valid TOML, has an unknown rule or a wrong value, or lacks a rule.
    """
    file = home / FILE
    if not file.is_file():
        return None
    try:
        document = tomllib.loads(read_file(file).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}") from None
    spellings = (f"{kind}:{name}", f"{kind.removeprefix('graph_')}:{name}", name)
    table = next((document[each] for each in spellings if each in document), None)
    if table is None:
        return None
    if not isinstance(table, dict):
        raise UsageError(f"{file}: {name} is not a table", hint=f"write [{name}]")
    concerned = [rule for rule in TIER_RULES.values() if rule.concerns(kind)]
    _require_known(file, table, concerned, kind)
    missing = [rule.name for rule in concerned if rule.name not in table]
    if missing:
        raise UsageError(
            f"{file}: {name} does not state {', '.join(missing)}", hint=f'write {missing[0]} = "to do"'
        )
    return [_statement(file, rule, table[rule.name]) for rule in concerned]


def _require_known(file: Path, table: Mapping[str, Any], concerned: Iterable[TierRule], kind: str) -> None:
    names = [rule.name for rule in concerned]
    for key in table:
        if key not in TIER_RULES:
            near = did_you_mean(key, names)
            hint = f"did you mean {near!r}?" if near else f"the rules are {', '.join(names)}"
            raise UsageError(f"{file}: unknown rule {key!r}", hint=hint)
        if key not in names:
            raise UsageError(f"{file}: {key} does not concern plugins of kind {kind}", hint="remove the line")


def _statement(file: Path, rule: TierRule, value: Any) -> Statement:
    at = f"{file}: {rule.name} = {value!r}"
    if value == "to do":
        return Statement(rule, "to do")
    if value == "done":
        if rule.takes is not None:
            raise UsageError(
                f"{at} names no proof", hint=f'write {rule.name} = {{ done = "FILE" }}: {rule.takes}'
            )
        return Statement(rule, "done")
    forms = _FORMS + (', or { done = "FILE" }' if rule.takes else "")
    if not isinstance(value, dict) or len(value) != 1:
        raise UsageError(at, hint=f"write {forms}")
    ((status, text),) = value.items()
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{at} has an empty text", hint=f"write {forms}")
    if status == "exempt":
        if not rule.exempt:
            raise UsageError(f"{at}: no plugin is exempt from it", hint='write "done" or "to do"')
        return Statement(rule, "exempt", text)
    if status == "done" and rule.takes is not None:
        return Statement(rule, "done", text)
    raise UsageError(at, hint=f"write {forms}")
