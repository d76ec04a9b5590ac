"""Random attention problems in every mode: KV slots of requests, and new tokens.

A problem has two forms. `Problem.requests` has plain lists for the oracle: the slots of the cached keys in
order, and the new tokens, each with its slot and the token that it follows. `Problem.batch` and
`Problem.page_table` are the tensors of an engine, for the code under test.

Does not: compute attention, or use more of a backend than its declared capabilities.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, TypeVar

import torch
from hypothesis import strategies as st

from graphpact import Capabilities, ForwardBatch, ForwardMode, GraphShape, LayerSpec, Limits
from graphpact.attention import DraftLimits, GraphSupport
from graphpact.buffers import GraphSlot
from graphpact.runners import GraphRunner

VOCAB, CONTEXT, WINDOW, HIDDEN = 29, 80, 9, 6
REDRAWS = 20
"""How often a batch is drawn again if the runner declines it; the last one is kept."""
NUM_STEPS, DRAFT_WIDTH = 3, 4
CHOSEN = {1: 3, 2: 6}
"""``num_draft_tokens`` of lanes that draft, by top-k: other numbers than ``NUM_STEPS + 1``."""
SPARE_ROWS = 3
"""Request rows that no batch uses: row 0, and two more."""
STATIC_TOKENS = {2: 10, 4: 24}
"""Requests and tokens of the capture sizes of ragged modes."""
PAGE_SIZES = (1, 16, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """The kind of the steps of a lane: a mode, and for drafts tree or top-k.

    Args:
        mode: Forward mode of the batches. Idle batches run in a decode lane.
        tree: Whether drafts are a tree, in target verify.
        topk: Branches that a runner drafts: in draft decode, in draft extend, and with frozen KV.
        frozen: Whether a decode drafts on a cache that the model only reads: `GraphRunner.frozen_kv`.
        segments: Whether attention is an eager call between segments of a graph, whatever graphs of its own
            metadata the backend has: `GraphRunner.eager_attention`.
        embeds: Whether the batches carry ``input_embeds`` and ``mrope_positions``, which the model reads
            instead of ``input_ids`` and ``positions``.
    """

    mode: ForwardMode
    tree: bool = False
    topk: int = 1
    frozen: bool = False
    segments: bool = False
    embeds: bool = False

    def __str__(self) -> str:
        flags = {
            "frozen": self.frozen,
            "segments": self.segments,
            "embeds": self.embeds,
            "tree": self.tree or self.topk > 1,
        }
        return "_".join([self.mode.value, *(name for name, is_on in flags.items() if is_on)])

    @property
    def lane_mode(self) -> ForwardMode:
        """The mode that the lane captures."""
        return ForwardMode.DECODE if self.mode is ForwardMode.IDLE else self.mode

    @property
    def num_steps(self) -> int:
        """Draft steps of one batch."""
        return NUM_STEPS if self.mode is ForwardMode.DRAFT_DECODE or self.frozen else 1

    @property
    def num_slots(self) -> int:
        """KV slots that a token writes: one in each draft step; none of a frozen cache."""
        return 0 if self.frozen else self.num_steps

    @property
    def rows_per_request(self) -> int:
        """Requests of a batch, as its fields count them, for each request of the problem."""
        return self.topk if self.frozen else 1

    @property
    def width(self) -> int | None:
        """Tokens per request; None for ragged modes."""
        if self.mode.is_ragged:
            return None
        if self.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
            return DRAFT_WIDTH
        return self.topk

    @property
    def needs(self) -> GraphSupport:
        """The graph support that a capture of it needs."""
        if self.segments:
            return GraphSupport.NEVER
        return GraphSupport.for_width(None if self.width is None else self.width // self.rows_per_request)

    @property
    def branches(self) -> int:
        """Branches of a draft tree that the batch has: 1 for chains."""
        if self.tree:
            return 2
        return self.topk if self.mode is ForwardMode.DRAFT_DECODE else 1

    @property
    def draft(self) -> DraftLimits:
        """The largest draft of the lane's engine; all 1 if the lane neither drafts nor verifies."""
        if self.mode is ForwardMode.DRAFT_DECODE or self.frozen:
            return DraftLimits(NUM_STEPS, self.topk, CHOSEN[self.topk])
        if self.width == DRAFT_WIDTH:
            return DraftLimits(NUM_STEPS, 2 if self.tree else self.topk, DRAFT_WIDTH)
        return DraftLimits()


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
"""The kinds of steps of an engine without a runner of its own kind."""
SEGMENTS = Case(ForwardMode.EXTEND, segments=True)
"""The kind of steps in which the suite's own runner leaves attention to eager calls between segments."""
EMBEDS = Case(ForwardMode.EXTEND, embeds=True)
"""The kind of steps of a model with images: runners of prefill are checked with it too."""


