"""`prompt_lines`: the prompts of a file or of stdin, one on each line.

Does not: tokenize, or check lengths; engines do.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

from graphpact.errors import UsageError

STDIN = Path("-")
"""The name of stdin in the place of a file."""
_LARGEST = 2**28  # bytes of one file; a device may have no end


def prompt_lines(file: Path, *, hint: str) -> list[str]:
    """Return the prompts of a file. Blank lines are skipped; other whitespace is kept.

    Args:
        file: The file, or `STDIN`.
        hint: What to do if there is no prompt.

    Raises:
        UsageError: There is no prompt, or the file is too large or cannot be read as UTF-8.
    """
    name = "stdin" if file == STDIN else f"the prompt file {file}"
    try:
        with nullcontext(sys.stdin.buffer) if file == STDIN else file.open("rb") as stream:
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
        raise UsageError(f"there is no prompt in {name}", hint=hint)
    return prompts
