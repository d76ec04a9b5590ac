"""Decode steps of an engine with a large cache: millions of KV slots, thousands of request rows."""

from collections.abc import Iterator

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.recording import LaneLine

PAGE, PAGES, ROWS, CONTEXT = 16, 2**18, 4097, 2**17
LANE = LaneLine(
    lane="decode",
    mode=ForwardMode.DECODE,
    page_size=PAGE,
    context=CONTEXT,
    slots=PAGES * PAGE,
    rows=ROWS,
    shapes=[[1, 1], [2, 2], [4, 4]],
    draft=[1, 1, 1],
    frozen=False,
)


class LargeEngine:
    """An engine whose requests share the pages of a prefix and have the others at random places.

    Args:
        lengths: Tokens of each request before the first step.
        shared: Pages of the common prefix.
    """

    def __init__(self, lengths: tuple[int, ...] = (35, 40, 33), shared: int = 2) -> None:
        self.lengths = list(lengths)
        self.rows = [ROWS - 1 - at for at in range(len(lengths))]
        self.table = torch.zeros(ROWS, max(lengths) + 5000, dtype=torch.int32)
        self._draw = torch.Generator().manual_seed(0)
        prefix = self._slots(shared)
        for row, length in zip(self.rows, lengths, strict=True):
            self.table[row, : len(prefix)] = prefix
            own = self._slots(-(-length // PAGE) - shared)
            self.table[row, len(prefix) : len(prefix) + len(own)] = own

    def _slots(self, num_pages: int) -> torch.Tensor:
        pages = torch.randint(1, PAGES, (num_pages,), generator=self._draw, dtype=torch.int32)
        return (pages[:, None] * PAGE + torch.arange(PAGE, dtype=torch.int32)).flatten()

    def steps(self, count: int) -> Iterator[ForwardBatch]:
        """Yield decode steps of all requests."""
        for _ in range(count):
            for at, row in enumerate(self.rows):
                if self.lengths[at] % PAGE == 0:
                    self.table[row, self.lengths[at] : self.lengths[at] + PAGE] = self._slots(1)
                self.lengths[at] += 1
            yield self.batch()

    def batch(self) -> ForwardBatch:
        """Return the decode step that ends with the present lengths."""
        lengths, rows = torch.tensor(self.lengths), torch.tensor(self.rows)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(rows),
            input_ids=torch.zeros_like(rows),
            positions=lengths - 1,
            out_cache_loc=self.table[rows, lengths - 1].long(),
            req_pool_indices=rows,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
        )
