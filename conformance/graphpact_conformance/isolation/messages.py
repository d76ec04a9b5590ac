"""Messages that a worker sends besides results, and functions that quote its output.

Does not: import torch; the supervisor does not.
"""

import re
from dataclasses import dataclass
from typing import Any

from graphpact import errors
from graphpact.errors import UsageError
from graphpact_cli.children import Ending
from graphpact_conformance.targets import Target

_TAIL_LINES = 5
_UNSTEADY = re.compile(
    r"0x[0-9a-fA-F]+"  # addresses
    r"|\b(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?: +\d+)?"  # times of day, thread ids
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The targets of the names of a run.

    Args:
        targets: The targets.
        torch: The version of torch.
        device_name: The name of the GPU; None on a CPU.
        experiments: What each experiment does, by its name.
    """

    targets: list[Target]
    torch: str
    device_name: str | None
    experiments: dict[str, str]


@dataclass(frozen=True, slots=True)
class Refused:
    """A usage error; nothing was examined.

    Args:
        kind: The name of the class of the error.
        message: Its message.
        fields: Its attributes, such as the hint, and the plugin that an `UnknownPluginError` is about.
    """

    kind: str
    message: str
    fields: dict[str, Any]

    def error(self) -> UsageError:
        """Return the error, to be raised in another process."""
        error: UsageError = getattr(errors, self.kind, UsageError)(self.message)
        vars(error).update(self.fields)
        return error


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that ended the job.

    Args:
        by_plugin: Whether the plugin raised it.
        text: The end of its traceback.
    """

    by_plugin: bool
    text: str


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning from the plugin.

    Args:
        kind: The name of its class.
        at: File and line.
        text: Its message.
    """

    kind: str
    at: str
    text: str


def ending_lines(ending: Ending) -> list[str]:
    """Return lines about the end of a process: where it hung or crashed, and what it last wrote to stderr."""
    said = tail(ending.stderr).splitlines()
    return [*ending.frames, *(["on stderr:", *said] if said else [])]


def tail(text: str) -> str:
    """Return the last lines of an output, without addresses and times."""
    return without_addresses("\n".join(text.splitlines()[-_TAIL_LINES:]))


def without_addresses(text: str) -> str:
    """Return ``text`` without addresses and times of day, which differ between runs."""
    return _UNSTEADY.sub("…", text)
