"""`StepRecorder`: writes the steps of an engine's lanes to a file, for `graphpact check --scenario`.

The file has one JSON object per line:

    {"graphpact": "recording", "version": 1}
    {"lane": ..., "mode": ..., "page_size": ..., "context": ..., "slots": ..., "rows": ..., "shapes": ...,
     "draft": ..., "frozen": ...}                                        before the first step of each lane
    {"step": LANE, "mode": ..., "requests": [{"row": ..., "cached": ..., "pages": ..., "slots": ..., ...}]}

A request has its request row, the number of its cached tokens, the pages of its positions, and for each new
token the KV slots that it writes. The requests of a tree verify also have ``parents``, those of a draft
extend ``accepted``. Token ids and texts are not written.

Does not: change a step. It reads lengths and pages on the host, so each step waits for the device.
"""

import contextlib
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.errors import GraphpactError
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane
from graphpact_engine.output_file import OutputFile

VERSION = 1


class StepRecorder:
    """An observer that writes every step; a context manager that opens and closes the file.

    A file without any step is removed at the end.

    Args:
        path: The file, which must not exist.
    """

    def __init__(self, path: Path) -> None:
        self.num_steps = 0
        self._file = OutputFile(path, "recording", replaces=False)
        self._lanes: set[str] = set()

    def __enter__(self) -> Self:
        """Open the file.

        Raises:
            UsageError: It exists, or cannot be written.
        """
        self._file.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file.

        Raises:
            GraphpactError: The last lines cannot be written.
        """
        try:
            self._file.close()
        except GraphpactError:
            if kind is None:
                raise
        finally:
            if not self.num_steps:
                with contextlib.suppress(OSError):
                    self._file.path.unlink()

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> Generator[None, Any, Any]:
        """Write the step before it runs, so that a failing step is in the file too."""
        if lane.name not in self._lanes:
            lines = [] if self._lanes else [{"graphpact": "recording", "version": VERSION}]
            self._write(*lines, _about(lane))
            self._lanes.add(lane.name)
        step = {"step": lane.name, "mode": batch.forward_mode.value, "requests": [*_requests(lane, batch)]}
        self._write(step)
        self.num_steps += 1
        return (yield)

    def _write(self, *lines: dict[str, Any]) -> None:
        for line in lines:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _about(lane: Lane) -> dict[str, Any]:
    context, limits = lane.backend.context, lane.runner.context.limits
    draft = limits.draft
    return {
        "lane": lane.name,
        "mode": lane.runner.context.mode.value,
        "page_size": limits.page_size,
        "context": limits.max_context_len,
        "slots": context.kv_cache.k[0].shape[0],
        "rows": context.req_to_token.shape[0],
        "shapes": [[shape.batch_size, shape.num_tokens] for shape in lane.shapes],
        "draft": [draft.num_steps, draft.topk, draft.num_draft_tokens],
        "frozen": lane.runner.frozen_kv,
    }


def _requests(lane: Lane, batch: ForwardBatch) -> Iterator[dict[str, Any]]:
    """Yield the facts of each request of a batch; with frozen KV once per request, not per branch."""
    if not batch.batch_size:
        return
    mode, frozen = batch.forward_mode, lane.runner.frozen_kv
    table, limits = lane.backend.context.req_to_token, lane.runner.context.limits
    each = limits.draft.topk if frozen else 1
    rows, lengths = batch.req_pool_indices.tolist()[::each], batch.seq_lens_cpu.tolist()[::each]
    slots = batch.out_cache_loc.view(batch.num_tokens, -1).tolist()
    width = batch.num_tokens // len(rows)
    counts = [width] * len(rows) if batch.extend_seq_lens_cpu is None else batch.extend_seq_lens_cpu.tolist()
    mask = None if batch.tree_mask is None else batch.tree_mask.view(len(rows), width, width).tolist()
    accepted = None if batch.num_correct_drafts is None else batch.num_correct_drafts.tolist()
    drafts = mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE) or frozen
    first = 0
    for at, (row, length, count) in enumerate(zip(rows, lengths, counts, strict=True)):
        own = [] if frozen else slots[first : first + count]
        cached = length if drafts else length - count
        in_order = own[0] if mode is ForwardMode.DRAFT_DECODE and count == 1 else [s for s, *_ in own]
        if mode is ForwardMode.DRAFT_DECODE and count > 1:
            in_order = []  # branches come after the sequence
        positions = table[row, : cached + len(in_order)].tolist()
        size = limits.page_size
        request = {"row": row, "cached": cached, "pages": [s // size for s in positions[::size]]}
        request["slots"] = own or [[]] * count
        if mask is not None:
            request["parents"] = [_parent(mask[at], token) for token in range(count)]
        if accepted is not None:
            request["accepted"] = accepted[at]
        yield request
        first += count


def _parent(mask: list[list[bool]], token: int) -> int | None:
    """Return a draft's parent: of the drafts that it sees, the one that sees the most; None for a root."""
    seen = [other for other, is_seen in enumerate(mask[token]) if is_seen and other != token]
    return max(seen, key=lambda other: sum(mask[other]), default=None)
