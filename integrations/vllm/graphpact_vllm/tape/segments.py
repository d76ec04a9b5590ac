"""`TapedSegments`: vLLM's ``BreakableCUDAGraphCapture`` on a tape.

vLLM records a breakable graph as several CUDA graphs with eager calls between them. On a tape it is one graph
with as many segments, because a call may break the graph inside of an operator that the tape is recording.
vLLM's own wrapper and its decorator for eager calls run as they are.

Does not: decide where a graph is broken.
"""

import contextlib
from types import TracebackType
from typing import Any, Self

import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

from graphpact_tape import EagerSection, TapeDriver


class TapedSegments(BreakableCUDAGraphCapture):
    """A context that captures its block as one tape, which ``add_eager`` breaks.

    Args:
        pool: Unused: all tapes of a process share a pool.
    """

    def __init__(self, pool: Any = None) -> None:
        super().__init__(pool)
        stand_in: Any = torch.cuda.CUDAGraph
        self._taped = stand_in()
        self._driver: TapeDriver = self._taped.driver
        self._capture = contextlib.ExitStack()
        self._section = contextlib.ExitStack()
        self._eager: EagerSection | None = None

    def __enter__(self) -> Self:
        self._capture.enter_context(self._taped.capturing())
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        BreakableCUDAGraphCapture._tls.active = None  # noqa: SLF001  as vLLM's own
        self._section.__exit__(kind, error, trace)  # if an eager call failed
        self._capture.__exit__(kind, error, trace)
        self.segments.append(self._taped.replay)

    # -- called by add_eager ---------------------------------------------------------------------

    def _end_segment(self) -> None:
        """Begin an eager call."""
        self._capturing = False
        self._eager = self._section.enter_context(self._driver.eager_section())

    def _begin_segment(self) -> None:
        """End an eager call, which every replay makes."""
        self._capturing = True
        if self._eager is not None:  # not the first segment
            self._eager.fn = self.segments.pop()  # add_eager appended it
            self._section.close()
