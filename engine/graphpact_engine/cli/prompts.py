"""Where prompts come from: arguments, a file, or stdin.

Does not: tokenize, or judge lengths; the engine does.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from graphpact.errors import UsageError
from graphpact_engine.errors import RequestError

_STDIN = Path("-")
_WAYS = 'graphpact generate "a prompt" ..., --file FILE, or pipe one prompt a line'


def read_prompts(arguments: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts of the command line, then those of ``file``; of stdin where both lack.

    A file and stdin hold one prompt a line; blank lines are skipped, other blanks are kept.

    Raises:
        UsageError: No prompt at all, or a file that cannot be read as UTF-8.
        RequestError: An argument that is empty or is no text.
    """
    for number, prompt in enumerate(arguments, 1):
        _check_argument(number, prompt)
    prompts = list(arguments)
    if file is not None:
        prompts += _lines(file)
    elif not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("there is no prompt", hint=_WAYS)
        prompts = _lines(_STDIN)
    return prompts


def _check_argument(number: int, prompt: str) -> None:
    if not prompt:
        raise RequestError(f"prompt {number} is empty", hint="give at least one character")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes that are no text reach us as lone surrogates
        raise RequestError(f"prompt {number} is not UTF-8 text: {prompt!r}") from error


def _lines(file: Path) -> list[str]:
    name = "stdin" if file == _STDIN else f"the prompt file {file}"
    try:
        raw = sys.stdin.buffer.read() if file == _STDIN else file.read_bytes()
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{name}: line {line} is not UTF-8 text: byte 0x{raw[error.start]:02x}",
            hint="prompts are read as UTF-8, one a line",
        ) from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"there is no prompt in {name}", hint=_WAYS)
    return prompts
