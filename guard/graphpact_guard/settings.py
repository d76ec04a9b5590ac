"""`Settings`: what ``GRAPHPACT`` and the file that ``GRAPHPACT_CONFIG`` names ask for.

``GRAPHPACT`` is a list of words, such as ``guard,verify:64,record:steps.jsonl``; `WORDS` says what each does.
The file is TOML. It has the same settings by name, and those that are too long for a word:

    verify = 64
    [[ignore]]
    rule = "GP08"
    field = "*.max_seq_len_k"
    reason = "the kernel reads lengths from a tensor"

Words win over the file.

Does not: read settings of an engine, which stay the engine's.
"""

import dataclasses
import fnmatch
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from graphpact.errors import BREACHES, ConfigError, did_you_mean
from graphpact.files import read_file

WORDS_VARIABLE, FILE_VARIABLE = "GRAPHPACT", "GRAPHPACT_CONFIG"

TapeMode = Literal["fast", "strict"]
FaultAction = Literal["log", "raise", "eager"]


@dataclass(frozen=True, slots=True)
class Ignored:
    """Faults that are not reported.

    Args:
        rule: The id of a rule, such as ``GP08``, or ``*`` for all rules.
        field: The path of the field, such as ``metadata.max_seq_len_k``; ``*`` stands for any text.
        reason: Why this is right.
    """

    rule: str
    field: str
    reason: str

    def covers(self, rule: str, field: str) -> bool:
        """Return whether a fault of ``rule`` in ``field`` is ignored."""
        return fnmatch.fnmatchcase(rule, self.rule) and fnmatch.fnmatchcase(field, self.field)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is asked for.

    Args:
        guard: Whether every replay is held to its pact.
        tape: How the engine runs on a tape instead of a GPU; None for not at all.
        on_fault: What follows a fault: a message in the log; an error, which ends the step; or a message, and
            the shape runs eagerly from then on.
        contents: The contents of padding rows and live rows are checked in every N-th replay; 0 for never.
        verify: Every N-th replay is compared with an eager run of the same batch; 0 for never.
        start: So many synthetic steps of each captured shape are compared with eager runs before the engine
            serves; 0 for none.
        ranks: Whether ranks that take the same steps compare before each one which graph they take.
        record: The file in which the last steps are recorded; None for no recording.
        ignore: Faults that are not reported.
    """

    guard: bool = False
    tape: TapeMode | None = None
    on_fault: FaultAction = "log"
    contents: int = 64
    verify: int = 0
    start: int = 0
    ranks: bool = False
    record: Path | None = None
    ignore: tuple[Ignored, ...] = ()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Return the settings of this process.

        Raises:
            ConfigError: A word, a key or a value is unknown, or the file cannot be read.
        """
        path = environment.get(FILE_VARIABLE)
        values = {} if not path else dict(_values_of_file(Path(path)))
        for word in environment.get(WORDS_VARIABLE, "").split(","):
            if word.strip():
                values |= _values_of_word(word.strip())
        if any(values.get(name) for name in ("verify", "contents", "start", "ranks", "record")):
            values["guard"] = True
        return cls(**values)

    @property
    def is_active(self) -> bool:
        """Whether anything is asked for."""
        return self.guard or self.tape is not None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError("a whole number, at least 0")
    return int(text)


def _file(text: str) -> Path:
    if not text.strip():
        raise ValueError("the path of a file")
    return Path(text)


def _tape_mode(text: str) -> TapeMode:
    if text not in ("", "strict"):
        raise ValueError("strict, or nothing")
    return "strict" if text else "fast"


@dataclass(frozen=True, slots=True)
class Word:
    """A word of ``GRAPHPACT``.

    Args:
        form: The word as it is written, such as ``verify:N``.
        text: What it asks for.
        setting: The name of its setting.
        value: Returns the setting's value for the text after the colon, or raises `ValueError` that says what
            is accepted. None if the word takes no such text.
        alone: The setting's value without a colon.
    """

    form: str
    text: str
    setting: str
    value: Callable[[str], Any] | None = None
    alone: Any = None


