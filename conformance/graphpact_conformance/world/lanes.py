"""The dimensions of lanes: `Case`, `Heads`, `Config`, and the lanes of a run.

    kind of step        mode, draft trees, frozen KV, segments, embeddings
    page size, heads, dtype, and features of layers
    drafts              plain: 3 steps, up to 2 branches, 4 tokens to verify; wide: 2 steps, 4 branches, 6
                        tokens; deep: 5 steps, 10 tokens; single: 1 step, 2 tokens; broad: 4 steps, 5
                        branches, 65 tokens
    ladder              short: shapes of 2 and 4 requests; tall: of 1, 2, 4, 7 and 40, and of more tokens
                        than a context; middle: the last of 12
    context             short: 81 tokens; long: 1,089; middle: 401. A middle ladder has a middle context
    layers              two of equal heads, one window; mixed: four, two windows, another scale, width and
                        number of heads, and one on the cache of the first, with softcap and sinks alone
    cache               low: the first KV slots; high: slots beyond 2**31 elements of a cache of holes
    fields              plain: those of the mode; optional: mrope positions, the count of tokens, and more

The last six are those of scale. A lane has one value of each dimension. `configs_of` yields the lanes with
plain values of scale that a backend's capabilities allow; `covering` chooses lanes that have every value, or
every pair of values of two dimensions.

Does not: draw batches; see `graphpact_conformance.world.problems`.
"""

import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

import torch

from graphpact import Capabilities, ForwardMode, GraphShape, LayerSpec, Limits
from graphpact.attention import DraftLimits, GraphSupport
from graphpact.runners import GraphRunner

VOCAB, HIDDEN = 29, 6
CONTEXT, LONG_CONTEXT = 81, 1_089
"""A token more than some pages of every size, so that a table without drafts has fewer pages."""
WINDOWS = (9, 25)
TILES = (32, 64, 128, 256, 384, 512, 1024)
"""Keys that kernels take at once, and multiples: numbers of tiles and splits change there."""


class Drafts(NamedTuple):
    """The sizes of a lane's drafts.

    Args:
        num_steps: Draft steps.
        width: Tokens of a request in target verify and draft extend.
        topk: Branches of a request, where there are several.
        chosen: ``num_draft_tokens`` of lanes that draft one branch, and several.
    """

    num_steps: int
    width: int
    topk: int
    chosen: tuple[int, int]


DraftSize = Literal["plain", "wide", "deep", "single", "broad"]
DRAFTS: dict[DraftSize, Drafts] = {
    "plain": Drafts(3, 4, 2, (3, 6)),
    "wide": Drafts(2, 6, 4, (2, 7)),
    "deep": Drafts(5, 10, 2, (4, 10)),
    "single": Drafts(1, 2, 3, (2, 3)),
    "broad": Drafts(4, 65, 5, (4, 65)),
}
"""The values of the dimension of drafts. ``num_draft_tokens`` of several steps is not the steps plus one."""
NUM_STEPS, DRAFT_WIDTH = DRAFTS["plain"].num_steps, DRAFTS["plain"].width
SPARE_ROWS = 3
"""Request rows that no batch uses: row 0, and two more."""
STATIC_TOKENS = {2: 10, 4: 24}
"""Requests and tokens of the capture sizes of ragged modes."""
TALL_TOKENS = {1: 3, 2: 10, 4: 24, 7: 40, 40: 130}
"""The same of a tall ladder. The largest has more tokens than a short context."""
MIDDLE_TOKENS, MIDDLE_CONTEXT = {1: 3, 2: 10, 4: 24, 7: 40, 12: 100}, 401
"""The same of a middle ladder, and the middle context: a tall one with a long one takes too much memory."""
PAGE_SIZES = (1, 16, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HIGH = 2**31
"""Elements before the last KV slots of a high cache: an offset of 32 bits does not reach them."""
VARIATIONS, CANDIDATES = 8, 12
"""Random values of scale for each plain lane, and how many of these lanes are compared for a pair."""
CPU = torch.device("cpu")
CAN_BE_HIGH = sys.platform == "linux"
"""Whether the system gives memory only to pages that are written, as it does for a high cache."""


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
        drafts: The sizes of drafts, of `DRAFTS`.
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
            return DRAFTS[self.drafts].width
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
            return DRAFTS[self.drafts].topk
        return self.topk if self.mode is ForwardMode.DRAFT_DECODE else 1

    @property
    def draft(self) -> DraftLimits:
        """The largest draft of the lane's engine; all 1 if the lane neither drafts nor verifies."""
        sizes = DRAFTS[self.drafts]
        if self.mode is ForwardMode.DRAFT_DECODE or self.frozen:
            return DraftLimits(sizes.num_steps, self.topk, sizes.chosen[self.topk > 1])
        if self.has_drafts:
            topk = sizes.topk if self.tree else self.topk
            return DraftLimits(sizes.num_steps, topk, self.width or 1)
        return DraftLimits()

    @property
    def has_drafts(self) -> bool:
        """Whether its engine drafts or verifies."""
        drafted = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_DECODE)
        return self.mode in drafted or self.frozen

    @property
    def plain(self) -> "Case":
        """The same kind of step with drafts of plain sizes."""
        return self.sized("plain")

    def sized(self, drafts: DraftSize) -> "Case":
        """Return the same kind of step with other sizes of drafts; itself without drafts."""
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
        return tuple(Case(ForwardMode.DECODE, topk=topk, frozen=True) for topk in (1, 2))
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


