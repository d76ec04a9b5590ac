"""`active`: what modules of a model read while a forward pass runs. Each thread has its own.

Does not: know what a value is for; the modules that set it do.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

active = threading.local()  # torch.compile can trace it, but not a context variable


@contextmanager
def activated(name: str, value: Any) -> Iterator[None]:
    """Give `active` an attribute inside the context."""
    before = getattr(active, name, None)
    setattr(active, name, value)
    try:
        yield
    finally:
        setattr(active, name, before)