WORDS: dict[str, Word] = {
    "guard": Word("guard", "hold every replay to its pact", "guard", alone=True),
    "tape": Word("tape, tape:strict", "run on a tape instead of a GPU", "tape", _tape_mode, "fast"),
    "verify": Word("verify:N", "compare every N-th replay with an eager run", "verify", _count),
    "contents": Word("contents:N", "check padding and live rows in every N-th replay", "contents", _count),
    "start": Word(
        "start, start:N",
        "compare N synthetic steps of each shape (3 without a number) with eager runs before serving",
        "start",
        _count,
        3,
    ),
    "ranks": Word(
        "ranks",
        "compare in each step which graph each rank takes, and end it if they differ",
        "ranks",
        alone=True,
    ),
    "record": Word("record:FILE", "record the last steps for `graphpact check --scenario`", "record", _file),
    "log": Word("log", "write faults to the log", "on_fault", alone="log"),
    "raise": Word("raise", "end the step at a fault", "on_fault", alone="raise"),
    "eager": Word("eager", "run a shape eagerly after a fault", "on_fault", alone="eager"),
}
"""The words of ``GRAPHPACT``, by what precedes the colon."""


def _values_of_word(word: str) -> dict[str, Any]:
    name, colon, text = word.partition(":")
    known = WORDS.get(name)
    if known is None:
        forms = ", ".join(each.form for each in WORDS.values())
        near = did_you_mean(name, WORDS)
        raise ConfigError(
            f"{WORDS_VARIABLE} has the word {word!r}, which is unknown",
            hint=f"did you mean {WORDS[near].form!r}?" if near else f"the words are {forms}",
        )
    if not colon:
        if known.alone is None:
            raise ConfigError(f"{WORDS_VARIABLE}: {word!r} needs a value", hint=f"write {known.form}")
        return {known.setting: known.alone}
    if known.value is None:
        raise ConfigError(f"{WORDS_VARIABLE}: {name!r} takes no value, it has {text!r}", hint=f"write {name}")
    try:
        return {known.setting: known.value(text)}
    except ValueError as error:
        raise ConfigError(
            f"{WORDS_VARIABLE}: {word!r} has an invalid value", hint=f"{known.form} takes {error}"
        ) from error


def _values_of_file(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        values = tomllib.loads(read_file(path).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{FILE_VARIABLE}={path}: {error}", hint=f"name a TOML file, or unset {FILE_VARIABLE}"
        ) from error
    names = [field.name for field in dataclasses.fields(Settings)]
    for name, value in values.items():
        if name not in names:
            near = did_you_mean(name, names)
            raise ConfigError(
                f"{path}: the key {name!r} is unknown",
                hint=f"did you mean {near!r}?" if near else f"the keys are {', '.join(names)}",
            )
        yield name, _checked(path, name, value)


_CHOICES = {"tape": get_args(TapeMode), "on_fault": get_args(FaultAction)}


def _checked(path: Path, name: str, value: Any) -> Any:
    """Return the value of a key; raise `ConfigError` if it is invalid."""
    if name == "ignore":
        entries = value if isinstance(value, list) else [value]
        return tuple(_ignored(path, entry) for entry in entries)
    if name in _CHOICES:
        is_valid, accepted = value in _CHOICES[name], " or ".join(map(repr, _CHOICES[name]))
    elif name == "record":
        if isinstance(value, str) and value.strip():
            return Path(value)
        is_valid, accepted = False, "the path of a file"
    elif name in ("guard", "ranks"):
        is_valid, accepted = isinstance(value, bool), "true or false"
    else:
        is_valid = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        accepted = "a whole number, at least 0"
    if not is_valid:
        raise ConfigError(f"{path}: {name} = {value!r} is invalid", hint=f"it takes {accepted}")
    return value


def _ignored(path: Path, entry: Any) -> Ignored:
    names = [field.name for field in dataclasses.fields(Ignored)]
    if not isinstance(entry, dict) or entry.keys() != set(names):
        raise ConfigError(
            f"{path}: an entry of [[ignore]] is {entry!r}", hint="it has the keys rule, field and reason"
        )
    if not all(isinstance(value, str) and value.strip() for value in entry.values()):
        raise ConfigError(f"{path}: an entry of [[ignore]] is {entry!r}", hint="its values are texts")
    rules = {rule for rule, _ in BREACHES.values()}
    if entry["rule"] != "*" and not entry["rule"].startswith("GP"):
        raise ConfigError(
            f"{path}: the rule {entry['rule']!r} is unknown",
            hint=f"it is '*' or an id such as {min(rules)}; see `graphpact explain --list`",
        )
    return Ignored(**entry)
