"""The continuous batching of transformers as a way: its manager, with a cache for what is measured.

By default its cache takes most of the machine's memory, and more than half a minute on a CPU. So here the
cache has room for twice the measured requests.

Does not: use graphpact.
"""

import dataclasses
import logging
import time
from typing import Any

import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from graphpact_bench.timing import Tokens, UnavailableWayError, Written
from graphpact_bench.ways.base import Way, WaySetting, intervals
from graphpact_bench.ways.generate import load_model

_PAGE = 32
_OPTIONS = {option.name for option in dataclasses.fields(ContinuousBatchingConfig)}
_PAGE_OPTION = "page_size" if "page_size" in _OPTIONS else "block_size"  # the name in transformers 5.17
_LOGGER = "ContinuousBatchingLogger"
_PATIENCE = 600.0  # seconds for one result


class ContinuousBatchingWay(Way):
    """A manager of continuous batching, whose thread runs until the way is closed.

    Args:
        name: Its name in the table.
        setting: What it is built for.
    """

    is_foreign = True

    def __init__(self, name: str, setting: WaySetting) -> None:
        super().__init__(name)
        logging.getLogger(_LOGGER).setLevel(logging.CRITICAL)  # advice on memory and psutil
        largest = max(setting.batch_sizes)
        pages = -(-setting.max_tokens // _PAGE) + 1
        self.manager = load_model(setting).init_continuous_batching(
            generation_config=transformers.GenerationConfig(
                max_new_tokens=setting.new, do_sample=False, eos_token_id=-1
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=2 * largest * pages,
                max_batch_tokens=max(largest * setting.prompt, 2 * largest),
                allow_block_sharing=False,  # a prompt is read each time, as by the others
                **{_PAGE_OPTION: _PAGE},
            ),
        )
        self.manager.start()

    def write(self, prompts: Tokens, count: int) -> Written:
        """Add all prompts and wait; the manager records the time of each token.

        Raises:
            UnavailableWayError: A request failed, or its thread ended.
        """
        start = time.perf_counter()
        names = self.manager.add_requests(prompts, max_new_tokens=count, record_timestamps=True)
        done: dict[str, Any] = {}
        while len(done) < len(prompts):
            result = self.manager.get_result(timeout=_PATIENCE)
            if result is None or result.error:
                why = "no result" if result is None else result.error
                raise UnavailableWayError(f"continuous batching of transformers: {why}")
            if result.is_finished():
                done[result.request_id] = result
        results = [done[name] for name in names]
        # A step ends when the last request has its token; requests may be admitted one step apart.
        moments = [max(each) for each in zip(*(result.timestamps for result in results), strict=True)]
        first, *steps = intervals([start, *moments])
        return Written([result.generated_tokens for result in results], first, steps)

    def close(self) -> None:
        """End the manager's thread."""
        self.manager.stop(block=True, timeout=10)
        self.manager.destroy()


def continuous(name: str, setting: WaySetting) -> Way:
    """Return the continuous batching of transformers."""
    return ContinuousBatchingWay(name, setting)
