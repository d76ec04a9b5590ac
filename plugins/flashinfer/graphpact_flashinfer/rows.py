"""The rows of a batch in FlashInfer's kernels, counted on the host.

A kernel is planned on the host, from ``seq_lens_cpu`` and ``extend_seq_lens_cpu``.

Does not: read a device tensor.
"""

from dataclasses import dataclass

from graphpact import ForwardBatch


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """The row after the last request that owns the padding tokens of an extend (SGLang PR 21452).

    FlashInfer requires ``qo_indptr[-1] == q.shape[0]``, and at least as many keys as queries in a causal
    request. All its pages are page 0, scratch. The rows of live requests do not change.

    Args:
        pad_tokens: Its number of queries: the static token count minus the token count of the batch.
        extra_kv: Its number of keys, which is equal.
        num_dummy_pages: Its number of pages.
    """

    pad_tokens: int
    extra_kv: int
    num_dummy_pages: int

    @classmethod
    def of(cls, static_num_tokens: int, num_tokens: int, page_size: int) -> "FakeRequest":
        """Return the fake request for a batch of ``num_tokens`` tokens, from host numbers only."""
        pad = static_num_tokens - num_tokens
        return cls(pad, pad, -(-pad // page_size))


@dataclass(frozen=True, slots=True)
class Rows:
    """The numbers of queries and keys of every row, on the host.

    Args:
        num_q: Queries of each row.
        num_kv: Keys of each row.
    """

    num_q: list[int]
    num_kv: list[int]

    @classmethod
    def of(cls, view: ForwardBatch, page_size: int) -> "Rows":
        """Return the rows of ``view``.

        Raises:
            EngineError: An extend lacks its host lengths.
        """
        uncounted = view.uncounted_keys
        keys = [length + uncounted for length in view.seq_lens_cpu.tolist()]
        if view.forward_mode.is_ragged:
            queries: list[int] = view.required_extend_lens()[1].tolist()
            fake = FakeRequest.of(view.num_tokens, sum(queries), page_size)
            return cls([*queries, fake.pad_tokens], [*keys, fake.extra_kv])
        width = view.tokens_per_request
        if view.is_branched:
            return cls([1] * view.num_tokens, [n for n in keys for _ in range(width)])
        return cls([width] * len(keys), keys)

    def within(self, window: int | None, page_size: int) -> "Rows":
        """Return the rows without the pages before the window of every query."""
        if window is None:
            return self
        first = [
            max(keys - queries + 1 - window, 0) // page_size
            for queries, keys in zip(self.num_q, self.num_kv, strict=True)
        ]
        keys = [n - page * page_size for n, page in zip(self.num_kv, first, strict=True)]
        return Rows(self.num_q, keys)


def num_rows(view: ForwardBatch) -> int:
    """Return how many rows ``view`` has in the kernels."""
    if view.forward_mode.is_ragged:
        return view.batch_size + 1
    return view.num_tokens if view.is_branched else view.batch_size
