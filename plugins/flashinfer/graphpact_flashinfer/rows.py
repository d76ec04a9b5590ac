"""The rows that FlashInfer's kernels see of a batch, counted on the host.

A kernel is planned on the host, from ``seq_lens_cpu`` and ``extend_seq_lens_cpu``: no tensor of the
device is read for it.

Does not: touch a tensor of the device.
"""

from dataclasses import dataclass

from graphpact import ForwardBatch


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """The request after the last that owns the padded tokens of an extend (SGLang PR 21452).

    FlashInfer wants ``qo_indptr[-1] == q.shape[0]``, and a causal request has no fewer keys than queries.
    Its pages are all page 0, which is scratch. The real requests are as they would be without it.

    Args:
        pad_tokens: Its queries: static tokens without the batch's.
        extra_kv: Its keys, as many.
        num_dummy_pages: Its pages.
    """

    pad_tokens: int
    extra_kv: int
    num_dummy_pages: int

    @classmethod
    def of(cls, static_num_tokens: int, num_tokens: int, page_size: int) -> "FakeRequest":
        """Return the one that ``num_tokens`` tokens of a batch need; host numbers, no device is asked."""
        pad = static_num_tokens - num_tokens
        return cls(pad, pad, -(-pad // page_size))


@dataclass(frozen=True, slots=True)
class Rows:
    """Queries and keys of every row, on the host.

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
            EngineError: An extend without its lengths on the host.
        """
        keys = [length + view.uncounted_keys for length in view.seq_lens_cpu.tolist()]
        if view.forward_mode.is_ragged:
            queries: list[int] = view.required_extend_lens()[1].tolist()
            fake = FakeRequest.of(view.num_tokens, sum(queries), page_size)
            return cls([*queries, fake.pad_tokens], [*keys, fake.extra_kv])
        width = view.tokens_per_request
        if view.is_branched:
            return cls([1] * view.num_tokens, [n for n in keys for _ in range(width)])
        return cls([width] * len(keys), keys)

    def within(self, window: int | None, page_size: int) -> "Rows":
        """Return the rows without the pages that lie before every query's window."""
        if window is None:
            return self
        first = [
            max(keys - queries + 1 - window, 0) // page_size
            for queries, keys in zip(self.num_q, self.num_kv, strict=True)
        ]
        keys = [n - page * page_size for n, page in zip(self.num_kv, first, strict=True)]
        return Rows(self.num_q, keys)


def num_rows(view: ForwardBatch) -> int:
    """Return how many rows the kernels see of ``view``."""
    if view.forward_mode.is_ragged:
        return view.batch_size + 1
    return view.num_tokens if view.is_branched else view.batch_size
