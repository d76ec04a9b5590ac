"""`Config`, the configuration of a lane: one value of each dimension. `Heads`: the heads of its layers.

    kind of step        `Case`, with the size of drafts
    page size, heads, dtype, and features of layers
    ladder              short: shapes of 2 and 4 requests; tall: shapes of 1, 2, 7, 16 and 37 requests, the
                        largest with more tokens than a context; middle: shapes of 1, 2, 4, 7 and 12 requests
    context             short: 81 tokens; long: 1,089; middle: 401. A middle ladder has a middle context
    layers              equal: two with equal heads, one with a window; mixed: four, with two windows; the
                        third has another scale, width and number of heads, the fourth uses the cache of the
                        first, with softcap and sinks but no window
    cache               low: the first KV slots; high: also slots beyond 2**31 elements of a sparse cache
    fields              plain: those of the mode; optional: mrope positions, the count of tokens, and more

The size of drafts and the last five dimensions are the dimensions of scale.

Does not: choose lanes (see `graphpact_conformance.draws.choice`), or draw batches (see ``batches``).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from graphpact import GraphShape, LayerSpec, Limits
from graphpact_conformance.draws.cases import DRAFT_WIDTH, NUM_STEPS, STATIC_TOKENS, Case, static_shapes

VOCAB, HIDDEN = 29, 6
CONTEXT, LONG_CONTEXT = 81, 1_089
"""One token more than full pages of every size, so that a page table without drafts has fewer pages."""
WINDOWS = (9, 25)
TILES = (32, 64, 128, 256, 384, 512, 1024)
"""Tile sizes of kernels, in keys, and multiples. The number of tiles or splits changes at these lengths."""
SPARE_ROWS = 3
"""Request rows that no batch uses: row 0, and two more."""
Scale = Literal["short", "tall", "long", "middle"]
SCALES: dict[Scale, tuple[Mapping[int, int], int]] = {
    "short": (STATIC_TOKENS, CONTEXT),
    "tall": ({1: 3, 2: 10, 7: 40, 16: 48, 37: 122}, CONTEXT),  # more tokens than a context
    "long": (STATIC_TOKENS, LONG_CONTEXT),
    "middle": ({1: 3, 2: 10, 4: 24, 7: 40, 12: 100}, 401),  # tall and long together take too much memory
}
"""For each scale: a mapping from the requests of a shape to its tokens in ragged modes, and the context.

