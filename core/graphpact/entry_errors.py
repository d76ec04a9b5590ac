"""`ended_by_errors`: an error in what an engine calls by its entry points ends the engine's process.

An engine logs an error of a plugin and starts without it, so that what ``GRAPHPACT`` asks for would be absent
without a message. It is used around imports too. So it is here, where nothing imports torch.

Does not: read settings; `graphpact_guard.Settings` does.
"""

import contextlib
import sys
import traceback
from collections.abc import Iterator

from graphpact.errors import GraphpactError


@contextlib.contextmanager
def ended_by_errors(distribution: str) -> Iterator[None]:
    """Return a context in which an error ends the process: its message is written to stderr.

    An error of graphpact has its own exit status. Another error, such as that of a missing module, has
    status 3, and its traceback is printed.

    Args:
        distribution: The name of the integration's distribution, such as ``graphpact-sglang``. Its extra
            ``tape`` has what the tape needs.

    Raises:
        SystemExit: There was an error.
    """
    try:
        yield
    except GraphpactError as error:
        sys.stderr.write(f"graphpact: {error}\n")
        raise SystemExit(error.code) from error
    except Exception as error:
        traceback.print_exc()
        sys.stderr.write(
            f"graphpact: GRAPHPACT is set and cannot be served: {type(error).__name__}: {error}\n"
            f'  help: install what is missing (the tape needs "{distribution}[tape]"), or unset GRAPHPACT\n'
        )
        raise SystemExit(GraphpactError.code) from error
