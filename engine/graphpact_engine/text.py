"""Decodes token ids to text, one token at a time: complete characters, cut before a stop string.

One character may take several tokens, and the text of a token may depend on the token before it. So a
window of tokens is decoded twice, without and with the new tokens, and the difference is returned once it
does not end inside a character. Text that may be the beginning of a stop string is held back until it is not.

Does not: encode.
"""

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8
"""Tokens of a prompt's end that are decoded with the first ones of its output; a character has at most 4."""


class TextStream:
    """The text of one request, decoded incrementally.

    Args:
        tokenizer: A transformers tokenizer; with None all text is empty.
        prompt: The tokens before the first one. Many tokenizers drop the space at the beginning of a text,
            but the output of a request is not the beginning of a text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._token_ids = [] if tokenizer is None else list(prompt[-_CONTEXT:])
        if self._token_ids and self._decode(self._token_ids).endswith(_UNFINISHED):
            self._token_ids = []  # the prompt ends inside a character, which is not part of the output
        self._window = 0  # first token that is decoded
        self._given = len(self._token_ids)  # number of tokens whose text was returned

    def push(self, token_id: int, *, last: bool = False) -> str:
        """Return the text that ``token_id`` completes; for the last token, all remaining text."""
        if self._tokenizer is None:
            return ""
        token_ids = [*self._token_ids[self._window :], token_id]
        before = self._decode(token_ids[: self._given - self._window])
        now = self._decode(token_ids)
        self._token_ids.append(token_id)  # nothing raises after this: a failed push has no effect
        if now.endswith(_UNFINISHED) and not last:
            return ""
        self._window, self._given = self._given, len(self._token_ids)
        return now[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


class StopStrings:
    """Text up to the first stop string: the one that ends first, and of those the longest.

    Args:
        stop: The stop strings, not empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False
        """Whether a stop string was complete; no text is returned after it."""

    def push(self, text: str, *, last: bool = False) -> str:
        """Return the text that no stop string can begin in; for the last text, all up to a stop string."""
        if self.found:
            return ""
        text = self._held + text
        hits = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        self.found = bool(hits)
        if hits:
            _, end = min(hits)
        else:
            end = len(text) if last else len(text) - self._num_begun(text)
        self._held = text[end:]
        return text[:end]

    def _num_begun(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that is a prefix of a stop string."""
        return max(
            (
                n
                for stop in self._stop
                for n in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:n])
            ),
            default=0,
        )


class OutputText:
    """The text of one request's output, in one piece for each token.

    Args:
        tokenizer: A transformers tokenizer; with None all text is empty.
        stop: The stop strings.
        prompt: The tokens of the prompt.
        min_new_tokens: Number of tokens before which no stop string is looked for.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        prompt: Sequence[int] = (),
        min_new_tokens: int = 0,
    ) -> None:
        self.pieces: list[str] = []
        """The text that each token completed; their sum is all text that may be shown."""
        self._decoder = TextStream(tokenizer, prompt)
        self._stop = StopStrings(stop)
        self._min_new_tokens = min_new_tokens

    @property
    def is_stopped(self) -> bool:
        """Whether the text was cut before a stop string."""
        return self._stop.found

    def read(self, token_ids: Sequence[int], *, finished: bool) -> None:
        """Decode the tokens that have no piece yet.

        Args:
            token_ids: All tokens of the output.
            finished: Whether there will be no more.
        """
        while (at := len(self.pieces)) < len(token_ids):
            last = finished and at == len(token_ids) - 1
            text = self._decoder.push(token_ids[at], last=last)
            searched = at + 1 >= self._min_new_tokens
            self.pieces.append(self._stop.push(text, last=last) if searched else text)
