"""Reads prompts from arguments, a file, or stdin.

Does not: tokenize, or check lengths; the engine does.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from graphpact.errors import UsageError
from graphpact_cli.prompt_lines import STDIN, prompt_lines
from graphpact_engine.prompts import check_text

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
        prompts += prompt_lines(file, hint=_HINT)
    elif not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("there is no prompt", hint=_HINT)
        prompts = prompt_lines(STDIN, hint=_HINT)
    return prompts
