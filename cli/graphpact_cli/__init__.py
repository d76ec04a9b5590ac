"""The command line: `main` prints errors and returns the exit status.

    0    done                     2    usage: the request is invalid, nothing was done
    1    the contract was broken  3    a defect of the engine, or a fault of this machine
    130  interrupted              141  the reader of the output closed the pipe
    143  ended by SIGTERM, where a command cleans up then

Does not: import typer and rich before `main` is called, so that the modules for files stay light.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from graphpact.errors import GraphpactError
from graphpact.plugin_calls import describe_error, place_of

__all__ = ["main"]

TRACEBACK_VARIABLE = "GRAPHPACT_TRACEBACK"
"""Environment variable: ``1`` prints the traceback of an error before its message."""

_FAULT = 3
_INTERRUPTED, _SIGPIPE, _TERMINATED = 130, 141, 143  # as shells report the signals
_LOST = {errno.EPIPE, errno.EBADF, errno.EIO, errno.EFBIG, errno.ENOSPC, errno.EDQUOT}
"""Errors of writing to stdout; errors of other files contain a file name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of the process, and return its exit status."""
    status, error = 0, None
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        _open_streams()
        with suppress(AttributeError):  # not a file
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        from graphpact_cli import app  # noqa: PLC0415  slow: typer and rich

        status = app.run_command(given)
    except BaseException as raised:  # noqa: BLE001  users see no traceback by default
        error = raised
    _open_streams()  # a plugin may have closed them
    lost = _flush(sys.stdout)
    if isinstance(error, OSError) and error.filename is None and error.errno in _LOST:
        lost, error = error, None
    if lost is not None and error is None:
        if isinstance(lost, BrokenPipeError):
            return _SIGPIPE
        why = getattr(lost, "strerror", None) or lost
        error = GraphpactError(f"the output cannot be written to stdout: {why}")
    status = status if error is None else _report(error, given)
    _flush(sys.stderr)
    return status


def _report(error: BaseException, given: Sequence[str]) -> int:
    """Print an error of the command line ``given`` and return its exit status."""
    chain = [error]  # an interrupted import may raise another error
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    stops = [each for each in chain if isinstance(each, KeyboardInterrupt)]
    if stops:
        return _TERMINATED if any(signal.SIGTERM in each.args for each in stops) else _INTERRUPTED
    if os.environ.get(TRACEBACK_VARIABLE, "0") not in {"", "0"}:
        with suppress(OSError):
            traceback.print_exception(error)
    from graphpact_cli import app, console, distributions  # noqa: PLC0415  slow: typer and rich

    if isinstance(error, GraphpactError):
        console.error(error.message, distributions.help_for(error))
        return error.code
    what, hint = describe_error(error), f"{TRACEBACK_VARIABLE}=1 prints the traceback"
    label, plugin = "internal error: ", None
    with suppress(Exception):  # the catalog may be what failed
        plugin = app.third_party(given)
    if plugin is not None:
        what, hint, label = f"command {plugin} raised {what}", f"a defect of the plugin; {hint}", "error: "
    console.error(f"{what} (at {place_of(error)})", hint, label)
    return _FAULT


def _open_streams() -> None:
    """Open standard streams that are closed; messages to them are dropped, and output fails."""
    for name, mode, flags in (("stdin", "r", 0), ("stdout", "w", 0), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, encoding="utf-8"))


def _flush(stream: TextIO) -> OSError | ValueError | None:
    """Flush a stream; return its error, and drop the rest, which the interpreter would flush at its end."""
    try:
        stream.flush()
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None