Above 8 the tall ladder has a multiple of 8 and a size that is none, because code may round to 8.
"""
HIGH = 2**31
"""Number of elements before the last KV slots of a high cache. An offset of 32 bits cannot reach them."""


@dataclass(frozen=True)
class Heads:
    """The heads of the layers of a lane.

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
        heads: Heads of its layers; if layers are mixed, of all except the third.
        dtype: Dtype of queries, keys and values.
        sliding_window: Whether the second layer has a sliding window.
        softcap: Whether the second layer has a softcap.
        sinks: Whether the second layer has sinks.
        counts: Whether layers need the count of live tokens, ``num_token_non_padded``, as with ranks.
        capture_shapes: The shapes that the runner captures. The default is the shapes of the case.
        extra_requests: Requests that a step may have beyond the largest shape. Such a step runs eagerly.
        most_cached: The most cached keys of a request in the suite's batches. It is set if the runner
            declines longer requests. None means as many as the context allows.
        scale: The ladder of shapes and the context: a key of `SCALES`.
        mixed_dim: Head width of a third layer, which also has other heads, another window and another scale.
            A fourth layer uses the cache of the first. None means two layers.
        high: Whether the last KV slots are beyond `HIGH` elements.
        gathers: Whether ranks gather their rows. If so, each rank has a share of the padded tokens and of the
            count; otherwise each has all of them.
        fields: Whether batches carry the optional fields for which the runner declares slots.
        scale_factor: Factor of the scaling of all layers.
        reads: Whether there are only two layers, and the second one has no keys of its own: it reads the
            cache of the first.
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
    extra_requests: int = 0
    most_cached: int | None = None
    scale: Scale = "short"
    mixed_dim: int | None = None
    high: bool = False
    gathers: bool = True
    fields: bool = False
    scale_factor: float = 1.0
    reads: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        name = f"{self.case}-page{self.page_size}-{self.heads.name}-{dtype}"
        return "-".join([name, *("counts" for _ in range(self.counts)), *self.unusual])

    @property
    def unusual(self) -> list[str]:
        """The values that are not plain, for the lane's name, except those of the kind of step."""
        flags = {
            "tall": self.is_tall,
            "long": self.is_long,
            "mixed": self.mixed_dim is not None,
            "high": self.high,
            "fields": self.fields,
        }
        return [name for name, is_on in flags.items() if is_on]

    @property
    def is_tall(self) -> bool:
        """Whether the ladder of shapes is tall, or middle."""
        return self.scale in ("tall", "middle")

    @property
    def is_long(self) -> bool:
        """Whether the context is long, or middle."""
        return self.scale in ("long", "middle")

    @property
    def ranks(self) -> int:
        """Number of ranks that step together: 3 in a ragged mode or with a tall ladder, otherwise 2 or 4."""
        if self.case.tokens_per_request is None or self.is_tall:
            return 3
        return 4 if self.case.tokens_per_request >= DRAFT_WIDTH else 2

    @cached_property
    def shapes(self) -> Sequence[GraphShape]:
        """The captured shapes, the smallest first."""
        if self.capture_shapes:
            return self.capture_shapes
        ladder, _ = SCALES[self.scale]
        return tuple(static_shapes(self.case, ladder))

    def divided(self, ranks: int) -> "Config":
        """Return the configuration with larger shapes where ``ranks`` cannot divide the tokens of a shape."""

        def divisible(shape: GraphShape) -> GraphShape:
            if self.case.tokens_per_request is None:
                return replace(shape, num_tokens=-(-shape.num_tokens // ranks) * ranks)
            width = shape.num_tokens // shape.batch_size
            unit = math.lcm(ranks // math.gcd(ranks, width), self.case.rows_per_request)
            size = -(-shape.batch_size // unit) * unit
            return replace(shape, batch_size=size, num_tokens=size * width)

        shapes = tuple(dict.fromkeys(map(divisible, self.shapes)))
        return self if shapes == tuple(self.shapes) else replace(self, capture_shapes=shapes)

    @property
    def context(self) -> int:
        """The most tokens of a sequence."""
        _, context = SCALES[self.scale]
        return context

    @property
    def max_cached_keys(self) -> int:
        """The most cached keys of a request in the suite's batches, without the keys of its new tokens."""
        return self.context if self.most_cached is None else self.most_cached

    @property
    def unbounded(self) -> "Config":
        """The same configuration without a limit on cached keys."""
        return replace(self, most_cached=None)

    @property
    def num_rows(self) -> int:
        """Rows of the request pool."""
        return self._most_requests + max(SPARE_ROWS, self.extra_requests + 1)

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
        """A plain layer, one with window, softcap and sinks as configured, and two more if mixed."""
        heads = self.heads
        plain = LayerSpec(
            0,
            heads.num_q_heads,
            heads.num_kv_heads,
            heads.head_dim,
            heads.v_head_dim,
            scaling=self.scale_factor * heads.head_dim**-0.5,
            kv_lora_rank=heads.kv_lora_rank,
        )
        if self.reads:
            return [plain, replace(plain, layer_id=1, kv_layer=0, scaling=0.75 * plain.scaling)]
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
        num_q_heads = 3 * heads.num_q_heads // 4  # so that all widths differ from those of the other layers
        other = replace(
            plain,
            layer_id=2,
            num_q_heads=num_q_heads,
            num_kv_heads=1 if is_latent else min(2 * heads.num_kv_heads, num_q_heads),
            head_dim=self.mixed_dim,
            v_head_dim=heads.v_head_dim if is_latent else self.mixed_dim,
            scaling=0.5 * self.scale_factor * self.mixed_dim**-0.5,
            sliding_window=WINDOWS[1] if self.sliding_window else None,
        )
        shared = replace(special, layer_id=3, kv_layer=0, sliding_window=None)
        return [plain, special, other, shared]

    @property
    def limits(self) -> Limits:
        """The limits of the lane for its runner."""
        case = self.case
        most = (self._most_requests + self.extra_requests) * case.rows_per_request
        most_tokens = max(s.num_tokens for s in self.shapes) + self.extra_requests * (
            case.tokens_per_request or 1
        )
        return Limits(most, most_tokens, self.context, self.page_size, case.draft)

    @property
    def backend_limits(self) -> Limits:
        """The limits of the lane for its backend."""
        return replace(self.limits, draft=self.case.draft.for_backend(self.case.lane_mode))

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache: scratch, the pages of the longest requests, one unowned page.

        A high cache has more pages, so that its last slots are beyond `HIGH` elements in every layer.
        """
        few = self._num_used
        if not self.high:
            return few
        least = min(layer.num_kv_heads * layer.head_dim for layer in self.layers)
        return HIGH // (least * self.page_size) + few

    @property
    def pages(self) -> Sequence[int]:
        """The pages that requests may use. In a high cache a quarter of them have low numbers."""
        few, whole = self._num_used, self.num_pages
        low = few // 4 if self.high else few
        return [*range(1, low), *range(whole - (few - low), whole)]

    @property
    def _num_used(self) -> int:
        own = self.context + self.case.branches * max(NUM_STEPS, self.case.num_steps)
        return 1 + (self._most_requests + self.extra_requests) * -(-own // self.page_size) + 1
