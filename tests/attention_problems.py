"""Random attention problems in every mode: who owns which KV slots, and which tokens come.

A problem says everything twice. `Problem.requests` says it in plain lists, from which the oracle works: the
slots of the cached keys in order, and the new tokens, each with the slot it is written to and the token
it follows. `Problem.batch` and `Problem.page_table` say it as an engine does, for the code under test.

Does not: compute attention, or know a backend but by what it declares.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from graphpact import Capabilities, ForwardBatch, ForwardMode, GraphShape, LayerSpec, Limits
from graphpact.attention import DraftLimits, GraphSupport

MAX_BS, ROWS, VOCAB, CONTEXT, WINDOW = 4, 7, 29, 80, 9
NUM_STEPS, DRAFT_WIDTH = 3, 4
STATIC_TOKENS = {2: 10, 4: 24}
"""Request slots of a ragged bucket, and its tokens."""
PAGE_SIZES = (1, 16, 64)
DTYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """What the steps of a lane are: a mode, and for drafts whether they branch.

    Args:
        mode: Of the batches. Idle batches run in a lane that decodes.
        tree: Whether drafts are a tree, in target verify.
        topk: Branches, in draft decode.
    """

    mode: ForwardMode
    tree: bool = False
    topk: int = 1

    def __str__(self) -> str:
        return self.mode.value + ("_tree" if self.tree or self.topk > 1 else "")

    @property
    def lane_mode(self) -> ForwardMode:
        """What the lane captures."""
        return ForwardMode.DECODE if self.mode is ForwardMode.IDLE else self.mode

    @property
    def num_steps(self) -> int:
        """Steps of one batch."""
        return NUM_STEPS if self.mode is ForwardMode.DRAFT_DECODE else 1

    @property
    def width(self) -> int | None:
        """Tokens that every request brings, None where each brings its own number."""
        if self.mode.is_ragged:
            return None
        if self.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
            return DRAFT_WIDTH
        return self.topk

    @property
    def needs(self) -> GraphSupport:
        """What a graph of it asks of a backend."""
        if self.width is None:
            return GraphSupport.ALWAYS
        return GraphSupport.UNIFORM_DECODE if self.width == 1 else GraphSupport.UNIFORM

    @property
    def shapes(self) -> list[GraphShape]:
        """The buckets that are captured, the smallest first."""
        return [
            GraphShape(self.lane_mode, bs, tokens if self.width is None else bs * self.width)
            for bs, tokens in STATIC_TOKENS.items()
        ]

    @property
    def branches(self) -> int:
        """The factor of a tree: 1 where drafts are chains."""
        return 2 if self.tree else self.topk


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


@dataclass(frozen=True)
class Heads:
    """The heads of every layer of a lane."""

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
    """What a lane is built for.

    Args:
        case: Its steps.
        page_size: KV slots in a page.
        heads: Of its layers.
        dtype: Of queries, keys and values.
        sliding_window: Whether the backend has windows: then the second layer has one.
        softcap: The same for capped scores.
        sinks: The same for sinks.
    """

    case: Case
    page_size: int
    heads: Heads
    dtype: torch.dtype
    sliding_window: bool
    softcap: bool
    sinks: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.case}-page{self.page_size}-{self.heads.name}-{dtype}"

    @property
    def layers(self) -> list[LayerSpec]:
        """A plain layer, and one with all that the backend has."""
        heads = self.heads
        plain = {
            "num_q_heads": heads.num_q_heads,
            "num_kv_heads": heads.num_kv_heads,
            "head_dim": heads.head_dim,
            "v_head_dim": heads.v_head_dim,
            "scaling": heads.head_dim**-0.5,
            "kv_lora_rank": heads.kv_lora_rank,
        }
        sinks = torch.linspace(-1, 2, heads.num_q_heads).to(self.dtype)
        special = {
            "sliding_window": WINDOW if self.sliding_window else None,
            "softcap": 1.5 if self.softcap else None,
            "sinks": sinks if self.sinks else None,
        }
        return [LayerSpec(0, **plain), LayerSpec(1, **plain, **special)]

    @property
    def limits(self) -> Limits:
        """The largest of everything."""
        largest, case = self.case.shapes[-1], self.case
        tokens = DRAFT_WIDTH if case.width == DRAFT_WIDTH else 1
        draft = DraftLimits(case.num_steps, case.branches, tokens)
        return Limits(largest.batch_size, largest.num_tokens, CONTEXT, self.page_size, draft)

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache: scratch, all that the longest requests may own, one of nobody."""
        own = CONTEXT + self.case.branches * NUM_STEPS
        return 1 + MAX_BS * -(-own // self.page_size) + 1


def configs_of(capabilities: Capabilities) -> Iterator[Config]:
    """Yield every lane that a backend is to be held to, by what it declares."""
    pages = capabilities.page_sizes
    page_sizes = [p for p in PAGE_SIZES if pages is None or p in pages] or [min(pages or {1})]
    dtypes = [d for d in DTYPES if d in capabilities.dtypes] or [*capabilities.dtypes][:1]
    dims = capabilities.head_dims
    dim = 8 if dims is None or 8 in dims else min(dims)
    latent = 24 if dims is None or 24 in dims else max(dims)
    rotated = 64 if latent > 64 else 8
    layouts = (
        Heads("mha", 4, 4, dim),
        Heads("gqa", 16, 2, dim),  # two key heads: with one, a wrong grouping could not show
        Heads("mla", 4, 1, latent, latent - rotated),
    )
    for case, page_size, heads, dtype in product(CASES, page_sizes, layouts, dtypes):
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
            device=CPU,
            page_size=page_size,
            topk=case.branches,
        ):
            yield config


