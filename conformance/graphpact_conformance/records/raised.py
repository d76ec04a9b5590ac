"""Read a raised error: its causes, its rule, the missing value, and its message in one line.

`CannotCaptureError` and `DeclinedError` end an experiment early: there is no graph, or no replay.

Does not: decide whether an error breaks a rule.
"""

from collections.abc import Iterator

from graphpact.errors import ConfigError, GraphpactError
from graphpact.plugin_calls import place_of
from graphpact.shapes import EagerReason
from graphpact_conformance.rules import RULES


class NeedsValueError(ConfigError):
    """The tested code read a value that the suite does not have: it is not checked, and not at fault.

    Args:
        path: The value, as the code reads it, such as ``vllm_config.cache_config.block_size``.
        message: As of `GraphpactError`.
        hint: As of `GraphpactError`.
    """

    def __init__(self, path: str, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.path = path


class CannotCaptureError(Exception):
    """A lane could not be captured, so experiments that need its graphs cannot run."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(message_of(error))
        self.error = error


class DeclinedError(Exception):
    """The runner left a batch to an eager step, with a declared reason; an experiment needs a replay."""

    def __init__(self, reason: EagerReason) -> None:
        super().__init__(f"the runner leaves this batch to an eager step: {reason}")


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and its chain of causes, the last first."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def rule_of(error: BaseException) -> str | None:
    """Return the rule that an error or one of its causes names; None if there is none."""
    for each in causes(error):
        rule = getattr(each, "rule", None)
        if rule in RULES:
            return str(rule)
    return None


def need_of(error: BaseException) -> NeedsValueError | None:
    """Return the error about a missing value among an error and its causes; None if there is none."""
    return next((each for each in causes(error) if isinstance(each, NeedsValueError)), None)


def message_of(error: BaseException) -> str:
    """Return the first line of an error's message, with the type for errors outside graphpact.

    For an error without a message, return the place where it was raised.
    """
    if isinstance(error, GraphpactError):
        return error.message.strip().splitlines()[0]
    try:
        lines = str(error).strip().splitlines() or [f"no message, at {place_of(error)}"]
    except Exception:  # noqa: BLE001  a third party's __str__
        lines = [f"its message cannot be read, at {place_of(error)}"]
    return f"{type(error).__name__}: {lines[0]}"


def same_error(a: BaseException, b: BaseException) -> bool:
    """Return whether two errors have the same type, message and line."""
    return (type(a), message_of(a), place_of(a)) == (type(b), message_of(b), place_of(b))
