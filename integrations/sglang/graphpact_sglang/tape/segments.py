"""`TapedSegments`: SGLang's ``BreakableCUDAGraphCapture`` on a tape.

SGLang records a breakable graph as several CUDA graphs with eager calls between them. On a tape it is one
graph with as many segments, because the segments share their memory. SGLang's own ``eager_on_graph`` and
``BreakableCUDAGraph`` run as they are: they see one segment that replays all.

Does not: watch side streams; a CPU has none.
"""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph

from graphpact_tape import EagerSection, TapeDriver


class TapedSegments:
    """A context that captures its block as one tape, which ``eager_on_graph`` breaks.

    Args:
        cuda_graph: SGLang's ``BreakableCUDAGraph``, which gets the tape.
        pool: Unused: all tapes of a process share a pool.
        stream: Unused.
        capture_error_mode: Unused.
        barrier_fn: Waits for the other ranks before each eager call.
    """

    def __init__(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        barrier_fn: Callable[[], None] | None = None,
    ) -> None:
        del pool, stream, capture_error_mode
        self.cuda_graph = _Breaks()
        self._graph = cuda_graph
        self._barrier_fn = barrier_fn
        stand_in: Any = torch.cuda.CUDAGraph
        self._taped = stand_in()
        self._driver: TapeDriver = self._taped.driver
        self._capture = contextlib.ExitStack()
        self._section = contextlib.ExitStack()
        self._eager: EagerSection | None = None

    def __enter__(self) -> Self:
        self._token = breakable_cuda_graph._current_capture_var.set(self)  # noqa: SLF001  eager_on_graph asks it
        self._capture.enter_context(self._taped.capturing())
        self._begin_new_segment()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        breakable_cuda_graph._current_capture_var.reset(self._token)  # noqa: SLF001
        self._section.__exit__(kind, error, trace)  # if an eager call failed
        self._capture.__exit__(kind, error, trace)
        if kind is None:
            self._graph._append_segment(self._taped, needs_instantiate=False)  # noqa: SLF001

    # -- called by eager_on_graph ----------------------------------------------------------------

    def _end_current_segment(self) -> None:
        """Begin an eager call."""
        self._eager = self._section.enter_context(self._driver.eager_section())

    def _begin_new_segment(self) -> None:
        """End an eager call, which every replay makes."""
        if self._eager is None:  # the first segment
            return
        call = self.cuda_graph._break_fns.pop()  # noqa: SLF001  eager_on_graph appended it

        def replayed() -> None:
            call()  # it copies its result to where the next segment reads it

        self._eager.fn = replayed
        self._section.close()


class _Breaks:
    """The part of a ``BreakableCUDAGraph`` to which ``eager_on_graph`` adds its calls."""

    def __init__(self) -> None:
        self._break_fns: list[Callable[[], object]] = []
