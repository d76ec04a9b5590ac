"""Completions as they come, written one after another in the order of their prompts.

Prompts run together, and their tokens arrive interleaved. A writer lets only the first prompt that
is not finished speak; what the later ones say waits, so nothing is mixed or comes out of order.

Does not: open files; stdout is where data goes.
"""

import abc
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphpact.cli.console import clean, data
from graphpact_engine.engine import Delta


@dataclass(slots=True)
class GeneratedText:
    """What one prompt has got so far."""

    prompt: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Writer(abc.ABC):
    """Collects what the prompts get and writes the first unfinished one.

    Args:
        prompts: In the order in which they are written.
    """

    def __init__(self, prompts: Sequence[str]) -> None:
        self.answers = [GeneratedText(prompt) for prompt in prompts]
        self._at = 0  # the answers before it are written

    def push(self, delta: Delta) -> None:
        """Take one token, and write what can be written now."""
        answer = self.answers[delta.index]
        answer.text += delta.text
        answer.token_ids.append(delta.token_id)
        answer.finish_reason = delta.finish_reason
        if delta.index != self._at:
            return
        while self._at < len(self.answers):
            answer = self.answers[self._at]
            self._write(answer)
            if answer.finish_reason is None:
                break
            self._at += 1
        sys.stdout.flush()

    def close(self) -> None:  # noqa: B027  most have nothing to do
        """End the line that an interrupted run may have begun."""

    @abc.abstractmethod
    def _write(self, answer: GeneratedText) -> None:
        """Write what is new of the first answer that is not written to its end."""


class JsonWriter(Writer):
    """One JSON object a line for each finished prompt."""

    def _write(self, answer: GeneratedText) -> None:
        if answer.finish_reason is None:
            return
        line = json.dumps(
            {
                "prompt": answer.prompt,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
            }
        )
        sys.stdout.write(line + "\n")


class TextWriter(Writer):
    """The prompt, marked on a terminal, and its continuation; a blank line between two prompts.

    Args:
        prompts: In the order in which they are written.
        live: Write each token as it comes, and not only whole answers.
    """

    def __init__(self, prompts: Sequence[str], *, live: bool) -> None:
        super().__init__(prompts)
        self._live = live
        self._console = data()
        self._written: int | None = None  # characters of the answer under way; None: not its prompt

    def close(self) -> None:
        """End the line that an interrupted run may have begun."""
        if self._written is not None:
            sys.stdout.write("\n")
            self._written = None

    def _write(self, answer: GeneratedText) -> None:
        finished = answer.finish_reason is not None
        if not (self._live or finished):
            return
        if self._written is None:
            if self._at:
                sys.stdout.write("\n")
            self._write_prompt(answer.prompt)
            self._written = 0
        new = answer.text[self._written :]
        sys.stdout.write(clean(new) if self._console.is_terminal else new)
        self._written = len(answer.text)
        if finished:
            sys.stdout.write("\n")
            self._written = None

    def _write_prompt(self, prompt: str) -> None:
        if self._console.is_terminal:
            self._console.out(clean(prompt), style="bold", highlight=False, end="")
        else:
            sys.stdout.write(prompt)
