"""`SlowStepsObserver`: logs the slow steps of a lane.

Does not: change a step. An observer yields once and returns what the hook returned.
"""

import logging
import time
from collections.abc import Generator
from typing import Any

from graphpact import ForwardBatch, Lane, hookimpl

SECONDS = 0.1
"""Seconds; slower steps are logged."""
_log = logging.getLogger(__name__)


class SlowStepsObserver:
    """An observer of one lane. An engine builds one for each lane, without arguments."""

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> Generator[None, Any, Any]:
        """Measure a step, eager or not."""
        start = time.perf_counter()
        outputs = yield
        seconds = time.perf_counter() - start
        if seconds > SECONDS:
            _log.warning("%s: %d requests, %.2f s", lane.name, batch.batch_size, seconds)
        return outputs
