"""`Case`, the kind of steps of a lane: a mode, with draft trees, frozen KV, segments or embeddings.

    drafts   plain: 3 steps, up to 2 branches, 4 tokens to verify; wide: 2 steps, 4 branches, 6 tokens;
             deep: 5 steps, 10 tokens; single: 1 step, 2 tokens; broad: 4 steps, 5 branches, 65 tokens

Does not: know a lane's sizes; see `graphpact_conformance.draws.lanes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from graphpact import ForwardMode, GraphShape
from graphpact.attention import DraftLimits, GraphSupport
from graphpact.runners import GraphRunner


class Drafts(NamedTuple):
    """The sizes of a lane's drafts.

    Args:
        num_steps: Draft steps.
        tokens_per_request: Tokens of a request in target verify and draft extend.
        topk: Branches of a request in lanes with several branches.
        num_draft_tokens: Draft tokens of lanes with one branch, and of lanes with several.
    """

    num_steps: int
    tokens_per_request: int
    topk: int
    num_draft_tokens: tuple[int, int]


DraftSize = Literal["plain", "wide", "deep", "single", "broad"]
DRAFTS: dict[DraftSize, Drafts] = {
    "plain": Drafts(3, 4, 2, (3, 6)),
    "wide": Drafts(2, 6, 4, (2, 7)),
    "deep": Drafts(5, 10, 2, (4, 10)),
    "single": Drafts(1, 2, 3, (2, 3)),
    "broad": Drafts(4, 65, 5, (4, 65)),
}
"""The sizes of drafts by name. ``num_draft_tokens`` is deliberately not the number of steps plus one."""
NUM_STEPS, DRAFT_WIDTH = DRAFTS["plain"].num_steps, DRAFTS["plain"].tokens_per_request
STATIC_TOKENS = {2: 10, 4: 24}
"""Requests and tokens of the capture sizes of ragged modes."""


@dataclass(frozen=True)
class Case:
    """The kind of steps of a lane: a mode, and its variants.

    Args:
        mode: Forward mode of the batches. Idle batches run in a decode lane.
        tree: Whether drafts form a tree. Only in target verify.
        topk: Branches that a runner drafts: in draft decode, in draft extend, and with frozen KV.
        frozen: Whether a decode drafts on a cache that the model only reads: `GraphRunner.frozen_kv`.
        segments: Whether attention is an eager call between segments of a graph:
            `GraphRunner.eager_attention`. This is independent of the graph support of the backend.
        embeds: Whether the batches carry ``input_embeds`` and ``mrope_positions``, which the model reads
            instead of ``input_ids`` and ``positions``.
        drafts: The sizes of drafts: a key of `DRAFTS`.
    """

    mode: ForwardMode
    tree: bool = False
    topk: int = 1
    frozen: bool = False
    segments: bool = False
    embeds: bool = False
    drafts: DraftSize = "plain"

    def __str__(self) -> str:
        flags = {
            "frozen": self.frozen,
            "segments": self.segments,
            "embeds": self.embeds,
            "tree": self.tree or self.topk > 1,
            self.drafts: self.drafts != "plain",
        }
        return "_".join([self.mode.value, *(name for name, is_on in flags.items() if is_on)])

    @property
    def lane_mode(self) -> ForwardMode:
        """The mode that the lane captures."""
        return ForwardMode.DECODE if self.mode is ForwardMode.IDLE else self.mode

    @property
    def num_steps(self) -> int:
        """Draft steps of one batch."""
        drafts = self.mode is ForwardMode.DRAFT_DECODE or self.frozen
        return DRAFTS[self.drafts].num_steps if drafts else 1

    @property
    def num_slots(self) -> int:
        """KV slots that a token writes: one in each draft step, none with a frozen cache."""
        return 0 if self.frozen else self.num_steps

    @property
    def rows_per_request(self) -> int:
        """Rows in the fields of a batch for each request of the problem."""
        return self.topk if self.frozen else 1

    @property
    def tokens_per_request(self) -> int | None:
        """Tokens per request; None for ragged modes."""
        if self.mode.is_ragged:
            return None
        if self.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
            return DRAFTS[self.drafts].tokens_per_request
        return self.topk

    @property
    def needs(self) -> GraphSupport:
        """The graph support that a capture of such steps needs."""
        if self.segments:
            return GraphSupport.NEVER
        tokens = self.tokens_per_request
        return GraphSupport.for_width(None if tokens is None else tokens // self.rows_per_request)

    @property
    def branches(self) -> int:
        """Branches of the draft tree of each request: 1 for chains."""
        if self.tree:
            return DRAFTS[self.drafts].topk
        return self.topk if self.mode is ForwardMode.DRAFT_DECODE else 1

    @property
    def draft(self) -> DraftLimits:
        """The largest draft of the lane's engine. All sizes are 1 if the lane neither drafts nor verifies."""
        sizes = DRAFTS[self.drafts]
        if self.mode is ForwardMode.DRAFT_DECODE or self.frozen:
            return DraftLimits(sizes.num_steps, self.topk, sizes.num_draft_tokens[self.topk > 1])
        if self.has_drafts:
            topk = sizes.topk if self.tree else self.topk
            return DraftLimits(sizes.num_steps, topk, self.tokens_per_request or 1)
        return DraftLimits()

    @property
    def has_drafts(self) -> bool:
        """Whether its steps draft or verify."""
        drafted = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_DECODE)
        return self.mode in drafted or self.frozen

    @property
    def plain(self) -> "Case":
        """The same kind of step with drafts of plain sizes."""
        return self.sized("plain")

    def sized(self, drafts: DraftSize) -> "Case":
        """Return the same kind of step with other sizes of drafts, or itself if it has no drafts."""
        if not self.has_drafts:
            return self
        return replace(self, drafts=drafts, topk=DRAFTS[drafts].topk if self.topk > 1 else 1)


