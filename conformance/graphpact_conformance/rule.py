"""`Rule`: one requirement of a contract, with its id and its name.

Does not: list the rules; see `graphpact_conformance.rules`.
"""

from dataclasses import dataclass
from typing import Literal

Level = Literal["MUST", "SHOULD"]
Hook = Literal["populate", "prepare_replay", "init_metadata_capture", "init_metadata_replay"]
Call = Literal["extend", "decode", "state", "lanes", "every hook", "the constructor"]
"""The parts of speculation algorithms and observers that rules are about."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the contract.

    Args:
        id: ``GP01`` and on for graphs, ``SP01`` for speculation algorithms, ``OB01`` for observers.
        name: One to three words, joined by hyphens.
        level: ``MUST`` where conformance requires it, ``SHOULD`` elsewhere.
        requirement: The requirement, in one sentence.
        hooks: The hooks that it applies to, or other parts of a plugin.
        since: The first contract version with this rule. Plugins for earlier versions are not checked for it.
    """

    id: str
    name: str
    level: Level
    requirement: str
    hooks: tuple[Hook | Call, ...]
    since: int = 1

    def __str__(self) -> str:
        return f"{self.id} {self.name}"

    def not_in_force(self, contract: int) -> str | None:
        """Return why a plugin of a contract version is not held to this rule, or None if it is."""
        if self.since <= contract:
            return None
        return f"the plugin has contract version {contract}; the rule is in force since {self.since}"
