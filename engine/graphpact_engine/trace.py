"""`HookTrace`: an observer that prints every hook call of a lane.

Its plugin name is ``trace``. ``GRAPHPACT_TRACE=1`` adds one to every lane of an engine.

Does not: read the contents of tensors, so that tracing causes no synchronization.
"""

import sys
from typing import Any, TextIO

import torch

from graphpact.batch import ForwardBatch
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape
from graphpact_engine.phases import Around, HookObserver


class HookTrace(HookObserver):
    """An observer that prints one line per hook call: hook, shape, batch size, and result.

    Args:
        file: The stream to write to; standard error by default.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file

    @hookimpl(wrapper=True)
    def run_step(self, lane: Any, batch: ForwardBatch) -> Around:
        """Trace a step, replayed or eager."""
        outputs = yield
        mode, count = batch.forward_mode.value, batch.batch_size
        self._print(f"step of lane {lane.name!r}: {mode} of {count} requests -> {outputs!r}")
        return outputs

    def around(
        self, hook: str, shape: GraphShape, *, batch: ForwardBatch | None = None, captured: Any = None
    ) -> Around:
        """Print the call and its result."""
        what = "dummy" if batch is None else f"{batch.batch_size} requests"
        if hook == "init_metadata_replay":
            what = _describe(captured)
        result = yield
        self._print(f"{hook} {shape} {what} -> {_describe(result)}")
        return result

    def _print(self, what: str) -> None:
        print(f"graphpact: {what}", file=self._file or sys.stderr)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} at {value.data_ptr():#x}"
    return "None" if value is None else f"{type(value).__name__} at {id(value):#x}"
