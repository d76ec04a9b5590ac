"""`RequestMemory`: the row and the KV pages of each admitted request.

Does not: choose requests, or preempt one for another; `Scheduler` does both.
"""

from graphpact_engine.pools import PagePool, RequestPool
from graphpact_engine.request import Request


class RequestMemory:
    """Gives requests rows and pages of the pools, and takes them back.

    Args:
        rows: The pool of request rows.
        pages: The pool of KV pages.
        num_reserved: KV slots that a decode step reserves for each request.
        max_model_len: Maximum length of a sequence, prompt and output.
    """

    def __init__(self, rows: RequestPool, pages: PagePool, *, num_reserved: int, max_model_len: int) -> None:
        self.rows = rows
        self.pages = pages
        self._num_reserved = num_reserved
        self._max_model_len = max_model_len

    def most_slots(self, request: Request) -> int:
        """Return the maximum number of KV slots of a request: its tokens, and those reserved after them."""
        longest = min(len(request.prompt_token_ids) + request.sampling.max_new_tokens, self._max_model_len)
        return longest + self._num_reserved - 1

    def pages_to_grow(self, request: Request) -> int:
        """Return how many pages an admitted request may lack in its next decode step."""
        owned = len(request.pages)
        if self.most_slots(request) <= owned * self.pages.page_size:
            return 0
        return max(self.pages.pages_for(request.num_tokens - 1 + self._num_reserved) - owned, 1)

    def admit(self, request: Request, margin: int) -> bool:
        """Allocate the row of a request and the pages of its known tokens.

        Args:
            request: The request.
            margin: Pages that must stay free, in addition to those of its next step.

        Returns:
            Whether there is room; if not, nothing was allocated.
        """
        pages_for = self.pages.pages_for
        if (
            self.rows.num_free == 0
            or pages_for(request.num_tokens + self._num_reserved) + margin > self.pages.num_free
            or (pages := self.pages.alloc(pages_for(request.num_tokens))) is None
        ):
            return False
        request.row = self.rows.alloc()
        request.pages = pages
        return True

    def grow(self, request: Request) -> bool:
        """Allocate the slots of a decode step; return False, and do nothing, without free pages."""
        most = request.num_computed + self._num_reserved
        if most <= len(request.pages) * self.pages.page_size:
            return True
        pages = self.pages.alloc(self.pages.pages_for(most) - len(request.pages))
        if pages is None:
            return False
        request.pages += pages
        return True

    def give_back(self, request: Request) -> None:
        """Free the pages of a running request that hold none of its tokens."""
        kept = self.pages.pages_for(request.num_computed)
        if kept < len(request.pages):
            self.pages.free(request.pages[kept:])
            del request.pages[kept:]

    def release(self, request: Request) -> None:
        """Free the row and all pages of a request."""
        self.pages.free(request.pages)
        request.pages = []
        if request.row is not None:
            self.rows.free(request.row)
        request.row = None