def cases_of(runner: type[GraphRunner]) -> tuple[Case, ...]:
    """Return the kinds of steps in which a runner is checked, if its modes and the backend allow them.

    A runner with frozen KV has only such batches. One that composes its region may choose tokens at the end
    of a draft extend, as many as the draft has branches.
    """
    if runner.frozen_kv:
        return tuple(Case(ForwardMode.DECODE, topk=topk, frozen=True) for topk in CHOSEN)
    if composes(runner):
        return (*CASES, Case(ForwardMode.DRAFT_EXTEND, topk=2))
    return CASES


def composes(runner: type[GraphRunner]) -> bool:
    """Return whether a runner has a region of its own; others run the model once."""
    return runner.compose is not GraphRunner.compose


def declares_graphs(runner: type[GraphRunner]) -> bool:
    """Return whether a runner captures anything, by its declarations."""
    return runner.eager_attention or runner.needs is not GraphSupport.NEVER


def support_of(runner: type[GraphRunner], case: Case) -> GraphSupport:
    """Return the graph support of a backend that captures of ``case`` need; none for eager attention."""
    return GraphSupport.NEVER if runner.eager_attention else case.needs


def static_shapes(case: Case) -> list[GraphShape]:
    """Return the shapes that the suite's own lanes capture, the smallest first."""
    return [
        GraphShape(
            case.lane_mode, bs * case.rows_per_request, tokens if case.width is None else bs * case.width
        )
        for bs, tokens in STATIC_TOKENS.items()
    ]


@dataclass(frozen=True)
class Heads:
    """The heads of every layer of a lane.

    Args:
        name: Their layout in names of lanes, such as ``gqa``.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a query head and of a key head.
        kv_lora_rank: Width of the latent (MLA), or None.
    """

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_lora_rank: int | None = None

    @property
    def v_head_dim(self) -> int:
        """Width of a value."""
        return self.head_dim if self.kv_lora_rank is None else self.kv_lora_rank


