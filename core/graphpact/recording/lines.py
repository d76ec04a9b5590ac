"""The lines of a recording: lanes, steps and requests, and what each of their fields may hold.

    LaneLine       the sizes of a lane
    StepLine       a step of a lane
    RequestLine    a request of a step
    parse          a line of a file, with the type and the range of each field checked

Does not: compare fields with each other; see `graphpact.recording.checks`.
"""

import json
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from graphpact.attention import DraftLimits
from graphpact.batch import ForwardMode

VERSION = 1
HEADER = {"graphpact": "recording", "version": VERSION}
"""The first line of a file."""

MOST_BYTES, MOST_STEPS, MOST_LANES = 2**26, 1000, 32
MOST_CONTEXT, MOST_SLOTS, MOST_ROWS, MOST_TOKENS = 2**13, 2**18, 2**10, 2**12
"""Limits of a recording: tokens of a sequence, KV slots, request rows, and tokens of a step."""
MOST_SHAPES, MOST_DRAFT = 256, 64
"""Limits of a lane: captured shapes, and steps, branches and tokens of a draft."""


class LineError(Exception):
    """An invalid line. The message says what is wrong with it."""


# -- values ------------------------------------------------------------------------------------------

_Value = TypeVar("_Value")
_Check = Callable[[Any, str], Any]
"""Takes a value and its place in the line; returns the value of the field, or raises `LineError`."""


def _fault(value: object, at: str, needed: str) -> LineError:
    return LineError(f"{at or 'the line'}: needs {needed}, has {reprlib.repr(value)}")


def _whole(least: int, most: int) -> _Check:
    def check(value: Any, at: str) -> int:
        if type(value) is int and least <= value <= most:
            return value
        raise _fault(value, at, f"a whole number from {least} to {most}")

    return check


def _flag(value: Any, at: str) -> bool:
    if isinstance(value, bool):
        return value
    raise _fault(value, at, "true or false")


def _only(needed: object) -> _Check:
    def check(value: Any, at: str) -> object:
        if type(value) is type(needed) and value == needed:
            return needed
        raise _fault(value, at, repr(needed))

    return check


def _name(value: Any, at: str) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", value):
        return value
    raise _fault(value, at, "1 to 64 letters, digits, '_' or '-'")


def _mode(value: Any, at: str) -> ForwardMode:
    for mode in ForwardMode:
        if value == mode.value:
            return mode
    raise _fault(value, at, f"one of {', '.join(mode.value for mode in ForwardMode)}")


def _list(item: _Check, most: int, least: int = 0) -> _Check:
    def check(value: Any, at: str) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise _fault(value, at, f"a list of {least} to {most} items")
        return [item(each, f"{at}.{i}") for i, each in enumerate(value)]

    return check


def _or_null(check: _Check) -> _Check:
    return lambda value, at: None if value is None else check(value, at)


def _object(kind: type[_Value]) -> Callable[[Any, str], _Value]:
    """Return the check of an object whose keys are the fields of ``kind``; those with a default may lack.

    The check of a field is part of its annotation.
    """
    hints = get_type_hints(kind, include_extras=True)
    checks: dict[str, _Check] = {name: hint.__metadata__[0] for name, hint in hints.items()}
    optional = {name for name in checks if hasattr(kind, name)}

    def check(value: Any, at: str) -> _Value:
        if not isinstance(value, dict):
            raise _fault(value, at, "an object")
        prefix = f"{at}." if at else ""
        for name in value:
            if name not in checks:
                raise LineError(f"{prefix}{reprlib.repr(name)}: an unknown field")
        for name in checks:
            if name not in value and name not in optional:
                raise LineError(f"{prefix}{name}: the field is missing")
        return kind(**{name: checks[name](each, f"{prefix}{name}") for name, each in value.items()})

    return check


# -- lines -------------------------------------------------------------------------------------------

_IDS = _whole(0, MOST_SLOTS - 1)


