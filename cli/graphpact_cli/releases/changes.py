"""`compare_surfaces`: what differs between two releases, and what it means for heirs and callers.

Does not: know who uses a member; see `graphpact_cli.releases.uses`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from graphpact_cli.releases.surface import Member


@dataclass(frozen=True)
class MemberChange:
    """A member that is not in both releases, or not the same.

    Args:
        name: Its dotted name.
        kind: What happened to it.
        details: What differs, in one line.
        breaks_callers: Whether code that calls, reads or imports it may fail.
        breaks_heirs: Whether a class that overrides it, or that must override it now, may fail.
    """

    name: str
    kind: Literal["added", "removed", "changed"]
    details: str
    breaks_callers: bool
    breaks_heirs: bool

    @property
    def owner(self) -> str:
        """The dotted name of the class or module that has it."""
        return self.name.rpartition(".")[0]


def compare_surfaces(before: Mapping[str, Member], after: Mapping[str, Member]) -> list[MemberChange]:
    """Return the changes by name. Members of a class that is new or gone are not listed one by one."""
    changes = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        owner = name.rpartition(".")[0]
        if old is None and new is not None:
            if owner not in after or owner in before:
                is_demanded = "abstractmethod" in new.marks
                changes.append(
                    MemberChange(name, "added", _form(new), breaks_callers=False, breaks_heirs=is_demanded)
                )
        elif new is None and old is not None:
            if owner not in before or owner in after:
                changes.append(
                    MemberChange(name, "removed", _form(old), breaks_callers=True, breaks_heirs=True)
                )
        elif old is not None and new is not None and old != new:
            changes.append(_changed(old, new))
    return changes


def _form(member: Member) -> str:
    """Return how a member is declared."""
    parts = ", ".join(member.parts)
    is_called = member.kind in ("function", "method")
    return " ".join([*member.marks, f"({parts})" if is_called else parts or member.kind])


def _changed(old: Member, new: Member) -> MemberChange:
    gone: list[str] = []
    come: list[str] = []
    if old.kind != new.kind:
        gone, come = [old.kind], [new.kind]
    elif old.kind == "field":
        gone, come = [_form(old)], [_form(new)]
    else:
        come = [mark for mark in new.marks if mark not in old.marks]
        gone = [mark for mark in old.marks if mark not in new.marks]
        matcher = difflib.SequenceMatcher(a=old.parts, b=new.parts, autojunk=False)
        for tag, start, end, new_start, new_end in matcher.get_opcodes():
            if tag != "equal":
                gone += old.parts[start:end]
                come += new.parts[new_start:new_end]
    is_optional = not gone and all("=" in part or part.startswith("*") for part in come)
    details = ", ".join([*(f"-{part}" for part in gone), *(f"+{part}" for part in come)])
    return MemberChange(old.name, "changed", details, breaks_callers=not is_optional, breaks_heirs=True)
