"""`GraphShape`, the key of one graph, and `CaptureSizes`, the captured shapes of one mode.

A batch takes the smallest captured shape that fits, or runs eagerly with an `EagerReason`.

Does not: decide what the graph of a shape records (the runner does) or record it (the driver does).
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The key of one captured graph. It has everything that recorded kernels depend on.

    Args:
        mode: The recorded forward mode.
        batch_size: Padded request count.
        num_tokens: Padded token count.
        variant: Anything else that the recorded work depends on (a LoRA set, a length tier). ``fit`` gives it
            again for the dummy of the shape; see `graphpact.runners.GraphRunner.dummy`.
    """

    mode: ForwardMode
    batch_size: int
    num_tokens: int
    variant: str = ""

    def __str__(self) -> str:
        tail = f", {self.variant}" if self.variant else ""
        return f"{self.mode.value}[bs={self.batch_size}, tokens={self.num_tokens}{tail}]"


@dataclass(frozen=True, slots=True)
class EagerReason:
    """Why a batch runs without a graph. Statistics count eager runs by reason; plugins may add reasons.

    The ``name`` does not change between versions, such as ``"over_largest"``. The ``text`` describes the
    reason.
    """

    name: str
    text: str = field(compare=False)

    NO_GRAPHS: ClassVar["EagerReason"]
    NOT_CAPTURED: ClassVar["EagerReason"]
    WRONG_MODE: ClassVar["EagerReason"]
    OVER_LARGEST: ClassVar["EagerReason"]
    OTHER_WIDTH: ClassVar["EagerReason"]
    OTHER_RANK: ClassVar["EagerReason"]

    def __str__(self) -> str:
        return self.text


EagerReason.NO_GRAPHS = EagerReason("no_graphs", "this lane captures nothing")
EagerReason.NOT_CAPTURED = EagerReason("not_captured", "nothing is captured yet")
EagerReason.WRONG_MODE = EagerReason("wrong_mode", "the lane's runner does not serve this mode")
EagerReason.OVER_LARGEST = EagerReason("over_largest", "larger than the largest captured shape")
EagerReason.OTHER_WIDTH = EagerReason("other_width", "another number of tokens per request")
EagerReason.OTHER_RANK = EagerReason("other_rank", "another rank of the same step has to run eagerly")


@dataclass(frozen=True)
class CaptureSizes:
    """The shapes that are captured for one mode.

    A batch takes the smallest shape that has room for its requests and its tokens: the shape with the fewest
    tokens, and among these the one with the fewest requests. ``shapes`` are sorted, without duplicates. In
    modes that are not ragged (decode, target verify, drafts) all requests of all shapes have the same number
    of tokens.

    Raises:
        ConfigError: There is no shape, a shape has no requests or tokens, or the shapes have several modes or
            several numbers of tokens per request.
    """

    shapes: tuple[GraphShape, ...]
    _width: int | None = field(init=False, repr=False, compare=False)
    _token_counts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shapes = sorted(set(self.shapes), key=lambda s: (s.num_tokens, s.batch_size, s.variant))
        sizes = [s.batch_size for s in shapes]
        if not shapes or min(sizes) < 1 or min(s.num_tokens for s in shapes) < 1:
            raise ConfigError(
                f"capture sizes must be whole numbers from 1 up; got {sizes}",
                hint="leave the key out to take the default capture sizes",
            )
        if len({s.mode for s in shapes}) > 1:
            listing = ", ".join(map(str, shapes))
            raise ConfigError(f"capture sizes of several modes: {listing}", hint="use one lane for each mode")
        width = shapes[0].num_tokens // shapes[0].batch_size
        uneven = [s for s in shapes if s.num_tokens != s.batch_size * width]
        if uneven and not shapes[0].mode.is_ragged:
            raise ConfigError(
                f"{uneven[0]} has another number of tokens per request than {shapes[0]}",
                hint=(
                    "all requests of this mode have the same number of tokens: use the same number in every "
                    "shape"
                ),
            )
        object.__setattr__(self, "shapes", tuple(shapes))
        object.__setattr__(self, "_width", None if shapes[0].mode.is_ragged else width)
        object.__setattr__(self, "_token_counts", tuple(s.num_tokens for s in shapes))

    @classmethod
    def uniform(
        cls, mode: ForwardMode, batch_sizes: Sequence[int], tokens_per_request: int = 1
    ) -> "CaptureSizes":
        """Return the shapes of ``batch_sizes`` requests with ``tokens_per_request`` tokens each."""
        return cls.by_pairs(mode, [(size, size * tokens_per_request) for size in batch_sizes])

    @classmethod
    def by_tokens(cls, mode: ForwardMode, token_counts: Sequence[int], batch_size: int) -> "CaptureSizes":
        """Return the shapes of ``token_counts`` tokens with room for ``batch_size`` requests each."""
        return cls.by_pairs(mode, [(batch_size, count) for count in token_counts])

    @classmethod
    def by_pairs(cls, mode: ForwardMode, pairs: Iterable[tuple[int, int]]) -> "CaptureSizes":
        """Return the shapes of ``pairs`` of a request count and a token count."""
        return cls(tuple(GraphShape(mode, size, count) for size, count in pairs))

    def fit(self, batch: ForwardBatch, variant: str = "") -> GraphShape | EagerReason:
        """Return the smallest shape of ``variant`` that holds ``batch``, or why none does. Only host work.

        An idle batch fits the smallest shape. If layers gather over DP ranks, all ranks take the shape of the
        largest rank (``global_num_tokens_cpu`` and ``global_batch_sizes_cpu``).
        """
        mode = batch.forward_mode
        if mode is not self.shapes[0].mode and mode is not ForwardMode.IDLE:
            return EagerReason.WRONG_MODE
        requests, tokens = batch.batch_size, batch.num_tokens
        most = max(batch.global_num_tokens_cpu) if batch.global_num_tokens_cpu else 0
        if batch.global_batch_sizes_cpu:
            requests = max(requests, *batch.global_batch_sizes_cpu)
        if self._width is not None:
            if tokens != batch.batch_size * self._width:
                return EagerReason.OTHER_WIDTH
            most = -(-most // self._width) * self._width
        first = bisect.bisect_left(self._token_counts, max(tokens, most))
        for shape in self.shapes[first:]:
            if shape.batch_size >= requests and shape.variant == variant:
                return shape
        return EagerReason.OVER_LARGEST


def default_decode_batch_sizes(max_batch_size: int) -> list[int]:
    """Return the default capture sizes of decode, denser for small batches, where padding costs most.

    They are 1, 2, 4, 8; then multiples of 8 up to 256, of 16 up to 512, and of 32 beyond; and
    ``max_batch_size``, so that every allowed batch fits the largest graph.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, max_batch_size + 1, 32)]
    return sorted({size for size in sizes if size <= max_batch_size} | {max_batch_size})
