"""`quiet`: silences the log messages of transformers; graphpact raises errors for those that matter.

Does not: silence Python's warnings; the command line does.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers.utils import logging as bars


@contextmanager
def quiet() -> Iterator[None]:
    """Return a context in which transformers logs errors only and shows no progress bars."""
    log = logging.getLogger("transformers")
    level, shows_bars = log.level, bars.is_progress_bar_enabled()
    log.setLevel(logging.ERROR)
    if shows_bars:
        _switch(bars.disable_progress_bar)
    try:
        yield
    finally:
        log.setLevel(level)
        if shows_bars:
            _switch(bars.enable_progress_bar)


def _switch(bars_to: Callable[[], None]) -> None:
    """Switch progress bars; suppress the warning that the environment also controls those of downloads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Cannot (en|dis)able progress bars")
        bars_to()
