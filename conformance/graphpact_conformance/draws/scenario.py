"""Recorded scenarios: the steps of a real engine, as batches of the suite.

`graphpact generate --record FILE` writes them; `graphpact_engine.recording` describes the format. `read`
returns one `RecordedLane` for each lane of the file that has steps. A recording contains no token ids and no
contents of the KV cache; the suite draws these.

Does not: run a step, or choose the experiments of recorded lanes (see `graphpact_conformance.suite`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from graphpact import Capabilities, ForwardMode, GraphShape
from graphpact.attention import DraftLimits
from graphpact.errors import UsageError
from graphpact.files import read_file
from graphpact_conformance.draws.batches import Declines, Drawn, draw
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.draws.choice import allows, configs_of
from graphpact_conformance.draws.lanes import VOCAB, Config
from graphpact_conformance.draws.problems import Problem, ProblemRequest, Token

MOST_BYTES, MOST_STEPS, MOST_LANES = 2**26, 1000, 32
MOST_CONTEXT, MOST_SLOTS, MOST_ROWS, MOST_TOKENS = 2**13, 2**18, 2**10, 2**12
"""Limits of a recording: tokens of a sequence, KV slots, request rows, and tokens of a step."""

_Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
_Id = Annotated[int, Field(ge=0, lt=MOST_SLOTS)]


# -- lines -------------------------------------------------------------------------------------------


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _First(_Line):
    graphpact: Literal["recording"]
    version: Literal[1]


class _LaneLine(_Line):
    lane: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    mode: Annotated[ForwardMode, Field(strict=False)]
    page_size: Annotated[int, Field(ge=1, le=MOST_SLOTS)]
    context: Annotated[int, Field(ge=1, le=MOST_CONTEXT)]
    slots: Annotated[int, Field(ge=2, le=MOST_SLOTS)]
    rows: Annotated[int, Field(ge=2, le=MOST_ROWS)]
    shapes: Annotated[list[Annotated[list[_Count], Field(min_length=2, max_length=2)]], Field(max_length=256)]
    draft: Annotated[list[Annotated[int, Field(ge=1, le=64)]], Field(min_length=3, max_length=3)]
    frozen: bool


class _RequestLine(_Line):
    row: Annotated[int, Field(ge=1, lt=MOST_ROWS)]
    cached: Annotated[int, Field(ge=0, le=MOST_CONTEXT)]
    pages: Annotated[list[_Id], Field(max_length=MOST_CONTEXT)]
    slots: Annotated[
        list[Annotated[list[_Id], Field(max_length=64)]], Field(min_length=1, max_length=MOST_TOKENS)
    ]
    parents: Annotated[list[int | None], Field(max_length=MOST_TOKENS)] | None = None
    accepted: Annotated[int, Field(ge=0, le=64)] | None = None


class _StepLine(_Line):
    step: str
    mode: Annotated[ForwardMode, Field(strict=False)]
    requests: Annotated[list[_RequestLine], Field(max_length=MOST_ROWS)]


# -- lanes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedCase(Case):
    """The kind of steps of a recorded lane, with the draft sizes of its engine.

    Args:
        recorded: The largest draft of the engine.
    """

    recorded: DraftLimits = field(default_factory=DraftLimits)

    @property
    def num_steps(self) -> int:
        """Draft steps of one batch."""
        return self.recorded.num_steps if self.mode is ForwardMode.DRAFT_DECODE or self.frozen else 1

    @property
    def tokens_per_request(self) -> int | None:
        """Tokens per request; None for ragged modes."""
        return self.topk if self.frozen else self.recorded.tokens_per_request(self.lane_mode)

    @property
    def branches(self) -> int:
        """Branches of the draft tree of each request: 1 for chains."""
        is_tree = self.tree or self.mode is ForwardMode.DRAFT_DECODE
        return self.recorded.topk if is_tree else 1

    @property
    def draft(self) -> DraftLimits:
        """The largest draft of the lane's engine."""
        return self.recorded


