"""`SlowSteps`: an observer that prints the slow steps of a lane.

Does not: change a step. An observer returns what the hook returned.
"""

import sys
import time
from collections.abc import Generator
from typing import Any

from graphpact import ForwardBatch, Lane, hookimpl

SECONDS = 0.1
"""Seconds; slower steps are printed."""


class SlowSteps:
    """An observer for one lane. A configuration or a caller constructs it, not the lane."""

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> Generator[None, Any, Any]:
        """Measure a step, eager or not."""
        start = time.perf_counter()
        outputs = yield
        seconds = time.perf_counter() - start
        if seconds > SECONDS:
            print(f"{lane.name}: {batch.batch_size} requests, {seconds:.2f} s", file=sys.stderr)
        return outputs
