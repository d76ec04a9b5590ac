"""The CPU threads of an engine's steps.

torch divides every large enough operation among its threads, and each waits for the slowest. In the step of a
small model an operation takes microseconds: the threads save little on an idle machine, and on a busy one the
waiting takes many times the work.

Does not: change the threads of anything but captures and steps, or divide requests among threads.
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

SMALL_MODEL = 64 * 2**20
"""Bytes of weights up to which a step on a CPU runs on one thread by default."""

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def choose_num_threads(setting: int | None, device: torch.device, weight_bytes: int) -> int:
    """Return the number of CPU threads of an engine's steps.

    Args:
        setting: ``engine.num_threads``; None chooses one thread for a small model on a CPU, unless the
            environment says how many, and torch's own number for all others.
        device: The device of the model.
        weight_bytes: Bytes of the model's weights.
    """
    if setting is not None:
        return setting
    is_given = any(os.environ.get(name) for name in _VARIABLES)
    is_small = device.type == "cpu" and weight_bytes <= SMALL_MODEL
    return 1 if is_small and not is_given else torch.get_num_threads()


def running_on(num_threads: int) -> AbstractContextManager[None]:
    """Return a context in which torch's operators run on ``num_threads`` threads of the CPU."""
    before = torch.get_num_threads()  # nearly always the same: then a step enters no generator
    return _UNCHANGED if num_threads == before else _switched(before, num_threads)


_UNCHANGED = contextlib.nullcontext()


@contextlib.contextmanager
def _switched(before: int, num_threads: int) -> Iterator[None]:
    """Return a context with another number of threads; ``before`` is the number after it."""
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
