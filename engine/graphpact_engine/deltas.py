"""`DeltaStream`: the tokens of some requests of an engine, one `Delta` for each token.

Every request keeps its output, and a stream remembers how much of it was returned. So streams and calls of
`Engine.step` can take turns: a token stays in its request until the stream of that request returns it.

Does not: queue requests, or run steps in the background: a call of ``next`` runs a step if no token is ready.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from graphpact_engine.request import FinishReason, Request
from graphpact_engine.text import OutputText


@dataclass(frozen=True, slots=True)
class Delta:
    """One generated token of one prompt.

    Args:
        index: Index of the prompt in the call.
        token_id: The token.
        text: The text that may be shown with this token: empty while a character is incomplete, and while the
            text may be the beginning of a stop string.
        finish_reason: Why the request ended with this token; None if it goes on.
    """

    index: int
    token_id: int
    text: str
    finish_reason: FinishReason | None


def _nothing() -> None:
    pass


class DeltaStream(Iterator[Delta]):
    """An iterator of the tokens of some requests, in the order of their generation.

    The last delta of a request has its finish reason, unless the request was aborted after it. Closing the
    stream aborts the requests that have not ended. An error in ``next`` and garbage collection of the stream
    do the same.

    Args:
        requests: The requests, queued in an engine. `Delta.index` is an index in them.
        step: Runs a step of that engine.
        read: Returns the text of a request, up to its newest token.
        abort: Aborts a request.
        indices: `Delta.index` of each request; by default its index in ``requests``.
        finish: Called once all requests have ended, before the iteration ends.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        step: Callable[[], object],
        read: Callable[[Request], OutputText],
        abort: Callable[[Request], object],
        indices: Sequence[int] | None = None,
        finish: Callable[[], object] = _nothing,
    ) -> None:
        self.requests = tuple(requests)
        """The requests, in the order of the prompts."""
        self._step = step
        self._read = read
        self._abort = abort
        self.indices = range(len(requests)) if indices is None else indices
        """`Delta.index` of each request."""
        self._finish = finish
        self._num_given = [0] * len(requests)
        self._open = list(range(len(requests)))  # indices of requests that may have more tokens
        self._ready: deque[Delta] = deque()

    def __next__(self) -> Delta:
        try:
            self._collect()
            while self._open and not self._ready:
                self._step()
                self._collect()
            if not self._ready:
                finish, self._finish = self._finish, _nothing
                finish()
        except BaseException:
            self.close()
            raise
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def close(self) -> None:
        """Abort the requests that have not ended. There are no more deltas."""
        self._open.clear()
        self._ready.clear()
        for request in self.requests:
            self._abort(request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _collect(self) -> None:
        """Take the tokens that were generated since the last call."""
        if self._ready:
            return
        for index in self._open:
            request = self.requests[index]
            token_ids, pieces = request.output_token_ids, self._read(request).pieces
            for at in range(self._num_given[index], len(token_ids)):
                last = request.is_finished and at == len(token_ids) - 1
                reason = request.finish_reason if last else None
                self._ready.append(Delta(self.indices[index], token_ids[at], pieces[at], reason))
            self._num_given[index] = len(token_ids)
        self._open = [index for index in self._open if not self.requests[index].is_finished]