def static_shapes(case: Case, sizes: Mapping[int, int] = STATIC_TOKENS) -> list[GraphShape]:
    """Return the shapes that the suite's own lanes capture, the smallest first.

    Args:
        case: The kind of step.
        sizes: The requests of each shape, with its tokens in a ragged mode.
    """
    return [
        GraphShape(
            case.lane_mode, bs * case.rows_per_request, tokens if case.width is None else bs * case.width
        )
        for bs, tokens in sizes.items()
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
    """The configuration of a lane: one value of each dimension.

    Args:
        case: The kind of its steps.
        page_size: KV slots per page.
        heads: Heads of its layers; with mixed layers, of all but the third.
        dtype: Dtype of queries, keys and values.
        sliding_window: Whether the second layer has a sliding window.
        softcap: Whether the second layer has a softcap.
        sinks: Whether the second layer has sinks.
        counts: Whether layers need the count of live tokens, ``num_token_non_padded``, as ranks do.
        capture_shapes: The shapes that the runner captures; those of the case by default.
        room: Requests of a step beyond the largest shape; such a step runs eagerly.
        most_cached: The most cached keys of a request in the suite's batches; None: as many as the context
            allows. It is smaller if the runner leaves longer requests to eager steps.
        tall: Whether the ladder of shapes is tall, or middle.
        long: Whether the context is long, or middle; both are middle if both are set.
        mixed_dim: Head width of a third layer, with heads, a window and a scale of its own, before a fourth
            on the cache of the first; None for two layers.
        high: Whether the last KV slots lie beyond `HIGH` elements.
        gathers: Whether ranks gather their rows, so that each has a share of the padded tokens and of their
            count; otherwise each has all of them.
        fields: Whether batches carry the optional fields for which the runner declares slots.
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
    most_cached: int | None = None
    tall: bool = False
    long: bool = False
    mixed_dim: int | None = None
    high: bool = False
    gathers: bool = True
    fields: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        name = f"{self.case}-page{self.page_size}-{self.heads.name}-{dtype}"
        return "-".join([name, *("counts" for _ in range(self.counts)), *self.unusual])

    @property
    def unusual(self) -> list[str]:
        """The values that are not plain, for the lane's name; without those of the kind of step."""
        flags = {
            "tall": self.tall,
            "long": self.long,
            "mixed": self.mixed_dim is not None,
            "high": self.high,
            "fields": self.fields,
        }
        return [name for name, is_on in flags.items() if is_on]

    @property
    def ranks(self) -> int:
        """Ranks that step together: 3 in a ragged mode or with a tall ladder, otherwise 2 or 4."""
        if self.case.width is None or self.tall:
            return 3
        return 4 if self.case.width >= DRAFT_WIDTH else 2

    @property
    def shapes(self) -> Sequence[GraphShape]:
        """The captured shapes, the smallest first."""
        if self.capture_shapes:
            return self.capture_shapes
        tall = MIDDLE_TOKENS if self.long else TALL_TOKENS
        return static_shapes(self.case, tall if self.tall else STATIC_TOKENS)

    @property
    def context(self) -> int:
        """The most tokens of a sequence."""
        if not self.long:
            return CONTEXT
        return MIDDLE_CONTEXT if self.tall else LONG_CONTEXT

    @property
    def longest(self) -> int:
        """The most cached keys of a request in the suite's batches, before those of the step are counted."""
        return self.context if self.most_cached is None else self.most_cached

    @property
    def unbounded(self) -> "Config":
        """The same configuration, for batches with requests of every length."""
        return replace(self, most_cached=None)

    @property
    def num_rows(self) -> int:
        """Rows of the request pool."""
        return self._most_requests + max(SPARE_ROWS, self.room + 1)

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
        """A plain layer, one with window, softcap and sinks as configured, and with mixed layers two more."""
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
            sliding_window=WINDOWS[0] if self.sliding_window else None,
            softcap=1.5 if self.softcap else None,
            sinks=sinks if self.sinks else None,
        )
        if self.mixed_dim is None:
            return [plain, special]
        is_latent = heads.kv_lora_rank is not None
        num_q_heads = 3 * heads.num_q_heads // 4  # so that no width is that of the other layers
        other = replace(
            plain,
            layer_id=2,
            num_q_heads=num_q_heads,
            num_kv_heads=1 if is_latent else min(2 * heads.num_kv_heads, num_q_heads),
            head_dim=self.mixed_dim,
            v_head_dim=heads.v_head_dim if is_latent else self.mixed_dim,
            scaling=0.5 * self.mixed_dim**-0.5,
            sliding_window=WINDOWS[1] if self.sliding_window else None,
        )
        shared = replace(special, layer_id=3, kv_layer=0, sliding_window=None)
        return [plain, special, other, shared]

    @property
    def limits(self) -> Limits:
        """The limits of the lane, as its runner gets them."""
        case = self.case
        most = (self._most_requests + self.room) * case.rows_per_request
        most_tokens = max(s.num_tokens for s in self.shapes) + self.room * (case.width or 1)
        return Limits(most, most_tokens, self.context, self.page_size, case.draft)

    @property
    def backend_limits(self) -> Limits:
        """The limits of the lane, as its backend gets them."""
        return replace(self.limits, draft=self.case.draft.for_backend(self.case.lane_mode))

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache: scratch, the pages of the longest requests, one unowned page.

        A high cache has so many more that its last slots lie beyond `HIGH` elements in every layer.
        """
        few = self._num_used
        if not self.high:
            return few
        least = min(layer.num_kv_heads * layer.head_dim for layer in self.layers)
        return HIGH // (least * self.page_size) + few

    @property
    def pages(self) -> Sequence[int]:
        """The pages that requests may have. In a high cache a quarter of them are low."""
        few, whole = self._num_used, self.num_pages
        low = few // 4 if self.high else few
        return [*range(1, low), *range(whole - (few - low), whole)]

    @property
    def _num_used(self) -> int:
        own = self.context + self.case.branches * max(NUM_STEPS, self.case.num_steps)
        return 1 + (self._most_requests + self.room) * -(-own // self.page_size) + 1


def configs_of(
    capabilities: Capabilities, device: torch.device = CPU, cases: Sequence[Case] = CASES
) -> Iterator[Config]:
    """Yield every lane of ``cases`` that a backend's capabilities allow, with plain values of scale."""
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
        if allows(capabilities, config, device):
            yield config


