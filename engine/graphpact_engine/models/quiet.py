"""`quiet`: silences the log messages of transformers, which are errors of graphpact where they matter.

Does not: silence Python's warnings; the command line does.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Return a context in which transformers logs errors only."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