@dataclass(frozen=True)
class Config:
    """The configuration of a lane.

    Args:
        case: The kind of its steps.
        page_size: KV slots per page.
        heads: Heads of its layers.
        dtype: Dtype of queries, keys and values.
        sliding_window: Whether the second layer has a sliding window.
        softcap: Whether the second layer has a softcap.
        sinks: Whether the second layer has sinks.
        counts: Whether layers need the count of live tokens, ``num_token_non_padded``.
        capture_shapes: The shapes that the runner captures; those of the case by default.
        room: Requests of a step beyond the largest shape; such a step runs eagerly.
        most_cached: The most cached keys of a request in the suite's batches. It is smaller than the limits
            allow if the runner leaves longer requests to eager steps.
    """

    case: Case
    page_size: int
    heads: Heads
    dtype: torch.dtype
    sliding_window: bool
    softcap: bool
    sinks: bool
    counts: bool = False
    capture_shapes: tuple[GraphShape, ...] = ()
    room: int = 0
    most_cached: int = CONTEXT

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        counts = "-counts" if self.counts else ""
        return f"{self.case}-page{self.page_size}-{self.heads.name}-{dtype}{counts}"

    @property
    def shapes(self) -> Sequence[GraphShape]:
        """The captured shapes, the smallest first."""
        return self.capture_shapes or static_shapes(self.case)

    @property
    def unbounded(self) -> "Config":
        """The same configuration, for batches with requests of every length."""
        return replace(self, most_cached=CONTEXT)

    @property
    def num_rows(self) -> int:
        """Rows of the request pool."""
        return self._most_requests + SPARE_ROWS

    @property
    def _most_requests(self) -> int:
        return max(map(self.requests_of, self.shapes))

    @property
    def most_requests(self) -> int:
        """Requests of a problem that fills the largest shape."""
        return self.requests_of(self.shapes[-1])

    def requests_of(self, shape: GraphShape) -> int:
        """Return the requests of a problem that fills ``shape``."""
        return shape.batch_size // self.case.rows_per_request

    @property
    def layers(self) -> list[LayerSpec]:
        """A plain layer, and one with window, softcap and sinks as configured."""
        heads = self.heads
        plain = LayerSpec(
            0,
            heads.num_q_heads,
            heads.num_kv_heads,
            heads.head_dim,
            heads.v_head_dim,
            scaling=heads.head_dim**-0.5,
            kv_lora_rank=heads.kv_lora_rank,
        )
        sinks = torch.linspace(-1, 2, heads.num_q_heads).to(self.dtype)
        special = replace(
            plain,
            layer_id=1,
            sliding_window=WINDOW if self.sliding_window else None,
            softcap=1.5 if self.softcap else None,
            sinks=sinks if self.sinks else None,
        )
        return [plain, special]

    @property
    def limits(self) -> Limits:
        """The limits of the lane, as its runner gets them."""
        case = self.case
        most = (self._most_requests + self.room) * case.rows_per_request
        most_tokens = max(s.num_tokens for s in self.shapes) + self.room * (case.width or 1)
        return Limits(most, most_tokens, CONTEXT, self.page_size, case.draft)

    @property
    def backend_limits(self) -> Limits:
        """The limits of the lane, as its backend gets them."""
        return replace(self.limits, draft=self.case.draft.for_backend(self.case.lane_mode))

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache: scratch, the pages of the longest requests, one unowned page."""
        own = CONTEXT + self.case.branches * NUM_STEPS
        return 1 + (self._most_requests + self.room) * -(-own // self.page_size) + 1


def configs_of(
    capabilities: Capabilities, device: torch.device = CPU, cases: Sequence[Case] = CASES
) -> Iterator[Config]:
    """Yield the configuration of every lane of ``cases`` that a backend's capabilities allow."""
    pages = capabilities.page_sizes
    page_sizes = sorted(PAGE_SIZES if pages is None else pages)
    dtypes = [d for d in DTYPES if d in capabilities.dtypes] or [*capabilities.dtypes][:1]
    dims = capabilities.head_dims
    dim = 8 if dims is None or 8 in dims else min(dims)
    latent = 24 if dims is None or 24 in dims else max(dims)
    rotated = 64 if latent > 64 else 8
    layouts = (
        Heads("mha", 4, 4, dim),
        Heads("gqa", 16, 2, dim),  # with one key head a wrong grouping would have no effect
        Heads("mla", 4, 1, latent, latent - rotated),
    )
    for case, page_size, heads, dtype in product(cases, page_sizes, layouts, dtypes):
        config = Config(
            case,
            page_size,
            heads,
            dtype,
            sliding_window=capabilities.sliding_window,
            softcap=capabilities.softcap and page_size > 1,
            sinks=capabilities.sinks and page_size != 16,
        )
        if not capabilities.missing(
            config.layers,
            mode=case.mode,
            dtype=dtype,
            device=device,
            page_size=page_size,
            topk=case.branches,
        ):
            yield config


# -- one batch -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Token:
    """A new token; in draft decode a branch, which has a token in every step.

    Args:
        token_id: Id in the first step; `next_id` gives the others.
        slots: KV slot of its key, in each step; empty with frozen KV.
        parent: The new token of its request that it follows; None where it follows the cached ones.
        depth: New tokens before it on its path.
    """

    token_id: int
    slots: list[int]
    parent: int | None
    depth: int


@dataclass(frozen=True)
class ProblemRequest:
    """One request.

    Args:
        row: Its request row.
        cached: KV slots of the cached keys, in the order of their positions.
        tokens: The new tokens.
        table: KV slots by position, as in its row of the page table.
        accepted: Accepted drafts, in draft extend.
    """

    row: int
    cached: list[int]
    tokens: list[Token]
    table: list[int]
    accepted: int = 0

    def path(self, token: int | None) -> list[int]:
        """Return the path to a new token: the tokens that it follows, then itself."""
        found = []
        while token is not None:
            found.append(token)
            token = self.tokens[token].parent
        return found[::-1]


_Ids = TypeVar("_Ids", int, torch.Tensor)


def next_id(token_id: _Ids, step: int) -> _Ids:
    """Return the tokens that follow those of ``step`` in a draft."""
    return (token_id * 5 + step + 3) % VOCAB