def allows(capabilities: Capabilities, config: Config, device: torch.device = CPU) -> bool:
    """Return whether a backend declares all that a lane needs, except graphs."""
    return not capabilities.missing(
        config.layers,
        mode=config.case.mode,
        dtype=config.dtype,
        device=device,
        page_size=config.page_size,
        topk=config.case.branches,
    )


def plainest(configs: Iterable[Config]) -> list[Config]:
    """Return the plainest lane of each kind of step, in the order of the kinds."""
    by_case: dict[Case, list[Config]] = {}
    for config in configs:
        by_case.setdefault(config.case, []).append(config)
    return [min(group, key=_plainness) for group in by_case.values()]


def _plainness(config: Config) -> tuple[bool, bool, int]:
    return config.dtype is not torch.float32, config.heads.name == "mha", abs(config.page_size - 16)


# -- unusual values --------------------------------------------------------------------------------


def scaled_up(config: Config, capabilities: Capabilities, *, high: bool = False) -> Config:
    """Return a lane with the unusual value of every dimension of scale.

    Args:
        config: A lane with plain values.
        capabilities: Of the backend.
        high: Whether the cache is high too, where it can be. Strict drivers copy all memory that a graph
            writes, so that only experiments without them run in such a lane.
    """
    scaled = replace(
        config,
        case=config.case.sized("wide"),
        capture_shapes=(),
        tall=True,
        long=True,
        mixed_dim=other_dim(config, capabilities),
        high=high and CAN_BE_HIGH,
        fields=True,
    )
    return scaled if allows(capabilities, scaled) else replace(scaled, case=config.case)


