"""`step_of`: a batch of an engine as a step of a recording.

Does not: write it, or check it.
"""

from collections.abc import Iterator

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.recording.lines import LaneLine, LineError, RequestLine, StepLine


def step_of(lane: LaneLine, batch: ForwardBatch, table: torch.Tensor) -> StepLine:
    """Return the step of ``lane`` that runs ``batch``. It reads lengths and pages on the host.

    Args:
        lane: The lane, whose sizes may be larger than a recording allows.
        batch: The live batch. Its token ids are not read.
        table: ``[rows, max_context_len]`` int: KV slot of each position by request row.

    Raises:
        LineError: A request has more tokens than the lane's context. Its pages are not read then.
    """
    return StepLine(step=lane.lane, mode=batch.forward_mode, requests=[*_requests(lane, batch, table)])


def _requests(lane: LaneLine, batch: ForwardBatch, table: torch.Tensor) -> Iterator[RequestLine]:
    """Yield each request of a batch; with frozen KV once per request, not per branch."""
    if not batch.batch_size:
        return
    mode, each, size = batch.forward_mode, lane.rows_per_request, lane.page_size
    rows, lengths = batch.req_pool_indices[::each], batch.seq_lens_cpu.tolist()[::each]
    slots = batch.out_cache_loc.view(batch.num_tokens, -1).tolist()
    width = batch.num_tokens // len(rows)
    counts = [width] * len(rows) if batch.extend_seq_lens_cpu is None else batch.extend_seq_lens_cpu.tolist()
    mask = None if batch.tree_mask is None else batch.tree_mask.view(len(rows), width, width).tolist()
    accepted = None if batch.num_correct_drafts is None else batch.num_correct_drafts.tolist()
    drafts = mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE) or lane.frozen
    # Branches of a draft come after the sequence; one branch is in order.
    in_order = [
        0 if lane.frozen else len(slots[0]) * (count == 1) if mode is ForwardMode.DRAFT_DECODE else count
        for count in counts
    ]
    cached = [length if drafts else length - count for length, count in zip(lengths, counts, strict=True)]
    ends = [a + b for a, b in zip(cached, in_order, strict=True)]
    if max(ends) > lane.context:
        raise LineError(f"{max(ends)} tokens of a request; the lane's context is {lane.context}")
    pages = (table[:, : max(ends) : size][rows] // size).tolist()
    first = 0
    for at, (row, count) in enumerate(zip(rows.tolist(), counts, strict=True)):
        own = [] if lane.frozen else slots[first : first + count]
        yield RequestLine(
            row=row,
            cached=cached[at],
            pages=pages[at][: -(-ends[at] // size)],
            slots=own or [[]] * count,
            parents=None if mask is None else [_parent(mask[at], token) for token in range(count)],
            accepted=None if accepted is None else accepted[at],
        )
        first += count


def _parent(mask: list[list[bool]], token: int) -> int | None:
    """Return a draft's parent: of the drafts that it sees, the one that sees the most; None for a root."""
    seen = [other for other, is_seen in enumerate(mask[token]) if is_seen and other != token]
    return max(seen, key=lambda other: sum(mask[other]), default=None)
