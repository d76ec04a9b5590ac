"""`TextStream`: token ids to text, one token at a time, whole characters only.

A character may be spread over several tokens, and a tokenizer may write a token differently after
another one. So a window of tokens is decoded twice, without and with the new ones, and what the second
adds is given out once it does not end in the middle of a character.

Does not: encode.
"""

from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one request.

    Args:
        tokenizer: A transformers tokenizer; None gives out no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._window = 0  # where decoding starts
        self._given = 0  # tokens whose text is out

    def push(self, token_id: int, *, last: bool = False) -> str:
        """Return the text that ``token_id`` completes; on the last token, all that is left."""
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