def valued(config: Config, capabilities: Capabilities, names: Iterable[str]) -> Config:
    """Return a lane with some unusual values of scale, named as in names of lanes; and ``page1``."""
    scaled = scaled_up(config, capabilities, high=True)
    values: dict[str, dict[str, Any]] = {
        **{name: {"case": config.case.sized(name), "capture_shapes": ()} for name in DRAFTS},
        "tall": {"tall": True, "capture_shapes": ()},
        "long": {"long": True},
        "mixed": {"mixed_dim": scaled.mixed_dim},
        "high": {"high": scaled.high},
        "page1": {"page_size": 1},
        "fields": {"fields": True},
    }
    for name in names:
        config = replace(config, **values[name])
    return config


def other_dim(config: Config, capabilities: Capabilities) -> int | None:
    """Return another head width that a backend declares, for a third layer; None if it declares one alone."""
    dims, mine = capabilities.head_dims, config.heads.head_dim
    if config.heads.kv_lora_rank is not None:
        return mine  # a latent has one width in all layers; window and scale differ
    if dims is None:
        return 2 * mine
    return min((dim for dim in dims if dim != mine), key=lambda dim: abs(dim - mine), default=mine)


def dimensions(config: Config) -> dict[str, Any]:
    """Return the value of each dimension, by name; the number of ranks follows from others."""
    is_middle = config.tall and config.long
    return {
        "kind of step": config.case.plain,
        "page size": config.page_size,
        "heads": config.heads.name,
        "dtype": config.dtype,
        "drafts": config.case.drafts,
        "ladder": "middle" if is_middle else "tall" if config.tall else "short",
        "context": "middle" if is_middle else "long" if config.long else "short",
        "layers": "equal" if config.mixed_dim is None else "mixed",
        "cache": "high" if config.high else "low",
        "fields": "optional" if config.fields else "plain",
    }


def combinations(config: Config, strength: int = 2) -> set[tuple[tuple[str, Any], ...]]:
    """Return the combinations of values of ``strength`` dimensions that a lane has."""
    return {*itertools.combinations(sorted(dimensions(config).items()), strength)}


def covering(
    configs: Sequence[Config],
    capabilities: Capabilities,
    seen: Iterable[Config] = (),
    *,
    strength: int = 2,
) -> list[Config]:
    """Return lanes that together have every combination of values of some dimensions.

    They depend only on the arguments. Each is the best of some random ones: the one with the most
    combinations that no lane before it has.

    Args:
        configs: Lanes with plain values of scale.
        capabilities: Of the backend.
        seen: Lanes whose combinations are covered already.
        strength: Number of dimensions of a combination: 1 for every value, 2 for every pair of values.
    """
    rng = random.Random(0)  # noqa: S311  test data
    has_trees = any(config.case.tree for config in configs)
    drawn = [
        _drawn(rng, config, capabilities, broad=config.case.tree or not has_trees)
        for config in configs
        for _ in range(VARIATIONS)
    ]
    left: dict[tuple[tuple[str, Any], ...], list[Config]] = {}
    for config in drawn:
        for combination in combinations(config, strength):
            left.setdefault(combination, []).append(config)
    for config in seen:
        for combination in combinations(config, strength):
            left.pop(combination, None)
    chosen = []
    while left:
        rarest = min(left.values(), key=len)
        likely = rng.sample(rarest, min(len(rarest), CANDIDATES))
        best = max(likely, key=lambda config: len(combinations(config, strength) & left.keys()))
        chosen.append(best)
        for combination in combinations(best, strength):
            left.pop(combination, None)
    return chosen


def _drawn(rng: random.Random, config: Config, capabilities: Capabilities, *, broad: bool) -> Config:
    """Return a lane with random values of the dimensions of scale, and with optional fields or without.

    With ``broad`` its drafts may be: they are for trees, the verified ones where a plugin has them.
    """
    whole = scaled_up(config, capabilities, high=True)
    tall, long = rng.choice(((False, False), (True, False), (False, True)))
    mixed, high, fields = rng.choices((False, True), k=3)
    broad &= config.case.branches > 1 and not (tall or long)  # that would take too long
    sizes = [size for size in DRAFTS if broad or size != "broad"]
    sized = replace(config, case=config.case.sized(rng.choice(sizes)))
    return replace(
        whole,
        case=sized.case if allows(capabilities, sized) else config.case,
        tall=tall,
        long=long,
        mixed_dim=whole.mixed_dim if mixed else None,
        high=whole.high and high,
        fields=whole.fields and fields,
    )
