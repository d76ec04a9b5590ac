"""`Requirement`: one requirement on a plugin, with the function that verifies it.

The subject of a requirement is what its function uses: a function that makes a driver, an algorithm or an
observer with its surroundings.

Does not: define requirements, or run them for a plugin; see `graphpact_conformance.contracts.examine`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from graphpact.plugin_calls import describe_error

__tracebackhide__ = True

Subject = TypeVar("Subject")
Perform = Callable[[Subject], object]


@dataclass(frozen=True, slots=True)
class Requirement(Generic[Subject]):
    """One requirement on a plugin, with the function that verifies it.

    Args:
        name: Its unique name.
        sentence: The requirement, in one sentence.
        rule: Id of the rule that a plugin breaks if it does not meet the requirement. None if no rule covers
            it.
        at: The part of the plugin's interface that it is about, such as ``Graph.replay``.
        fix: The fix for a plugin that does not meet it.
        perform: Uses a new subject, and raises an error if the plugin does not meet the requirement.
    """

    name: str
    sentence: str
    rule: str | None
    at: str
    fix: str
    perform: Perform[Subject]

    def __call__(self, subject: Subject) -> None:
        """Verify the requirement on a new subject.

        Raises:
            AssertionError: The plugin does not meet it, or raises an error. The message is the requirement
                in the first line, and the evidence below.
        """
        try:
            with torch.inference_mode():  # as lanes do for their steps
                self.perform(subject)
        except Exception as error:
            what = str(error) if isinstance(error, AssertionError) else describe_error(error)
            raise AssertionError(f"{self.sentence}\n{what}") from error

    def breach(self, subject: Subject) -> str | None:
        """Return the evidence that a plugin does not meet the requirement, or None if it does."""
        try:
            self(subject)
        except AssertionError as error:
            return str(error).partition("\n")[2]
        return None


def expect_equal(actual: object, expected: object) -> None:
    """Raise `AssertionError` with both values unless they are equal."""
    if actual != expected:
        raise AssertionError(f"expected {expected!r}, got {actual!r}")


def require(what: str, holds: object) -> None:
    """Raise `AssertionError` with the text ``what`` unless ``holds`` is true."""
    if not holds:
        raise AssertionError(f"expected: {what}")


def expect_error(kind: type[Exception], call: Callable[[], object], *, says: str = "") -> None:
    """Raise `AssertionError` unless ``call`` raises ``kind`` with ``says`` in its message."""
    try:
        call()
    except kind as error:
        require(f"{says!r} in the message of {describe_error(error)}", says in str(error))
    else:
        raise AssertionError(f"expected {kind.__name__}, nothing was raised")
