"""Run a function in a forked child, for tests with real engines: an import of one takes half a minute.

Does not: import an engine.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def in_child(function: Callable[..., Any], *args: Any, environment: Mapping[str, str], seconds: float) -> Any:
    """Return what ``function(*args)`` returns in a forked child with other environment variables.

    Raises:
        AssertionError: It raised; the message has its traceback.
        TimeoutError: It took more than ``seconds``.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        os.environ.update(environment)
        try:
            sender.send((function(*args), None))
        except BaseException:  # noqa: BLE001  the parent raises it
            sender.send((None, traceback.format_exc()))
        finally:
            sender.close()
            os._exit(0)

    child = context.Process(target=work)
    child.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise TimeoutError(f"the engine took more than {seconds} s")
        result, error = receiver.recv()
    finally:
        child.kill()
        child.join()
    if error is not None:
        raise AssertionError(f"the engine's process raised:\n{error}")
    return result
