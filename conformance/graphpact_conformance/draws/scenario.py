"""Recorded scenarios: the steps of a real engine, as batches of the suite.

`graphpact.recording` has the format, and reads a file. `read` returns one `RecordedLane` for each lane of the
file that has steps. A recording contains no token ids and no contents of the KV cache; the suite draws these.

Does not: run a step, or choose the experiments of recorded lanes (see `graphpact_conformance.suite`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from graphpact import Capabilities, ForwardMode, GraphShape
from graphpact.attention import DraftLimits
from graphpact.recording import LaneLine, RequestLine, StepLine, read_recording
from graphpact_conformance.draws.batches import Declines, Drawn, draw
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.draws.choice import allows, configs_of
from graphpact_conformance.draws.lanes import VOCAB, Config
from graphpact_conformance.draws.problems import Problem, ProblemRequest, Token

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

    line: LaneLine
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


def _case_of(line: LaneLine) -> Case:
    limits = line.draft_limits
    drafts = line.mode is ForwardMode.DRAFT_DECODE or line.frozen
    topk = limits.topk if drafts else 1
    return RecordedCase(line.mode, tree=line.is_tree, topk=topk, frozen=line.frozen, recorded=limits)


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
    return [
        RecordedLane(lane.line, tuple(_problem(lane.line, step, seed=at) for at, step in lane.steps.items()))
        for lane in read_recording(path)
    ]


def _problem(lane: LaneLine, step: StepLine, seed: int) -> Problem:
    """Return the batch of a step. Token ids and the contents of the cache are drawn from ``seed``."""
    rng = random.Random(seed)  # noqa: S311  test data
    case = _case_of(lane)
    return Problem(case, [_request(lane, case, request, rng) for request in step.requests], seed)


def _request(lane: LaneLine, case: Case, line: RequestLine, rng: random.Random) -> ProblemRequest:
    tokens: list[Token] = []
    follows = case.mode is not ForwardMode.DRAFT_DECODE and not case.frozen
    for at, slots in enumerate(line.slots):
        parent = at - 1 if follows and at else None
        if line.parents is not None:
            parent = line.parents[at]
        depth = 0 if parent is None else tokens[parent].depth + 1
        token_id = tokens[0].token_id if case.frozen and tokens else rng.randrange(VOCAB)
        tokens.append(Token(token_id, slots, parent, depth))
    in_order = len(tokens) if follows else case.num_slots * (len(tokens) == 1)
    table = line.table(lane.page_size, line.cached + in_order)
    return ProblemRequest(line.row, table[: line.cached], tokens, table, line.accepted or 0)
