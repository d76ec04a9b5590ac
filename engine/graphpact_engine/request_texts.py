"""`RequestTexts`: the tokenizer of a checkpoint, and the text of each request.

Does not: encode prompts; `graphpact_engine.prompts` does.
"""

from collections.abc import Callable
from typing import Any

from graphpact_engine.errors import CheckpointError
from graphpact_engine.request import Request
from graphpact_engine.text import OutputText


class RequestTexts:
    """Loads the tokenizer on first use, and reads the text of requests.

    Args:
        load: Loads the tokenizer.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer.

        Raises:
            CheckpointError: The checkpoint has no tokenizer, or a broken one.
        """
        if self._tokenizer is None:
            self._tokenizer = self._load()
        return self._tokenizer

    def read(self, request: Request) -> OutputText:
        """Return the text of a request, up to its newest token; without a tokenizer it is empty."""
        if request.text is None:
            sampling = request.sampling
            try:
                tokenizer = self.tokenizer
            except CheckpointError:
                tokenizer = None
            request.text = OutputText(
                tokenizer,
                sampling.stop or (),
                prompt=request.prompt_token_ids,
                min_new_tokens=sampling.min_new_tokens or 0,
            )
        request.text.read(request.output_token_ids, finished=request.is_finished)
        return request.text

    def is_stopped(self, request: Request) -> bool:
        """Return whether the text of a request has a stop string."""
        return self.read(request).is_stopped