CASES = (
    Case(ForwardMode.DECODE),
    Case(ForwardMode.EXTEND),
    Case(ForwardMode.MIXED),
    Case(ForwardMode.TARGET_VERIFY),
    Case(ForwardMode.TARGET_VERIFY, tree=True),
    Case(ForwardMode.DRAFT_DECODE),
    Case(ForwardMode.DRAFT_DECODE, topk=2),
    Case(ForwardMode.DRAFT_EXTEND),
    Case(ForwardMode.IDLE),
)
"""The kinds of steps that do not need a special runner."""
SEGMENTS = Case(ForwardMode.EXTEND, segments=True)
"""The kind of steps in which the suite's runner runs attention as eager calls between segments."""
EMBEDS = Case(ForwardMode.EXTEND, embeds=True)
"""The kind of steps of a model with images. Prefill runners are also checked with it."""


def cases_of(runner: type[GraphRunner]) -> tuple[Case, ...]:
    """Return the kinds of steps in which a runner is checked, if its modes and the backend allow them.

    A runner with frozen KV is checked only with frozen KV. A runner that composes its region may choose the
    tokens of several branches at the end of a draft extend, so it is also checked with two.
    """
    if runner.frozen_kv:
        return tuple(Case(ForwardMode.DECODE, topk=topk, frozen=True) for topk in (1, 2))
    if composes(runner):
        return (*CASES, Case(ForwardMode.DRAFT_EXTEND, topk=2))
    return CASES


def composes(runner: type[GraphRunner]) -> bool:
    """Return whether a runner overrides ``compose``. The default region runs the model once."""
    return runner.compose is not GraphRunner.compose


def declares_graphs(runner: type[GraphRunner]) -> bool:
    """Return whether a runner captures anything, according to its declarations."""
    return runner.eager_attention or runner.needs is not GraphSupport.NEVER


def support_of(runner: type[GraphRunner], case: Case) -> GraphSupport:
    """Return the graph support that captures of ``case`` need from a backend: none for eager attention."""
    return GraphSupport.NEVER if runner.eager_attention else case.needs


def static_shapes(case: Case, sizes: Mapping[int, int] = STATIC_TOKENS) -> list[GraphShape]:
    """Return the shapes that lanes with the suite's runner capture, the smallest first.

    Args:
        case: The kind of step.
        sizes: A mapping from the requests of each shape to its tokens in a ragged mode.
    """
    return [
        GraphShape(
            case.lane_mode,
            bs * case.rows_per_request,
            tokens if case.tokens_per_request is None else bs * case.tokens_per_request,
        )
        for bs, tokens in sizes.items()
    ]
