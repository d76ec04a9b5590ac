"""Writers of completions to stdout, one after another in the order of their prompts.

Prompts run together, so their tokens arrive interleaved. A writer writes only the output of the first
unfinished prompt and buffers that of later prompts, so that outputs are not mixed and are in order.

Does not: open files.
"""

import abc
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphpact_cli.console import clean, data
from graphpact_engine.deltas import Delta


@dataclass(slots=True)
class GeneratedText:
    """The output of one prompt so far.

    Args:
        prompt: The prompt.
        text: The generated text.
        token_ids: The generated tokens.
        finish_reason: Why it ended; None while it runs.
    """

    prompt: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Writer(abc.ABC):
    """Base class: collects the output of all prompts, and writes that of the first unfinished one.

    Args:
        prompts: The prompts, in the order of output.
    """

    def __init__(self, prompts: Sequence[str]) -> None:
        self.answers = [GeneratedText(prompt) for prompt in prompts]
        self._at = 0  # index of the first answer that is not complete

    def push(self, delta: Delta) -> None:
        """Add one token, and write the output that is next in order."""
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

    def close(self) -> None:  # noqa: B027  optional
        """End the line of an interrupted run."""

    @abc.abstractmethod
    def _write(self, answer: GeneratedText) -> None:
        """Write the new part of the first incomplete answer."""


class SilentWriter(Writer):
    """A writer for ranks whose answers another rank writes."""

    def _write(self, answer: GeneratedText) -> None:
        """Write nothing."""


class JsonWriter(Writer):
    """A writer of one line per finished prompt, a JSON object."""

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
    """A writer of prompts (bold on a terminal) and continuations, separated by blank lines.

    Args:
        prompts: The prompts, in the order of output.
        live: Whether to write each token at once instead of complete answers.
        after_prompt: Text between a prompt and its continuation.
    """

    def __init__(self, prompts: Sequence[str], *, live: bool, after_prompt: str = "") -> None:
        super().__init__(prompts)
        self._live = live
        self._after_prompt = after_prompt
        self._console = data()
        self._written: int | None = None  # characters of the answer; None if its prompt is not written yet

    def close(self) -> None:
        """End the line of an interrupted run."""
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
        sys.stdout.write(self._after_prompt)
