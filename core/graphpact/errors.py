"""The errors of graphpact: one tree, every message says what was asked, what is there, what to do next.

    GraphpactError                     .code  the exit status of the command line
    ├── UsageError              2      the caller can mend it
    │   ├── ConfigError                an unknown key, a value out of range, an unreadable file
    │   ├── PluginError                a plugin that cannot be had under the name that was asked for
    │   │   ├── UnknownPluginError     nothing offers that name
    │   │   ├── RejectedPluginError    something does, and was refused with a reason
    │   │   └── AmbiguousPluginError   two distributions do
    │   └── SlotError                  a slot declared or filled against the registry's rules
    │       ├── UnknownSlotError       no slot of that name
    │       └── UnallocatedSlotError   a slot that has no memory
    ├── ContractError           1      a promise of the contract was broken
    │   ├── PactBreach                 replay does not agree with capture
    │   ├── CaptureError               work that no graph can hold was met while recording
    │   └── ReplayError                a replay read or left what it must not (strict lanes)
    │       └── PoisonError            it read what no step wrote, or no request owns
    └── EngineError             3      the engine itself is at fault

Does not: print, exit or translate anything; the command line does that in one place.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal


class GraphpactError(Exception):
    """Base of every error that graphpact raises on purpose.

    Args:
        message: What was asked and what is there, in one sentence.
        hint: What to do next. Printed on a line of its own after ``help:``.
    """

    code: ClassVar[int] = 3

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  help: {self.hint}"


class UsageError(GraphpactError):
    """The caller asked for something that cannot be had; nothing was done."""

    code = 2


class ConfigError(UsageError):
    """A configuration key or value that is not valid."""


class PluginError(UsageError):
    """A plugin cannot be had under the name that was asked for."""


class UnknownPluginError(PluginError):
    """No installed distribution offers the name."""


class RejectedPluginError(PluginError):
    """A distribution offers the name and was refused; the message carries the reason."""


class AmbiguousPluginError(PluginError):
    """Two distributions offer one name; the message names both."""


class SlotError(UsageError, ValueError):
    """A slot was declared, bound or filled against the registry's rules; nothing was written.

    A `ValueError` too, and the two below what the original registry raises (PR 26742), so that a program
    written for it catches ours.
    """


class UnknownSlotError(SlotError, KeyError):
    """No slot has that name; the message names the nearest."""

    __str__ = UsageError.__str__  # KeyError would quote it


class UnallocatedSlotError(SlotError, RuntimeError):
    """A slot has no buffer: it is not registered, or not enabled."""


class ContractError(GraphpactError):
    """A promise between capture and replay was broken.

    Args:
        message: See `GraphpactError`.
        hint: See `GraphpactError`.
        rule: Id of the rule that was broken, such as ``"GP03"``; None where that is not known.
            `graphpact explain` tells about each.
    """

    code = 1

    def __init__(self, message: str, *, hint: str | None = None, rule: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.rule = rule


class KernelRefusal(RuntimeError):  # noqa: N818  it is no error of the kernel's
    """A kernel's own check refuses what it was given, before it reads or writes anything.

    Args:
        message: What was given, and what the kernel takes.
        rule: Id of the rule that the caller broke.
    """

    def __init__(self, message: str, *, rule: str) -> None:
        super().__init__(message)
        self.rule = rule


BreachKind = Literal[
    "address", "shape", "stride", "dtype", "device", "value", "bound", "type", "fields", "length"
]
"""What a replay can break. ``fields`` is also a mapping's keys; ``length`` is a list's or a tuple's."""

_BROKEN: dict[BreachKind, str] = {  # which rule of the contract a difference breaks
    "address": "GP01",
    "device": "GP01",
    "shape": "GP07",
    "stride": "GP07",
    "dtype": "GP07",
    "value": "GP08",
    "bound": "GP08",
    "type": "GP10",
    "fields": "GP10",
    "length": "GP05",
}


@dataclass(frozen=True, slots=True)
class Breach:
    """One promise that a replay does not keep.

    Args:
        path: The field, such as ``metadata.kv_indptr``.
        rule: What of it differs.
        captured: What was promised, in words.
        replayed: What is there now, in words.
        owner: Label of the slot whose memory was captured; None where it was no slot's.
        advice: What to do.
    """

    path: str
    rule: BreachKind
    captured: str
    replayed: str
    owner: str | None
    advice: str

    @property
    def broken(self) -> str:
        """Id of the contract's rule that it breaks."""
        return _BROKEN[self.rule]

    @property
    def text(self) -> str:
        """What differs, and both values, in words."""
        if self.rule == "fields":
            return f"fields: {self.captured}, {self.replayed}"
        return f"{self.rule} captured {self.captured}, got {self.replayed}"


class PactBreach(ContractError):  # noqa: N818  the field's word for it
    """What prepares a replay does not agree with what was captured.

    Args:
        message: Shape and first field in one line, then a table of all fields that differ.
        hint: What to do about the first.
        breaches: Every difference that was found, in the order of the walk; the first names the rule.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, breaches: Sequence[Breach] = ()
    ) -> None:
        super().__init__(message, hint=hint, rule=breaches[0].broken if breaches else None)
        self.breaches = tuple(breaches)


class CaptureError(ContractError):
    """Work that no graph can hold was met while recording; no graph was kept."""


class ReplayError(ContractError):
    """A replay read, wrote or outlived memory that it must not: what a strict lane looks for."""


class PoisonError(ReplayError):
    """A replay, or what prepares it, fails on poison, or gives it: it read what nobody wrote or owns."""


class EngineError(GraphpactError):
    """The engine broke a rule of its own: a defect of graphpact or of a plugin."""


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the known word nearest to ``word``, or None where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return close[0] if close else None
