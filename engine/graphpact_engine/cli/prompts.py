"""Reads prompts from arguments, a file, or stdin.

Does not: tokenize, or check lengths; the engine does.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from graphpact.errors import UsageError
from graphpact_engine.prompts import check_text

_STDIN = Path("-")
_LARGEST = 2**28  # bytes of one file; a device may have no end
_HINT = 'graphpact generate "a prompt" ..., --file FILE, or pipe one prompt per line'


def read_prompts(arguments: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts of the command line, then those of ``file``; without either, those of stdin.

    A file and stdin contain one prompt per line. Blank lines are skipped; other whitespace is kept.

    Raises:
        UsageError: There is no prompt, or a file is too large or cannot be read as UTF-8.
        RequestError: An argument is empty or is not text.
    """
    for number, prompt in enumerate(arguments, 1):
        check_text(prompt, f"prompt {number}")
    prompts = list(arguments)
    if file is not None:
        prompts += _lines(file)
    elif not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("there is no prompt", hint=_HINT)
        prompts = _lines(_STDIN)
    return prompts


def _lines(file: Path) -> list[str]:
    name = "stdin" if file == _STDIN else f"the prompt file {file}"
    try:
        with nullcontext(sys.stdin.buffer) if file == _STDIN else file.open("rb") as stream:
            raw = stream.read(_LARGEST + 1)
        if len(raw) > _LARGEST:
            raise UsageError(
                f"{name} has more than {_LARGEST >> 20} MiB", hint="run its prompts in several parts"
            )
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{name}: line {line} is not UTF-8 text: byte 0x{raw[error.start]:02x}",
            hint="prompts are read as UTF-8, one per line",
        ) from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"there is no prompt in {name}", hint=_HINT)
    return prompts
