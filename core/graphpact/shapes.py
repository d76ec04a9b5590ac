"""The words for what is captured: `GraphShape`, the key of one graph, and the ladder of them.

A batch takes the smallest captured shape that fits, or none, with the reason. The reason is a value
and not a string to parse: statistics count by it.

Does not: decide what a shape's graph holds (the runner does) or how it is recorded (the driver does).
"""

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The key of one captured graph: everything that a recorded kernel depends on.

    Args:
        mode: The forward mode that was recorded.
        batch_size: Padded request count.
        num_tokens: Padded token count.
        variant: Anything else that the recorded work depends on (a LoRA set, a length tier).
    """

    mode: ForwardMode
    batch_size: int
    num_tokens: int
    variant: str = ""

    def __str__(self) -> str:
        tail = f", {self.variant}" if self.variant else ""
        return f"{self.mode.value}[bs={self.batch_size}, tokens={self.num_tokens}{tail}]"


class EagerReason(enum.Enum):
    """Why a batch runs without a graph."""

    NO_GRAPHS = "this lane captures nothing"
    NOT_CAPTURED = "nothing is captured yet"
    WRONG_MODE = "the lane's runner does not serve this mode"
    OVER_LARGEST = "larger than the largest captured shape"
    OTHER_WIDTH = "its requests bring another number of tokens than was captured"
    NO_COMPILER = "no C++ compiler that graphs could be compiled with"


@dataclass(frozen=True)
class BucketLadder:
    """The request counts that are captured for one mode with a fixed number of tokens a request.

    Args:
        mode: The forward mode.
        batch_sizes: Request counts to capture; sorted and made unique. At least one, all positive.
        tokens_per_request: Tokens that each request brings: 1 for decode.

    Raises:
        ConfigError: A size below 1, or no size at all.
    """

    mode: ForwardMode
    batch_sizes: Sequence[int]
    tokens_per_request: int = 1
    _sorted: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ConfigError(
                f"bucket sizes must be whole numbers from 1 up; got {list(self.batch_sizes)}",
                hint="leave the key out to take the default ladder",
            )
        object.__setattr__(self, "_sorted", sorted(set(self.batch_sizes)))

    @property
    def shapes(self) -> list[GraphShape]:
        """Every shape of the ladder, smallest first."""
        width = self.tokens_per_request
        return [GraphShape(self.mode, size, size * width) for size in self._sorted]

    @property
    def largest(self) -> GraphShape:
        """The largest shape."""
        return self.shapes[-1]

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the smallest shape that holds ``batch``, or why none does. Host work only.

        An idle batch, which has no request, fits the smallest shape of any mode. Where layers gather over
        DP ranks, all ranks take the shape of the largest (``global_num_tokens_cpu``).
        """
        if batch.forward_mode not in (self.mode, ForwardMode.IDLE):
            return EagerReason.WRONG_MODE
        if batch.num_tokens != batch.batch_size * self.tokens_per_request:
            return EagerReason.OTHER_WIDTH
        requests = batch.batch_size
        if batch.global_num_tokens_cpu is not None:
            requests = max(-(-n // self.tokens_per_request) for n in batch.global_num_tokens_cpu)
        at = bisect.bisect_left(self._sorted, requests)
        if at == len(self._sorted):
            return EagerReason.OVER_LARGEST
        size = self._sorted[at]
        return GraphShape(self.mode, size, size * self.tokens_per_request)


def default_decode_batch_sizes(max_batch_size: int) -> list[int]:
    """Return the default ladder for decode: dense where padding hurts most, then ever sparser.

    Steps of 1, 2, 4, 8 up to 8; of 8 up to 256; of 16 up to 512; of 32 beyond; always with
    ``max_batch_size`` itself, so that no admissible batch is larger than the largest graph.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, max_batch_size + 1, 32)]
    return sorted({size for size in sizes if size <= max_batch_size} | {max_batch_size})