# -- one batch -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Token:
    """A new token; of a draft decode a branch, which has a token in every step.

    Args:
        token_id: Of the first step; `next_id` says the others.
        slots: Where its key is written, in each step.
        parent: The new token of its request that it follows; None where it follows the cached ones.
        depth: New tokens before it on its path.
    """

    token_id: int
    slots: list[int]
    parent: int | None
    depth: int


@dataclass(frozen=True)
class Request:
    """One request.

    Args:
        row: In the request pool.
        cached: KV slots of the keys that are there already, in the order of their positions.
        tokens: The new ones.
        table: KV slots by position, as its row of the page table has them.
    """

    row: int
    cached: list[int]
    tokens: list[Token]
    table: list[int]

    def path(self, token: int | None) -> list[int]:
        """Return the new tokens that ``token`` follows, the first one first, itself last."""
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
        case: What it is.
        requests: In the order of the batch; none for an idle one.
        seed: Of what the cache holds.
    """

    case: Case
    requests: list[Request]
    seed: int

    def __repr__(self) -> str:
        requests = ", ".join(
            f"row {r.row}: {len(r.cached)} cached"
            + "".join(f" +{t.token_id}@{t.slots}^{t.parent}" for t in r.tokens)
            for r in self.requests
        )
        return f"<{self.case}: {requests or 'idle'}; seed {self.seed}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001  hypothesis calls it
        printer.text(repr(self))

    @property
    def tokens(self) -> list[Token]:
        """All new tokens, in the order of the batch."""
        return [t for r in self.requests for t in r.tokens]

    @property
    def mode(self) -> ForwardMode:
        """The batch's."""
        return self.case.mode if self.requests else ForwardMode.IDLE

    def page_table(self, config: Config) -> torch.Tensor:
        """Return ``[ROWS, CONTEXT]`` int32; what is no position of a request is out of range."""
        slots = config.num_pages * config.page_size
        table = torch.full((ROWS, CONTEXT), slots + config.page_size + 1, dtype=torch.int32)
        table[0] = 0
        for r in self.requests:
            table[r.row, : len(r.table)] = torch.tensor(r.table, dtype=torch.int32)
        return table

    def batch(self) -> ForwardBatch:
        """Return the batch, in tensors of its own."""
        case, steps = self.case, self.case.num_steps
        new = [len(r.tokens) for r in self.requests]
        counted = case.mode not in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE)
        lens = _int64(
            [len(r.cached) + counted * n for r, n in zip(self.requests, new, strict=True)]
        )
        slots = _int64([t.slots for t in self.tokens]).view(-1, steps)
        return ForwardBatch(
            forward_mode=self.mode,
            batch_size=len(self.requests),
            input_ids=_int64([t.token_id for t in self.tokens]),
            positions=_int64([len(r.cached) + t.depth for r in self.requests for t in r.tokens]),
            out_cache_loc=slots if case.mode is ForwardMode.DRAFT_DECODE else slots[:, 0].clone(),
            req_pool_indices=_int64([r.row for r in self.requests]),
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            extend_seq_lens=_int64(new) if case.mode.is_ragged else None,
            extend_seq_lens_cpu=_int64(new) if case.mode.is_ragged else None,
            tree_mask=self._tree_mask() if case.tree else None,
        )

    def _tree_mask(self) -> torch.Tensor:
        rows = [
            [i in r.path(j) for i in range(DRAFT_WIDTH)]
            for r in self.requests
            for j in range(len(r.tokens))
        ]
        return torch.tensor(rows, dtype=torch.bool).view(-1, DRAFT_WIDTH)