@dataclass(frozen=True)
class RecordedConfig(Config):
    """The configuration of a lane with the sizes of a recorded lane.

    Args:
        name: Name of the recorded lane.
        most_tokens: The most tokens of a sequence.
        recorded_rows: Request rows of the engine.
        recorded_pages: KV pages of the engine, scratch included.
    """

    name: str = ""
    most_tokens: int = 1
    recorded_rows: int = 1
    recorded_pages: int = 1

    def __str__(self) -> str:
        return f"{super().__str__()}-recorded_{self.name}"

    @property
    def context(self) -> int:
        """The most tokens of a sequence."""
        return self.most_tokens

    @property
    def num_rows(self) -> int:
        """Rows of the request pool of the engine, or more if the suite's own batches need them."""
        return max(self.recorded_rows, super().num_rows)

    @property
    def _num_used(self) -> int:
        """The pages of the engine and one unowned page, or more if the suite's own batches need them."""
        drafts = -(-self.case.branches * self.case.num_steps // self.page_size) * self.most_requests
        return max(self.recorded_pages + 1, super()._num_used + drafts)


@dataclass(frozen=True)
class RecordedLane:
    """The steps of one recorded lane.

    Args:
        line: The line of the file that describes the lane.
        steps: Its batches, in the recorded order.
    """

    line: _LaneLine
    steps: tuple[Problem, ...]

    @property
    def case(self) -> Case:
        """The kind of its steps."""
        return _case_of(self.line)

    @cached_property
    def shapes(self) -> tuple[GraphShape, ...]:
        """The captured shapes, the smallest first. One that holds every step is added if there is none."""
        mode = self.line.mode
        found = {GraphShape(mode, bs, tokens) for bs, tokens in self.line.shapes}
        most = (
            max((step.batch_size for step in self.steps), default=1),
            max((len(step.tokens) for step in self.steps), default=1),
        )
        if not any(s.batch_size >= most[0] and s.num_tokens >= most[1] for s in found):
            width, each = self.case.tokens_per_request, self.case.rows_per_request
            bs = max(most[0], 1)
            found.add(GraphShape(mode, bs, max(most[1], bs) if width is None else bs // each * width))
        return tuple(sorted(found, key=lambda s: (s.num_tokens, s.batch_size)))

    def config(self, capabilities: Capabilities, device: torch.device) -> RecordedConfig | None:
        """Return the configuration of the lane for a backend, or None if the backend does not support it."""
        likely = list(configs_of(capabilities, device, [_plain(self.case)]))
        if not likely:
            return None
        best = min(likely, key=lambda c: (c.dtype is not torch.float32, c.heads.name == "mha"))
        config = RecordedConfig(
            self.case,
            self.line.page_size,
            best.heads,
            best.dtype,
            best.sliding_window,
            best.softcap,
            best.sinks,
            capture_shapes=self.shapes,
            name=self.line.lane,
            most_tokens=self.line.context,
            recorded_rows=self.line.rows,
            recorded_pages=self.line.slots // self.line.page_size,
        )
        return config if allows(capabilities, config, device) else None

    def sequences(self, config: Config, count: int, seed: int, declines: Declines) -> list[Drawn]:
        """Return ``count`` sequences of its batches. Drawn batches take roles that no recorded one can."""
        drawn = draw(config, count, seed, declines)
        if not self.steps:
            return drawn
        each = -(-len(self.steps) // count)
        return [_cast(config, own, self.steps[i * each : (i + 1) * each]) for i, own in enumerate(drawn)]


def _case_of(line: _LaneLine) -> Case:
    steps, topk, tokens = line.draft
    limits = DraftLimits(steps, topk, tokens)
    drafts = line.mode is ForwardMode.DRAFT_DECODE or line.frozen
    tree = line.mode is ForwardMode.TARGET_VERIFY and topk > 1
    return RecordedCase(line.mode, tree=tree, topk=topk if drafts else 1, frozen=line.frozen, recorded=limits)


def _plain(case: Case) -> Case:
    return Case(case.mode, tree=case.tree, topk=min(case.topk, 2), frozen=case.frozen)


def _cast(config: Config, drawn: Drawn, steps: Sequence[Problem]) -> Drawn:
    """Return a copy of ``drawn`` with recorded batches in all roles that they can take."""
    largest, smallest = config.shapes[-1], config.shapes[0]
    live = [step for step in steps if step.requests]

    def fills(step: Problem) -> bool:
        return (step.batch_size, len(step.tokens)) == (largest.batch_size, largest.num_tokens)

    def pads(step: Problem, shape: GraphShape) -> bool:
        counts, sizes = (step.batch_size, len(step.tokens)), (shape.batch_size, shape.num_tokens)
        return counts != sizes and all(count <= size for count, size in zip(counts, sizes, strict=True))

    in_smallest = [step for step in live if pads(step, smallest)]
    others = [step for step in live if step not in in_smallest and pads(step, largest)]
    roles = (
        next(filter(fills, live), drawn.exact),
        next(iter(in_smallest), drawn.small),
        drawn.idle,
        next(iter(others), drawn.padded),
    )
    return Drawn((*roles, *drawn[4:]))


# -- reading -----------------------------------------------------------------------------------------


def read(path: Path) -> list[RecordedLane]:
    """Return the recorded lanes of a file that have steps, in the order of the file.

    Raises:
        UsageError: The file cannot be read, is not a recording, or contains an invalid line.
    """
    lanes: dict[str, _LaneLine] = {}
    steps: dict[str, list[Problem]] = {}
    for number, line in enumerate(_lines(path), 1):
        try:
            if number == 1:
                _parsed(_First, line)
            elif line.startswith(b'{"lane"'):
                lane = _parsed(_LaneLine, line)
                _require(lane.lane not in lanes, f"a second lane {lane.lane!r}")
                _require(len(lanes) < MOST_LANES, f"more than {MOST_LANES} lanes")
                _require_lane(lane)
                lanes[lane.lane], steps[lane.lane] = lane, []
            else:
                step = _parsed(_StepLine, line)
                _require(step.step in lanes, f"a step of lane {step.step!r}, which no earlier line describes")
                own = steps[step.step]
                _require(len(own) < MOST_STEPS, f"more than {MOST_STEPS} steps of lane {step.step!r}")
                own.append(_problem(lanes[step.step], step, seed=number))
        except _LineError as error:
            hint = "record again: graphpact generate --record FILE"
            raise UsageError(f"{path}, line {number}: {error}", hint=hint) from error
    if not any(steps.values()):
        raise UsageError(f"{path} has no step", hint="record with graphpact generate --record FILE")
    return [RecordedLane(lane, tuple(steps[name])) for name, lane in lanes.items() if steps[name]]


def _lines(path: Path) -> list[bytes]:
    try:
        data = read_file(path, MOST_BYTES + 1)
    except OSError as error:
        hint = "pass a file that graphpact generate --record has written"
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path} has more than {MOST_BYTES} bytes", hint="record fewer prompts or tokens")
    return data.splitlines()


class _LineError(Exception):
    """An invalid line. The message says what is wrong with it."""


_Model = TypeVar("_Model", bound=_Line)


def _parsed(model: type[_Model], line: bytes) -> _Model:
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(map(str, first["loc"]))
        raise _LineError(f"{at}: {first['msg']}" if at else first["msg"]) from error


def _require(holds: Any, fault: str) -> None:
    if not holds:
        raise _LineError(fault)


def _require_lane(lane: _LaneLine) -> None:
    size, width = lane.page_size, _case_of(lane).tokens_per_request
    _require(lane.slots % size == 0 and lane.slots > size, f"{lane.slots} KV slots in pages of {size}")
    _require(lane.mode is not ForwardMode.IDLE, "a lane with the mode idle; only steps may be idle")
    for bs, tokens in lane.shapes:
        each = _case_of(lane).rows_per_request
        fits = tokens >= bs if width is None else tokens == bs // each * width and bs % each == 0
        _require(fits, f"a shape of {bs} requests and {tokens} tokens in a lane of {lane.mode.value}")


def _problem(lane: _LaneLine, step: _StepLine, seed: int) -> Problem:
    """Return the batch of a step. Token ids and the contents of the cache are drawn from ``seed``."""
    _require(
        step.mode is lane.mode or (step.mode is ForwardMode.IDLE and not step.requests),
        f"a step of mode {step.mode.value} in a lane of {lane.mode.value}",
    )
    rows = [request.row for request in step.requests]
    _require(len({*rows}) == len(rows), "two requests with the same row")
    _require(max(rows, default=0) < lane.rows, f"a request row beyond the {lane.rows} rows of the lane")
    total = sum(len(request.slots) for request in step.requests)
    _require(total <= MOST_TOKENS, f"more than {MOST_TOKENS} tokens")
    rng = random.Random(seed)  # noqa: S311  test data
    case = _case_of(lane)
    requests = [_request(lane, case, request, rng) for request in step.requests]
    written = [slot for r in requests for token in r.tokens for slot in token.slots]
    _require(len({*written}) == len(written), "a KV slot that two new tokens write")
    read_only = {slot for r in requests for slot in r.cached}
    _require(not read_only & {*written}, "a new token that overwrites a cached one")
    return Problem(case, requests, seed)


def _request(lane: _LaneLine, case: Case, line: _RequestLine, rng: random.Random) -> ProblemRequest:
    size, count, width = lane.page_size, len(line.slots), case.tokens_per_request
    _require(width is None or count == width, f"{count} new tokens of a request; the lane has {width}")
    _require(
        all(len(slots) == case.num_slots for slots in line.slots),
        f"a new token without exactly {case.num_slots} KV slots",
    )
    drafts = case.mode is ForwardMode.DRAFT_DECODE
    in_order = [slot for slots in line.slots for slot in slots] if not drafts or count == 1 else []
    length = line.cached + len(in_order)
    _require(line.cached > 0 or not (case.frozen or drafts), "a draft of a request without cached tokens")
    _require(length <= lane.context, f"{length} tokens of a request; the lane's context is {lane.context}")
    _require(len(line.pages) == -(-length // size), f"{len(line.pages)} pages for {length} tokens")
    _require(all(0 < page < lane.slots // size for page in line.pages), "a page that the lane does not have")
    _require(len({*line.pages}) == len(line.pages), "a page that occurs twice in one request")
    owned = [page * size + at for page in line.pages for at in range(size)]
    table = owned[:length]
    _require(table[line.cached :] == in_order, "new tokens whose KV slots do not match their positions")
    _require(all(size <= s < lane.slots for each in line.slots for s in each), "a KV slot outside all pages")
    parents = line.parents if case.tree else None
    _require((line.parents is not None) is case.tree, "parents are required to verify trees, and only then")
    if parents is not None:
        _require(
            len(parents) == count and parents[0] is None, "parents: one for each token, null for the first"
        )
        right = all(p is not None and 0 <= p < at for at, p in enumerate(parents) if at)
        _require(right, "parents: each token must follow an earlier one")
    is_extend = case.mode is ForwardMode.DRAFT_EXTEND
    _require(
        (line.accepted is not None) is is_extend, "accepted is required in a draft extend, and only there"
    )
    _require((line.accepted or 0) < count, f"{line.accepted} accepted drafts of {count} tokens")
    tokens: list[Token] = []
    for at, slots in enumerate(line.slots):
        parent = None if drafts or case.frozen or at == 0 else at - 1
        if parents is not None:
            parent = parents[at]
        depth = 0 if parent is None else tokens[parent].depth + 1
        token_id = tokens[0].token_id if case.frozen and tokens else rng.randrange(VOCAB)
        tokens.append(Token(token_id, slots, parent, depth))
    return ProblemRequest(line.row, table[: line.cached], tokens, table, line.accepted or 0)
