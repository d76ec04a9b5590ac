"""The command line: `main` prints errors and returns the exit status.

    0    done                     2    usage: the request is invalid, nothing was done
    1    the contract was broken  3    a defect of the engine, or a fault of this machine
    130  interrupted              141  the reader of the output closed the pipe

Does not: import typer and rich before `main` is called; they are the extra ``graphpact[cli]``.
"""

import os
import sys
import traceback
from collections.abc import Sequence

from graphpact.errors import GraphpactError

__all__ = ["main"]

TRACEBACK_VARIABLE = "GRAPHPACT_TRACEBACK"
"""Environment variable: ``1`` prints the traceback of an error before its message."""

_NOT_INSTALLED = 2
_INTERNAL_ERROR = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: Arguments after the command's name; by default those of the process.
    """
    try:
        from graphpact.cli import app, console  # noqa: PLC0415  an extra
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in {"typer", "rich"}:
            raise
        sys.stderr.write(f'error: the command line needs {package}: pip install "graphpact[cli]"\n')
        return _NOT_INSTALLED
    try:
        return app.run(arguments)
    except GraphpactError as error:
        _show_traceback()
        console.error(error.message, error.hint)
        return error.code
    except Exception as error:  # noqa: BLE001  users see no traceback by default
        _show_traceback()
        console.internal_error(error, f"{TRACEBACK_VARIABLE}=1 prints the traceback")
        return _INTERNAL_ERROR


def _show_traceback() -> None:
    if os.environ.get(TRACEBACK_VARIABLE, "0") not in {"", "0"}:
        traceback.print_exc()
