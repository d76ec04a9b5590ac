"""`StepRecorder`: writes the steps of an engine's lanes to a file, for `graphpact check --scenario`.

`graphpact.recording` has the format.

Does not: change a step. It reads lengths and pages on the host, so each step waits for the device.
"""

from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graphpact.batch import ForwardBatch
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane
from graphpact.recording import LaneLine, RecordingWriter, step_of


class StepRecorder:
    """An observer that writes every step; a context manager that opens and closes the file.

    A file without any step is removed at the end.

    Args:
        path: The file, which must not exist.
    """

    def __init__(self, path: Path) -> None:
        self._writer = RecordingWriter(path)
        self._lanes: dict[str, LaneLine] = {}

    @property
    def num_steps(self) -> int:
        """Steps that were written."""
        return self._writer.num_steps

    def __enter__(self) -> Self:
        """Open the file.

        Raises:
            UsageError: It exists, or cannot be written.
        """
        self._writer.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file.

        Raises:
            GraphpactError: The last lines cannot be written.
        """
        self._writer.__exit__(kind, error, trace)

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> Generator[None, Any, Any]:
        """Write the step before it runs, so that a failing step is in the file too."""
        line = self._lanes.get(lane.name) or self._lanes.setdefault(lane.name, _line_of(lane))
        self._writer.write(line, step_of(line, batch, lane.backend.context.req_to_token))
        return (yield)


def _line_of(lane: Lane) -> LaneLine:
    context, limits = lane.backend.context, lane.runner.context.limits
    draft = limits.draft
    return LaneLine(
        lane=lane.name,
        mode=lane.runner.context.mode,
        page_size=limits.page_size,
        context=limits.max_context_len,
        slots=context.kv_cache.k[0].shape[0],
        rows=context.req_to_token.shape[0],
        shapes=[[shape.batch_size, shape.num_tokens] for shape in lane.shapes],
        draft=[draft.num_steps, draft.topk, draft.num_draft_tokens],
        frozen=lane.runner.frozen_kv,
    )
