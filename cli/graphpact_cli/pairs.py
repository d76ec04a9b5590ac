"""`pair_of` and `setting_of`: arguments of the form NAME=VALUE.

Does not: know the names of a command.
"""

import json
from typing import Any

from graphpact.errors import UsageError


def pair_of(option: str, text: str, form: str, example: str) -> tuple[str, str]:
    """Return the name and the value of an argument.

    Args:
        option: The option that has it, such as ``--set``.
        text: The argument.
        form: Its form in words, such as ``KEY=VALUE``.
        example: An argument of this form.

    Raises:
        UsageError: It has no name or no value.
    """
    name, _, value = text.partition("=")
    if not name or not value:
        raise UsageError(f"{option} {text!r} is not {form}", hint=f"for example {option} {example}")
    return name, value


def setting_of(text: str) -> tuple[str, Any]:
    """Return the key and the value of an argument of ``--set``; the value is JSON or else text.

    Raises:
        UsageError: It is not ``KEY=VALUE``.
    """
    key, value = pair_of("--set", text, "KEY=VALUE", "page_size=16")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
