"""`V1Log`: an observer that appends a line for each hook call to the file that ``PLUGIN_V1_LOG`` names.

Does not: change a step.
"""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from graphpact import ForwardBatch, GraphShape, hookimpl


class V1Log:
    """An observer of steps, fills and metadata. Its hooks name only the arguments that they read."""

    @hookimpl(wrapper=True)
    def run_step(self, batch: ForwardBatch) -> Generator[None, Any, Any]:
        """Log a step."""
        self._write(f"run_step {batch.forward_mode.value} {batch.batch_size}")
        return (yield)

    @hookimpl(wrapper=True)
    def populate(self, shape: GraphShape) -> Generator[None, Any, Any]:
        """Log a fill."""
        self._write(f"populate {shape.batch_size}")
        return (yield)

    @hookimpl(wrapper=True)
    def init_metadata_replay(self, captured: Any) -> Generator[None, Any, Any]:
        """Log a refresh."""
        self._write(f"init_metadata_replay {type(captured).__name__}")
        return (yield)

    @staticmethod
    def _write(line: str) -> None:
        with Path(os.environ["PLUGIN_V1_LOG"]).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
