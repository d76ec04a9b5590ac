"""`Problem`: one batch of random attention work in any mode, as lists for the oracle and as tensors.

`Problem.requests` contains plain lists for the oracle: the slots of the cached keys in order, and the new
tokens, each with its slot and its parent token. `Problem.batch` and `Problem.page_table` return tensors like
those of an engine, for the code under test.

Does not: draw a batch (see `graphpact_conformance.draws.batches`), or compute attention.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from graphpact import ForwardBatch, ForwardMode
from graphpact.buffers import GraphSlot
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.draws.lanes import HIDDEN, VOCAB, Config


@dataclass(frozen=True)
class Token:
    """A new token. In draft decode it is a branch, which has one token in every step.

    Args:
        token_id: Id in the first step. `next_id` returns the ids of later steps.
        slots: The KV slot of its key in each step. Empty with frozen KV.
        parent: Index of the new token that it follows. None if it follows the cached tokens.
        depth: Number of new tokens before it on its path.
    """

    token_id: int
    slots: list[int]
    parent: int | None
    depth: int


@dataclass(frozen=True)
class ProblemRequest:
    """One request.

    Args:
        row: Its request row.
        cached: KV slots of the cached keys, in the order of their positions.
        tokens: The new tokens.
        table: KV slots by position, as in its row of the page table.
        accepted: Number of accepted drafts, in draft extend.
    """

    row: int
    cached: list[int]
    tokens: list[Token]
    table: list[int]
    accepted: int = 0

    def path(self, token: int | None) -> list[int]:
        """Return the path to a new token: the indices of its ancestors, then its own index."""
        found = []
        while token is not None:
            found.append(token)
            token = self.tokens[token].parent
        return found[::-1]


_Ids = TypeVar("_Ids", int, torch.Tensor)


def next_id(token_id: _Ids, step: int) -> _Ids:
    """Return the token ids that follow those of ``step`` in a draft."""
    return (token_id * 5 + step + 3) % VOCAB


@dataclass(frozen=True, repr=False)
class Problem:
    """One batch.

    Args:
        case: The kind of step.
        requests: The requests in order. Empty for an idle batch.
        seed: Seed of the contents of the cache.
    """

    case: Case
    requests: list[ProblemRequest]
    seed: int

    def __repr__(self) -> str:
        return f"<{self.words}>"

    @property
    def words(self) -> str:
        """One line that describes the batch: request rows, cached keys, new tokens and their KV slots."""
        return self._line(map(self._words_of, self.requests))

    @property
    def brief(self) -> str:
        """The line for findings: the first requests and tokens, and how many more there are."""
        shown = self.requests if len(self.requests) <= _MOST_REQUESTS + 1 else self.requests[:_MOST_REQUESTS]
        words = [self._words_of(request, _MOST_TOKENS) for request in shown]
        more = len(self.requests) - len(shown)
        return self._line([*words, f"and {more} more requests"] if more else words)

    def _line(self, requests: Iterable[str]) -> str:
        size = f"{self.case}, {_counted(len(self.requests), 'request')}"
        return "; ".join([size, *requests, f"seed {self.seed}"])

    def _words_of(self, request: ProblemRequest, most: int | None = None) -> str:
        """Return the words of a request, with the ids and slots of its first tokens; None for all."""
        tokens = request.tokens
        ids = _listed([str(t.token_id) for t in tokens], most)
        slots = _listed([" then ".join(map(str, t.slots)) for t in tokens], most)
        text = (
            f"row {request.row}: {_counted(len(request.cached), 'cached key')} and"
            f" {_counted(len(tokens), 'new token')} with id{_s(len(tokens))} {ids}"
        )
        if self.case.num_slots:
            text += f", written to KV slot{_s(len(tokens) * self.case.num_slots)} {slots}"
        if self.case.tree:
            parents = _listed(["none" if t.parent is None else str(t.parent) for t in tokens], most)
            text += f", after new tokens {parents}"
        if self.case.mode is ForwardMode.DRAFT_EXTEND:
            text += f", {_counted(request.accepted, 'draft')} accepted"
        return text

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002, FBT001  called by hypothesis
        printer.text(repr(self))

    @property
    def tokens(self) -> list[Token]:
        """All new tokens, in the order of the batch."""
        return [t for r in self.requests for t in r.tokens]

    @property
    def batch_size(self) -> int:
        """The batch size in the fields of the batch, where one request may have several rows."""
        return len(self.requests) * self.case.rows_per_request

    @property
    def mode(self) -> ForwardMode:
        """The forward mode of the batch."""
        return self.case.mode if self.requests else ForwardMode.IDLE

    def rows_of(self, some: Sequence[ProblemRequest]) -> dict[str, list[int]]:
        """Return the indices of the rows of some of its requests, in their order, by axis: bs and tokens."""
        each, first = self.case.rows_per_request, 0
        requests: dict[int, range] = {}
        tokens: dict[int, range] = {}
        for at, request in enumerate(self.requests):
            requests[request.row] = range(at * each, (at + 1) * each)
            tokens[request.row] = range(first, first + len(request.tokens))
            first += len(request.tokens)
        return {
            "bs": [row for request in some for row in requests[request.row]],
            "tokens": [row for request in some for row in tokens[request.row]],
        }

    def page_table(self, config: Config) -> torch.Tensor:
        """Return the page table ``[num_rows, context]`` int32, which nobody writes.

        Unused entries are out of range.
        """
        slots, size = config.num_pages * config.page_size, (config.num_rows, config.context)
        key = slots, config.page_size, size
        if key not in self._tables:
            table = torch.full(size, slots + config.page_size + 1, dtype=torch.int32)
            table[0] = 0
            for r in self.requests:
                table[r.row, : len(r.table)] = torch.tensor(r.table, dtype=torch.int32)
            self._tables[key] = table
        return self._tables[key]

    @cached_property
    def _tables(self) -> dict[object, torch.Tensor]:
        """The page tables by the sizes of configurations; most batches are loaded several times."""
        return {}

    @cached_property
    def cached_slots(self) -> list[int]:
        """The KV slots of all cached keys, each once: requests may share pages."""
        return list(dict.fromkeys(slot for r in self.requests for slot in r.cached))

    def batch(self, *, counts: bool = False) -> ForwardBatch:
        """Return the batch in new tensors, with the count of its live tokens if ``counts``."""
        tokens = len(self.tokens)
        new: dict[str, Any] = {name: None if t is None else t.clone() for name, t in self._fields.items()}
        return ForwardBatch(
            forward_mode=self.mode,
            batch_size=self.batch_size,
            **new,
            num_token_non_padded=_int64([tokens]).int() if counts else None,
            num_token_non_padded_cpu=tokens if counts else None,
        )

    @cached_property
    def _fields(self) -> dict[str, torch.Tensor | None]:
        """The tensors of the batch by field; None for a field that its kind of step does not have."""
        case = self.case
        rows = [r for r in self.requests for _ in range(case.rows_per_request)]
        new = _int64([len(r.tokens) for r in self.requests]) if case.mode.is_ragged else None
        counted = case.mode not in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE) and not case.frozen
        lens = _int64([len(r.cached) + counted * len(r.tokens) for r in rows])
        slots = _int64([t.slots or [0] for t in self.tokens]).view(-1, max(case.num_slots, 1))
        accepted = [r.accepted for r in self.requests] if case.mode is ForwardMode.DRAFT_EXTEND else None
        return {
            "input_ids": _int64([t.token_id for t in self.tokens]),
            "positions": _int64([len(r.cached) + t.depth for r in self.requests for t in r.tokens]),
            "out_cache_loc": slots if case.mode is ForwardMode.DRAFT_DECODE else slots[:, 0],
            "req_pool_indices": _int64([r.row for r in rows]),
            "seq_lens": lens,
            "seq_lens_cpu": lens,
            "extend_seq_lens": new,
            "extend_seq_lens_cpu": new,
            "tree_mask": self._tree_mask() if case.tree else None,
            "num_correct_drafts": None if accepted is None else _int64(accepted).int(),
        }

    def value_of(self, slot: GraphSlot) -> torch.Tensor:
        """Return a random value of a field that a runner defines, on the host; see `rig.drawn_batch`."""
        equal = self.case.rows_per_request
        shape = slot.shape_fn(len(self.requests), len(self.tokens) // equal)
        rng = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}:{slot.name}".encode()))
        if slot.dtype is torch.bool:
            value = torch.rand(shape, generator=rng) < 0.5
        elif slot.dtype.is_floating_point:
            value = torch.randn(shape, generator=rng)
            value = -value.abs() if value.dim() == 1 else value
        else:
            value = torch.randint(VOCAB, shape, generator=rng)
        repeats = equal > 1 and slot.axis != "none"
        return (value.repeat_interleave(equal, dim=0) if repeats else value).to(slot.dtype)

    def embedded(self, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random ``input_embeds`` and ``mrope_positions`` of the tokens, on the host."""
        tokens = len(self.tokens)
        rng = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}:embeds".encode()))
        embeds = (torch.randn(tokens, HIDDEN, generator=rng) / HIDDEN**0.5).to(config.dtype)
        return embeds, torch.randint(config.context, (3, tokens), generator=rng)

    def _tree_mask(self) -> torch.Tensor:
        paths = [r.path(j) for r in self.requests for j in range(len(r.tokens))]
        mask = torch.zeros(len(paths), self.case.tokens_per_request or 1, dtype=torch.bool)
        at = [(row, token) for row, path in enumerate(paths) for token in path]
        mask[tuple(_int64(at).view(-1, 2).T)] = True
        return mask


_MOST_REQUESTS, _MOST_TOKENS = 4, 8
"""The requests of a batch, and the tokens of a request, that a finding shows."""


def _listed(texts: Sequence[str], most: int | None) -> str:
    """Return the first texts, and how many more there are."""
    shown = texts if most is None or len(texts) <= most + 1 else texts[:most]
    more = len(texts) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{_s(number)}"


def _s(number: int) -> str:
    """Return the plural ending of a noun after a number."""
    return "" if number == 1 else "s"


def _int64(values: Sequence[object]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
