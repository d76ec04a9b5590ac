"""Run functions in forked children, for tests with real engines: an import of one takes half a minute.

Does not: import an engine.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def in_child(function: Callable[..., Any], *args: Any, environment: Mapping[str, str], seconds: float) -> Any:
    """Return what ``function(*args)`` returns in a forked child with other environment variables.

    Raises:
        AssertionError: It raised; the message has its traceback.
        TimeoutError: It took more than ``seconds``.
    """
    result, error = in_children(function, [(args, environment)], seconds)[0]
    if error is not None:
        raise AssertionError(f"the engine's process raised:\n{error}")
    return result


def in_children(
    function: Callable[..., Any],
    calls: Sequence[tuple[Sequence[Any], Mapping[str, str]]],
    seconds: float,
) -> list[tuple[Any, str | None]]:
    """Return what each call of ``function`` returns, and the traceback of its error or None.

    All children run at the same time.

    Args:
        function: Is called once in each child.
        calls: For each child the arguments, and the environment variables that differ.
        seconds: How long all of them may take.

    Raises:
        TimeoutError: They took more than ``seconds``.
    """
    context = multiprocessing.get_context("fork")

    def work(sender: Any, args: Sequence[Any], environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        try:
            sender.send((function(*args), None))
        except BaseException:  # noqa: BLE001  the parent gets it
            sender.send((None, traceback.format_exc()))
        finally:
            sender.close()
            os._exit(0)

    children, receivers = [], []
    for args, environment in calls:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=work, args=(sender, args, environment))
        child.start()
        sender.close()
        children.append(child)
        receivers.append(receiver)
    end = time.monotonic() + seconds
    try:
        results = []
        for receiver in receivers:
            if not receiver.poll(max(end - time.monotonic(), 0)):
                raise TimeoutError(f"the engine took more than {seconds} s")
            try:
                results.append(receiver.recv())
            except EOFError:
                results.append((None, "the process ended without a result"))
    finally:
        for child in children:
            child.kill()
            child.join()
    return results
