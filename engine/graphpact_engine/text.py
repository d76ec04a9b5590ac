"""`TextStream`: token ids to text, one token at a time, in complete characters.

One character may take several tokens, and the text of a token may depend on the token before it. So a
window of tokens is decoded twice, without and with the new tokens, and the difference is returned once it
does not end inside a character.

Does not: encode.
"""

from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one request, decoded incrementally.

    Args:
        tokenizer: A transformers tokenizer; with None all text is empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._window = 0  # first token that is decoded
        self._given = 0  # number of tokens whose text was returned

    def push(self, token_id: int, *, last: bool = False) -> str:
        """Return the text that ``token_id`` completes; for the last token, all remaining text."""
        if self._tokenizer is None:
            return ""
        self._token_ids.append(token_id)
        before = self._decode(self._given)
        now = self._decode(len(self._token_ids))
        if now.endswith(_UNFINISHED) and not last:
            return ""
        self._window, self._given = self._given, len(self._token_ids)
        return now[len(before) :]

    def _decode(self, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._token_ids[self._window : end], skip_special_tokens=True
        )
        return text