@dataclass(frozen=True, repr=False)
class Problem:
    """One batch.

    Args:
        case: The kind of step.
        requests: The requests in order; empty for an idle batch.
        seed: Seed of the contents of the cache.
    """

    case: Case
    requests: list[ProblemRequest]
    seed: int

    def __repr__(self) -> str:
        return f"<{self.words}>"

    @property
    def words(self) -> str:
        """The batch in one line: each request with its row, cached keys, new tokens and their KV slots."""
        size = f"{self.case}, {_counted(len(self.requests), 'request')}"
        return "; ".join([size, *map(self._words_of, self.requests), f"seed {self.seed}"])

    def _words_of(self, request: ProblemRequest) -> str:
        tokens = request.tokens
        ids = ", ".join(str(t.token_id) for t in tokens)
        slots = ", ".join(" then ".join(map(str, t.slots)) for t in tokens)
        text = (
            f"row {request.row}: {_counted(len(request.cached), 'cached key')} and"
            f" {_counted(len(tokens), 'new token')} with id{_s(len(tokens))} {ids}"
        )
        if self.case.num_slots:
            text += f", written to KV slot{_s(len(tokens) * self.case.num_slots)} {slots}"
        if self.case.tree:
            parents = ", ".join("none" if t.parent is None else str(t.parent) for t in tokens)
            text += f", after new tokens {parents}"
        if self.case.mode is ForwardMode.DRAFT_EXTEND:
            text += f", {_counted(request.accepted, 'draft')} accepted"
        return text

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002, FBT001  called by hypothesis
        printer.text(repr(self))

    @property
    def tokens(self) -> list[Token]:
        """All new tokens, in the order of the batch."""
        return [t for r in self.requests for t in r.tokens]

    @property
    def batch_size(self) -> int:
        """Requests of the batch, as its fields count them."""
        return len(self.requests) * self.case.rows_per_request

    @property
    def mode(self) -> ForwardMode:
        """The forward mode of the batch."""
        return self.case.mode if self.requests else ForwardMode.IDLE

    def page_table(self, config: Config) -> torch.Tensor:
        """Return ``[num_rows, CONTEXT]`` int32; unused entries are out of range."""
        slots = config.num_pages * config.page_size
        unowned = slots + config.page_size + 1
        table = torch.full((config.num_rows, CONTEXT), unowned, dtype=torch.int32)
        table[0] = 0
        for r in self.requests:
            table[r.row, : len(r.table)] = torch.tensor(r.table, dtype=torch.int32)
        return table

    def batch(self, *, counts: bool = False) -> ForwardBatch:
        """Return the batch in new tensors; with the count of its tokens if ``counts``."""
        case = self.case
        rows = [r for r in self.requests for _ in range(case.rows_per_request)]
        new = [len(r.tokens) for r in self.requests]
        counted = case.mode not in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE) and not case.frozen
        lens = _int64([len(r.cached) + counted * len(r.tokens) for r in rows])
        slots = _int64([t.slots or [0] for t in self.tokens]).view(-1, max(case.num_slots, 1))
        return ForwardBatch(
            forward_mode=self.mode,
            batch_size=len(rows),
            input_ids=_int64([t.token_id for t in self.tokens]),
            positions=_int64([len(r.cached) + t.depth for r in self.requests for t in r.tokens]),
            out_cache_loc=slots if case.mode is ForwardMode.DRAFT_DECODE else slots[:, 0].clone(),
            req_pool_indices=_int64([r.row for r in rows]),
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            extend_seq_lens=_int64(new) if case.mode.is_ragged else None,
            extend_seq_lens_cpu=_int64(new) if case.mode.is_ragged else None,
            tree_mask=self._tree_mask() if case.tree else None,
            num_correct_drafts=_int64([r.accepted for r in self.requests]).int()
            if case.mode is ForwardMode.DRAFT_EXTEND
            else None,
            num_token_non_padded=_int64([len(self.tokens)]).int() if counts else None,
            num_token_non_padded_cpu=len(self.tokens) if counts else None,
        )

    def value_of(self, slot: GraphSlot) -> torch.Tensor:
        """Return a random value of a runner's own field, on the host; see `rig.drawn_batch`."""
        equal = self.case.rows_per_request
        shape = slot.shape_fn(len(self.requests), len(self.tokens) // equal)
        rng = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}:{slot.name}".encode()))
        if slot.dtype is torch.bool:
            value = torch.rand(shape, generator=rng) < 0.5
        elif slot.dtype.is_floating_point:
            value = torch.randn(shape, generator=rng)
            value = -value.abs() if value.dim() == 1 else value
        else:
            value = torch.randint(VOCAB, shape, generator=rng)
        repeats = equal > 1 and slot.axis != "none"
        return (value.repeat_interleave(equal, dim=0) if repeats else value).to(slot.dtype)

    def embedded(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random ``input_embeds`` of ``dtype`` and ``mrope_positions`` of the tokens, on the host."""
        tokens = len(self.tokens)
        rng = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}:embeds".encode()))
        embeds = (torch.randn(tokens, HIDDEN, generator=rng) / HIDDEN**0.5).to(dtype)
        return embeds, torch.randint(CONTEXT, (3, tokens), generator=rng)

    def _tree_mask(self) -> torch.Tensor:
        rows = [
            [i in r.path(j) for i in range(DRAFT_WIDTH)] for r in self.requests for j in range(len(r.tokens))
        ]
        return torch.tensor(rows, dtype=torch.bool).view(-1, DRAFT_WIDTH)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{_s(number)}"


def _s(number: int) -> str:
    """Return the ending of a noun after a number."""
    return "" if number == 1 else "s"


def _int64(values: Sequence[object]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


# -- drawing ---------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """A sequence of batches for one lane; for an idle lane four idle batches.

    Args:
        exact: A batch that fills the largest shape.
        small: A batch with padding rows in the smallest shape, if that shape can have any.
        idle: A batch without requests.
        padded: A batch with padding rows in the largest shape.
    """

    exact: "Problem"
    small: "Problem"
    idle: "Problem"
    padded: "Problem"


Declines = Callable[["Problem"], object]
"""Returns whether the runner leaves a batch that a graph holds to an eager step."""


def draw(config: Config, count: int, base: int, declines: Declines = lambda _: False) -> list[Drawn]:
    """Return ``count`` sequences of batches for a lane.

    They depend only on the arguments. Hypothesis would also draw constants from the source of imported
    modules, and other values in other versions. A batch that the runner declines is drawn again, at most
    `REDRAWS` times.

    Args:
        config: Configuration of the lane.
        count: Number of sequences. A larger number keeps the first ones.
        base: A seed: equal seeds give equal sequences.
        declines: Whether the runner leaves a batch to an eager step.
    """
    rngs = [random.Random(f"{base}:{at}") for at in range(count)]  # noqa: S311  test data
    return [_drawn(rng, config, declines) for rng in rngs]


def sequences(config: Config) -> st.SearchStrategy[Drawn]:
    """Return a strategy of sequences for one lane, for property tests."""
    return st.randoms(use_true_random=False).map(lambda rng: _drawn(rng, config, lambda _: False))


def _drawn(rng: random.Random, config: Config, declines: Declines) -> Drawn:
    if config.case.mode is ForwardMode.IDLE:
        return Drawn(*[Problem(config.case, [], 0)] * 4)

    def problem(index: int, *, exact: bool) -> Problem:
        drawn = _problem(rng, config, index, exact=exact)
        for _ in range(REDRAWS):
            if not declines(drawn):
                break
            drawn = _problem(rng, config, index, exact=exact)
        return drawn

    most = len(config.shapes) - 1
    return Drawn(
        problem(most, exact=True),
        problem(0, exact=False),
        Problem(config.case, [], rng.randint(0, 99)),
        problem(most, exact=False),
    )


def _problem(rng: random.Random, config: Config, index: int, *, exact: bool) -> Problem:
    """Draw a batch whose smallest fitting shape is the one at ``index``.

    Args:
        rng: The random generator.
        config: Configuration of the lane.
        index: Index of the shape.
        exact: Whether the batch fills the shape; otherwise it leaves padding rows if possible.
    """
    case = config.case
    counts = _counts(rng, config, index, exact=exact)
    prefixes = [_prefix(rng, config, count) for count in counts]
    parents = [[rng.randint(0, j - 1) if case.tree else j - 1 for j in range(1, count)] for count in counts]
    accepted = [rng.randint(0, count - 1) for count in counts]
    return _lay_out(config, prefixes, parents, accepted, rng.randint(0, 999))


def _lay_out(
    config: Config,
    prefixes: Sequence[int],
    parents: Sequence[Sequence[int]],
    accepted: Sequence[int],
    seed: int,
) -> Problem:
    """Return a batch whose requests have rows and pages in random order.

    Args:
        config: Configuration of the lane.
        prefixes: Number of cached keys of each request.
        parents: For each request, the parents of its new tokens except the first.
        accepted: Accepted drafts of each request.
        seed: Seed of rows, pages and tokens.
    """
    case = config.case
    rng = random.Random(seed)  # noqa: S311  test data
    rows = rng.sample(range(1, config.num_rows), len(prefixes))
    pages = rng.sample(range(1, config.num_pages), config.num_pages - 1)
    drafts = case.mode is ForwardMode.DRAFT_DECODE
    requests = []
    for i, prefix in enumerate(prefixes):
        count = len(parents[i]) + 1
        in_table = count if not drafts else NUM_STEPS if count == 1 else 0
        in_table = 0 if case.frozen else in_table
        beyond = count * NUM_STEPS if drafts and count > 1 else 0
        length = prefix + in_table
        own = -(-(length + beyond) // config.page_size)
        mine, pages = pages[:own], pages[own:]
        owned = [p * config.page_size + i for p in mine for i in range(config.page_size)]
        table, free = owned[:length], owned[length:]
        if beyond:
            flat = rng.sample(free, beyond)
            slots = [flat[i * NUM_STEPS : (i + 1) * NUM_STEPS] for i in range(count)]
        elif drafts:
            slots = [table[prefix:]]
        elif case.frozen:
            slots = [[]] * count
        else:
            slots = [[slot] for slot in table[prefix:]]
        tokens: list[Token] = []
        for j in range(count):
            parent = None if drafts or case.frozen or j == 0 else parents[i][j - 1]
            depth = 0 if parent is None else tokens[parent].depth + 1
            token_id = tokens[0].token_id if case.frozen and tokens else rng.randrange(VOCAB)
            tokens.append(Token(token_id, slots[j], parent, depth))
        requests.append(ProblemRequest(rows[i], table[:prefix], tokens, table, accepted[i]))
    return Problem(case, requests, rng.randrange(1000))


def _counts(rng: random.Random, config: Config, index: int, *, exact: bool) -> list[int]:
    """Draw the number of new tokens of each request, so that no smaller shape holds them."""
    case = config.case
    shape = config.shapes[index]
    size = shape.batch_size, shape.num_tokens
    fewer = [
        s
        for s in config.shapes
        if s.batch_size <= size[0] and s.num_tokens <= size[1]
        if (s.batch_size, s.num_tokens) != size
    ]
    most = config.requests_of(shape)
    if case.width is not None:
        least = most if exact else (config.requests_of(fewer[-1]) if fewer else 0) + 1
        most = most - (not exact and least < most)
        return [case.width] * rng.randint(least, most)

    def least_tokens(bs: int) -> int:
        """Return the fewest tokens with which no smaller shape holds ``bs`` requests."""
        return max((s.num_tokens + 1 for s in fewer if s.batch_size >= bs), default=bs)

    sizes = [n for n in range(1, most + (most == 1)) if least_tokens(n) <= shape.num_tokens]
    bs = most if exact else rng.choice(sizes or [most])
    left, counts = shape.num_tokens - bs, [1] * bs
    for i in range(bs):
        least = least_tokens(bs) - bs if i == 0 else 0
        one = case.mode is ForwardMode.MIXED and i % 2 == 1
        more = 0 if one else rng.randint(least, max(least, left - (not exact)))
        counts[i] += more
        left -= more
    if exact:
        counts[0] += left
    rng.shuffle(counts)
    return counts


def _prefix(rng: random.Random, config: Config, count: int) -> int:
    """Draw the number of cached keys, half of the time near the end of a page or a limit."""
    least, most = _least_prefix(config.case, count), _most_prefix(config, count)
    page_size = config.page_size
    edges = {least, least + 1, page_size - 1, page_size, page_size + 1, most - 1, most}
    near = rng.choice(sorted(n for n in edges if least <= n <= most))
    return rng.choice((rng.randint(least, most), near))


def _least_prefix(case: Case, count: int) -> int:
    """Return the fewest cached keys of a request with ``count`` new tokens."""
    drafted = case.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE) or case.frozen
    return 1 if drafted or (case.mode is ForwardMode.MIXED and count == 1) else 0


def _most_prefix(config: Config, count: int, share: int = 1) -> int:
    """Return the most cached keys of a request with ``count`` new tokens, where limits are divided."""
    case = config.case
    most = min(CONTEXT // share - max(count, case.num_steps), config.most_cached // share)
    return max(most, _least_prefix(case, count))


def corner(config: Config) -> Problem:
    """Return the largest batch of the configuration: the longest requests, the largest shape full."""
    return _largest(config, config.most_requests)


def of_size(config: Config, num_requests: int) -> Problem:
    """Return a batch of short requests, each with as few new tokens as possible."""
    width = config.case.width or 1
    prefix = min(1, _most_prefix(config, width))
    return _lay_out(config, [prefix] * num_requests, [range(width - 1)] * num_requests, [0] * num_requests, 0)


def half_size_batch(config: Config) -> Problem:
    """Return a batch of half the largest size: half as many requests, half as long."""
    return _largest(config, max(config.most_requests // 2, 1), share=2)


def _largest(config: Config, num_requests: int, share: int = 1) -> Problem:
    case, shape = config.case, config.shapes[-1]
    if case.mode is ForwardMode.IDLE:
        return Problem(case, [], 0)
    counts = [case.width or 1] * num_requests
    if case.width is None:
        tokens = shape.num_tokens * num_requests // shape.batch_size
        counts[0] += min(tokens, CONTEXT // share) - sum(counts)
    prefixes = [_most_prefix(config, count, share) for count in counts]
    parents = [range(count - 1) for count in counts]
    return _lay_out(config, prefixes, parents, [0] * len(counts), 0)


def neighbours(config: Config, problem: Problem) -> list[Problem]:
    """Return batches that differ from ``problem`` in one thing: a length, the pages and rows, the order.

    A cached plan is stale after them if its key leaves this thing out.
    """
    if not problem.requests:
        return []
    size, case = config.page_size, config.case
    most = [_most_prefix(config, len(r.tokens)) for r in problem.requests]
    prefixes = [len(r.cached) for r in problem.requests]
    shorter = [
        p - 1 if p > 1 and (p - 1) // size == p // size else min(p + 1, m)
        for p, m in zip(prefixes, most, strict=True)
    ]
    parents = [[t.parent or 0 for t in r.tokens[1:]] for r in problem.requests]
    accepted = [r.accepted for r in problem.requests]
    return [
        _lay_out(config, shorter, parents, accepted, problem.seed),
        _lay_out(config, prefixes, parents, accepted, problem.seed + 1),
        Problem(case, problem.requests[::-1], problem.seed + 2),
    ]


def assorted(config: Config) -> Problem:
    """Return a batch of requests of different lengths that leaves a padding row.

    All requests are shorter than the longest, so that a plan of the largest batch covers their work.
    """
    whole = corner(config)
    requests = whole.requests[:-1] or whole.requests
    share = [(i + 1) / (len(requests) + 1) for i in range(len(requests))]
    shorter = [
        shortened(r, min(max(int(len(r.cached) * part), 1), len(r.cached)))
        for r, part in zip(requests, share, strict=True)
    ]
    return Problem(config.case, shorter, whole.seed)


def shortened(request: ProblemRequest, length: int) -> ProblemRequest:
    """Return a request with ``length`` cached keys; the slots of its new tokens move with the positions."""
    owned, gone = request.table, len(request.cached) - length
    tokens = [
        replace(t, slots=[owned[owned.index(s) - gone] if s in owned else s for s in t.slots])
        for t in request.tokens
    ]
    return replace(request, cached=owned[:length], tokens=tokens, table=owned[: len(owned) - gone])


def steady(config: Config) -> tuple[Problem, list[Problem]]:
    """Return a batch in the middle of decoding, and two possible previous batches, one key shorter.

    It has no padding row, and no request begins a page. The first previous batch has the same requests one
    step before, the second other requests of these lengths. Data that is kept while lengths only grow by one
    is stale after one of them.
    """
    bs, width = config.most_requests, config.case.width or 1
    middle = max(min(min(config.page_size, CONTEXT) // 2, config.most_cached - bs + 1), 2)
    prefixes = [middle + i for i in range(bs)]
    parents, accepted = [range(width - 1)] * bs, [0] * bs
    one_less = [prefix - 1 for prefix in prefixes]
    before = [_lay_out(config, one_less, parents, accepted, seed) for seed in (0, 1)]
    return _lay_out(config, prefixes, parents, accepted, 0), before