@dataclass(frozen=True, kw_only=True)
class LaneLine:
    """The sizes of a lane.

    Args:
        lane: Its name.
        mode: The mode of its steps; single steps may be idle.
        page_size: KV slots of a page.
        context: The most tokens of a sequence.
        slots: KV slots, those of the scratch page 0 included.
        rows: Request rows, the scratch row 0 included.
        shapes: Requests and tokens of each captured shape.
        draft: ``[num_steps, topk, num_draft_tokens]``, all 1 without drafts.
        frozen: Whether it drafts on a cache that it only reads.
    """

    lane: Annotated[str, _name]
    mode: Annotated[ForwardMode, _mode]
    page_size: Annotated[int, _whole(1, MOST_SLOTS)]
    context: Annotated[int, _whole(1, MOST_CONTEXT)]
    slots: Annotated[int, _whole(2, MOST_SLOTS)]
    rows: Annotated[int, _whole(2, MOST_ROWS)]
    shapes: Annotated[list[list[int]], _list(_list(_whole(1, MOST_TOKENS), 2, least=2), MOST_SHAPES)]
    draft: Annotated[list[int], _list(_whole(1, MOST_DRAFT), 3, least=3)]
    frozen: Annotated[bool, _flag]

    @property
    def num_pages(self) -> int:
        """Its pages, the scratch page included."""
        return self.slots // self.page_size

    @property
    def draft_limits(self) -> DraftLimits:
        """The largest draft of its engine."""
        return DraftLimits(*self.draft)

    @property
    def is_tree(self) -> bool:
        """Whether its steps verify draft trees."""
        return self.mode is ForwardMode.TARGET_VERIFY and self.draft_limits.topk > 1

    @property
    def tokens_per_request(self) -> int | None:
        """New tokens of a request; None if its mode is ragged."""
        return self.draft_limits.topk if self.frozen else self.draft_limits.tokens_per_request(self.mode)

    @property
    def rows_per_request(self) -> int:
        """Rows of a request in a batch: one for each branch with frozen KV."""
        return self.draft_limits.topk if self.frozen else 1

    @property
    def slots_per_token(self) -> int:
        """KV slots that a new token writes: one for each draft step, none with frozen KV."""
        if self.frozen:
            return 0
        return self.draft_limits.num_steps if self.mode is ForwardMode.DRAFT_DECODE else 1


@dataclass(frozen=True, kw_only=True)
class RequestLine:
    """A request of a step.

    Args:
        row: Its request row.
        cached: Its cached tokens.
        pages: The pages of its positions in order, those of new tokens of the sequence included.
        slots: For each new token the KV slots that it writes; see `LaneLine.slots_per_token`.
        parents: For each new token the one that it follows, None for the first; for draft trees only.
        accepted: Accepted drafts; in a draft extend only.
    """

    row: Annotated[int, _whole(1, MOST_ROWS - 1)]
    cached: Annotated[int, _whole(0, MOST_CONTEXT)]
    pages: Annotated[list[int], _list(_IDS, MOST_CONTEXT)]
    slots: Annotated[list[list[int]], _list(_list(_IDS, MOST_DRAFT), MOST_TOKENS, least=1)]
    parents: Annotated[
        list[int | None] | None, _or_null(_list(_or_null(_whole(0, MOST_TOKENS)), MOST_TOKENS))
    ] = None
    accepted: Annotated[int | None, _or_null(_whole(0, MOST_DRAFT))] = None

    def table(self, page_size: int, length: int) -> list[int]:
        """Return the KV slots of the first ``length`` positions."""
        return [self.pages[at // page_size] * page_size + at % page_size for at in range(length)]


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """A step of a lane.

    Args:
        step: The name of the lane.
        mode: The mode of the lane, or idle.
        requests: Its requests in order; none if it is idle.
    """

    step: Annotated[str, _name]
    mode: Annotated[ForwardMode, _mode]
    requests: Annotated[list[RequestLine], _list(_object(RequestLine), MOST_ROWS)]


@dataclass(frozen=True, kw_only=True)
class _Header:
    graphpact: Annotated[str, _only("recording")]
    version: Annotated[int, _only(VERSION)]


# -- text --------------------------------------------------------------------------------------------


def text_of(line: LaneLine | StepLine | dict[str, Any]) -> str:
    """Return the JSON text of a line, with its line end. Fields that are None are left out."""
    return json.dumps(line, separators=(",", ":"), default=_plain) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, ForwardMode):
        return value.value
    return {name: each for name, each in vars(value).items() if each is not None}


def parse(line: bytes, *, is_first: bool = False) -> LaneLine | StepLine | None:
    """Return what a line describes; None for the header, which is the first line.

    Raises:
        LineError: It is no such line.
    """
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise LineError(f"invalid JSON: {error}") from error
    if is_first:
        _parse_header(value, "")
        return None
    return _parse_lane(value, "") if isinstance(value, dict) and "lane" in value else _parse_step(value, "")


_parse_header, _parse_lane, _parse_step = _object(_Header), _object(LaneLine), _object(StepLine)