def _int64(values: Sequence[object]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


# -- drawing ---------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn, config: Config, bucket: int) -> Problem:
    """Draw a batch that the ``bucket``-th shape of the lane is the smallest to hold."""
    case = config.case
    counts = draw(_counts(case, bucket))
    rng = random.Random(draw(st.integers(0, 999)))
    rows = rng.sample(range(1, ROWS), len(counts))
    pages = rng.sample(range(1, config.num_pages), config.num_pages - 1)
    drafts = case.mode is ForwardMode.DRAFT_DECODE
    requests = []
    for row, count in zip(rows, counts, strict=True):
        in_table = count if not drafts else NUM_STEPS if count == 1 else 0
        beyond = count * NUM_STEPS if drafts and count > 1 else 0
        prefix = draw(_prefixes(case, config.page_size, count))
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
        else:
            slots = [[slot] for slot in table[prefix:]]
        tokens: list[Token] = []
        for j in range(count):
            parent = None if drafts or j == 0 else j - 1
            if case.tree and j:
                parent = draw(st.integers(0, j - 1))
            depth = 0 if parent is None else tokens[parent].depth + 1
            tokens.append(Token(rng.randrange(VOCAB), slots[j], parent, depth))
        requests.append(Request(row, table[:prefix], tokens, table))
    return Problem(case, requests, rng.randrange(1000))


@st.composite
def _counts(draw: st.DrawFn, case: Case, bucket: int) -> list[int]:
    """Draw how many new tokens each request brings."""
    smaller = case.shapes[bucket - 1] if bucket else GraphShape(case.mode, 0, 0)
    shape = case.shapes[bucket]
    if case.width is not None:
        return [case.width] * draw(st.integers(smaller.batch_size + 1, shape.batch_size))
    bs = draw(st.integers(1, shape.batch_size))
    left, counts = shape.num_tokens - bs, [1] * bs
    for i in range(bs):
        least = 0
        if i == 0 and bs <= smaller.batch_size:  # then it is the tokens that ask for this bucket
            least = smaller.num_tokens + 1 - bs
        one = case.mode is ForwardMode.MIXED and i % 2 == 1
        more = 0 if one else draw(st.integers(least, left))
        counts[i] += more
        left -= more
    return draw(st.permutations(counts))


def _prefixes(case: Case, page_size: int, count: int) -> st.SearchStrategy[int]:
    """Draw how many keys are cached: about the ends of pages as often as anywhere."""
    drafted = case.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE)
    least = 1 if drafted or (case.mode is ForwardMode.MIXED and count == 1) else 0
    most = CONTEXT - max(count, case.num_steps)
    edges = {least, least + 1, page_size - 1, page_size, page_size + 1, most - 1, most}
    edges = {n for n in edges if least <= n <= most}
    return st.one_of(st.integers(least, most), st.sampled_from(sorted(edges)))


def sequences(config: Config) -> st.SearchStrategy[list[Problem]]:
    """Draw what one lane is given: two batches of one bucket, one of another and an idle one between."""
    if config.case.mode is ForwardMode.IDLE:
        return st.just([Problem(config.case, [], 0)] * 2)
    large, small = problems(config, 1), problems(config, 0)
    idle = st.integers(0, 99).map(lambda seed: Problem(config.case, [], seed))
    return st.tuples(large, small, idle, large).map(list)
