"""A lane of a draft model with random weights, and the same model in plain loops as a reference.

The draft model has two layers beside one of the target in the same KV cache: one with keys and values, one
with latents. Its copy on frozen KV attends to the target's layer instead and writes nothing.

Does not: assert anything, or choose drafts.
"""

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from graphpact import (
    BackendContext,
    ForwardBatch,
    ForwardMode,
    GraphRunner,
    Lane,
    LayerSpec,
    Limits,
    StepOutputs,
)
from graphpact.attention import DraftLimits
from graphpact.speculation import HIDDEN_STATES, SCORES
from graphpact.step import Attend
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from rigs.lane import CPU, lane_of

CONTEXT, ROWS, VOCAB, HIDDEN, RANK = 48, 4, 9, 6, 4
SLOTS = 1 + ROWS * CONTEXT
TARGET = LayerSpec(0, 2, 1, HIDDEN, HIDDEN, scaling=0.5)
DRAFT = (
    LayerSpec(1, 2, 1, HIDDEN, HIDDEN, scaling=0.5),
    LayerSpec(2, 2, 1, HIDDEN, RANK, scaling=0.5, kv_lora_rank=RANK),
)
FROZEN = (LayerSpec(1, 2, 1, HIDDEN, HIDDEN, scaling=0.5, kv_layer=0),)

Path = list[list[torch.Tensor]]
"""The inputs of each layer, for the tokens of one branch."""


class DraftModelRig:
    """Lanes of one draft model over one KV cache.

    Args:
        draft: Steps, branches, verified tokens.
        seed: Seed of the weights and of the cache.
        frozen: Whether the model attends to the target's keys and writes none.
        dtype: Dtype of weights, hidden states and the KV cache.
    """

    def __init__(
        self, draft: DraftLimits, seed: int = 0, *, frozen: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        self.draft, self.frozen, self.dtype = draft, frozen, dtype
        self.layers = FROZEN if frozen else DRAFT
        self.generator = torch.Generator().manual_seed(seed)
        self.embed, self.unembed = self.random(VOCAB, HIDDEN), self.random(VOCAB, HIDDEN)
        self.mix, self.frequencies = self.random(HIDDEN, HIDDEN), torch.arange(1, HIDDEN + 1).to(dtype)
        self.queries = [self.random(2, HIDDEN, HIDDEN) for _ in DRAFT]
        self.keys = [self.random(HIDDEN, HIDDEN) for _ in DRAFT]
        self.values = self.random(HIDDEN, HIDDEN)
        self.table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32)
        self.table[1:] = 1 + torch.randperm(ROWS * CONTEXT, generator=self.generator).view(ROWS, CONTEXT)
        k = [torch.full((SLOTS, 1, HIDDEN), float("nan"), dtype=dtype) for _ in range(3)]
        self.kv = SimpleNamespace(
            k=k, v=[torch.full_like(k[0], float("nan")), k[0].clone(), k[2][..., :RANK]]
        )
        for cache in self.caches:
            cache[0] = 0.0

    @property
    def caches(self) -> list[torch.Tensor]:
        """The tensors of the KV cache, the target's keys and values first; no views."""
        return [self.kv.k[0], self.kv.v[0], self.kv.k[1], self.kv.v[1], self.kv.k[2]]

    def random(self, *shape: int) -> torch.Tensor:
        """Return random numbers."""
        return torch.randn(shape, dtype=self.dtype, generator=self.generator)

    def tokens(self, *shape: int) -> torch.Tensor:
        """Return random tokens."""
        return torch.randint(VOCAB, shape, generator=self.generator)

    def lane(
        self,
        mode: ForwardMode,
        runner: type[GraphRunner],
        *,
        strict: bool = False,
        sizes: list[int] | None = None,
    ) -> Lane:
        """Return a lane of the draft model with all shapes captured."""
        per_request = self.draft.topk if self.frozen else self.draft.tokens_per_request(mode) or CONTEXT
        most = ROWS * (self.draft.topk if self.frozen else 1)
        limits = Limits(most, ROWS * per_request, CONTEXT, 1, self.draft)
        backend = ReferenceBackend(
            BackendContext(CPU, self.dtype, self.layers, limits, self.table, self.kv, mode=mode)
        )
        lane = lane_of(
            backend,
            runner,
            self.model,
            strict=strict,
            batch_sizes=sizes,
            context={"hidden_size": HIDDEN, "dtype": self.dtype},
        )
        lane.capture_all()
        return lane

    # -- the model -------------------------------------------------------------------------------

    def begin(self, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer."""
        turn = torch.sin(positions[:, None] * self.frequencies)
        return (self.embed[ids] + turn + hidden @ self.mix).tanh()

    def model(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Run the draft model; in draft extend and prefill its outputs are those of the selected rows."""
        x = self.begin(batch.input_ids, batch.positions, batch.extra[HIDDEN_STATES])
        for at, layer in enumerate(self.layers):
            q = torch.einsum("th,nhd->tnd", x, self.queries[at])
            k = (x @ self.keys[at])[:, None]
            v = k[..., :RANK] if layer.kv_lora_rank else (x @ self.values)[:, None]
            a = attend(q, *((None, None) if self.frozen else (k, v)), layer, metadata).sum(1)
            x = x + torch.nn.functional.pad(a, (0, HIDDEN - a.shape[1]))
        x = x.tanh()
        rows = batch.selected_rows
        if rows is not None:
            x = x[rows]
        axis = "tokens" if rows is None else "bs"
        return StepOutputs(logits=(2 * x @ self.unembed.t(), axis), hidden_states=(x, axis))  # type: ignore[arg-type]

    def forward(
        self, token: int, hidden: torch.Tensor, position: int, row: int, cached: int, path: Path
    ) -> tuple[list[float], torch.Tensor, Path]:
        """Return what the model computes for one token, in float64, in plain loops.

        Args:
            token: The token.
            hidden: ``[HIDDEN]``: the hidden state that it reads.
            position: Its position.
            row: Its request row.
            cached: Number of tokens in the cache that the token sees.
            path: The inputs of each layer for the earlier tokens of its branch.

        Returns:
            Log probabilities, the hidden state, and the path with the token.
        """
        x = self.begin(torch.tensor([token]), torch.tensor([position]), hidden[None].float())[0].double()
        path = [list(inputs) for inputs in path] or [[] for _ in self.layers]
        slots = self.table[row, :cached].long()
        for at, layer in enumerate(self.layers):
            path[at].append(x)
            keys = list(self.kv.k[layer.cache_layer][slots, 0].double())
            values = list(self.kv.v[layer.cache_layer][slots, 0].double())
            for each in () if self.frozen else path[at]:
                key = each @ self.keys[at].double()
                keys.append(key)
                values.append(key[:RANK] if layer.kv_lora_rank else each @ self.values.double())
            added = torch.zeros(HIDDEN, dtype=torch.float64)
            for head in self.queries[at].double():
                weights = torch.softmax(torch.stack(keys) @ (x @ head) * layer.scaling, 0)
                out = (weights[:, None] * torch.stack(values)).sum(0)
                added[: len(out)] += out
            x = x + added
        x = x.tanh()
        return torch.log_softmax(2 * self.unembed.double() @ x, 0).tolist(), x, path

    # -- batches ---------------------------------------------------------------------------------

    def rows(self, count: int) -> torch.Tensor:
        """Return ``n`` distinct request rows."""
        return 1 + torch.randperm(ROWS, generator=self.generator)[:count]

    def cache_loc(self, rows: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """Return ``[bs, n]``: the KV slots of the next positions of each request."""
        n = max(self.draft.num_steps * self.draft.topk, self.draft.num_draft_tokens)
        return self.table[rows[:, None], lens[:, None] + torch.arange(n)].long()

    def fill_cache(self, rows: torch.Tensor, lens: torch.Tensor) -> None:
        """Write random keys and values of sequences of ``lens`` tokens; the rest of the cache is NaN."""
        for cache in self.caches:
            cache[1:] = float("nan")
            for row, length in zip(rows.tolist(), lens.tolist(), strict=True):
                cache[self.table[row, :length].long()] = self.random(length, 1, HIDDEN)

    def batch(self, mode: ForwardMode, lengths: Sequence[int], correct: Sequence[int] = ()) -> ForwardBatch:
        """Fill the cache for requests with ``lengths`` cached tokens, and return their batch."""
        bs, topk, width = len(lengths), self.draft.topk, self.draft.num_draft_tokens
        rows, lens = self.rows(bs), torch.tensor(lengths)
        self.fill_cache(rows, lens)
        slots = self.cache_loc(rows, lens)
        if mode is ForwardMode.DRAFT_EXTEND:
            return ForwardBatch(
                forward_mode=mode,
                batch_size=bs,
                input_ids=self.tokens(bs * width),
                positions=(lens[:, None] + torch.arange(width)).flatten(),
                out_cache_loc=slots[:, :width].flatten(),
                req_pool_indices=rows,
                seq_lens=lens + width,
                seq_lens_cpu=lens + width,
                num_correct_drafts=torch.tensor(correct, dtype=torch.int32),
                extra={HIDDEN_STATES: self.random(bs * width, HIDDEN)},
            )
        hidden = self.random(bs, HIDDEN).repeat_interleave(topk, 0)
        if mode is ForwardMode.DECODE:
            lens, rows = lens.repeat_interleave(topk), rows.repeat_interleave(topk)
            return ForwardBatch(
                forward_mode=mode,
                batch_size=len(rows),
                input_ids=self.tokens(bs).repeat_interleave(topk),
                positions=lens,
                out_cache_loc=torch.zeros_like(rows),
                req_pool_indices=rows,
                seq_lens=lens,
                seq_lens_cpu=lens.clone(),
                extra={HIDDEN_STATES: hidden},
            )
        first, tokens = torch.log_softmax(2 * self.random(bs, VOCAB), 1).topk(topk)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=bs,
            input_ids=tokens.flatten(),
            positions=lens.repeat_interleave(topk),
            out_cache_loc=slots[:, : topk * self.draft.num_steps].reshape(bs * topk, -1),
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            extra={HIDDEN_STATES: hidden, SCORES: first.flatten()},
        )


# -- the tree, in plain Python -----------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A candidate: its token, the log probability of its path, its parent's index, and the caller's data."""

    token: int
    score: float
    parent: int
    data: Any


Expand = Callable[[Node, int, int], tuple[Sequence[float], Any]]
"""``(node, row, level) -> (log probabilities, data of its children)``; ``row`` is the index of the branch."""


def single(number: float) -> float:
    """Return the float32 nearest to ``number``, so that sums of two are rounded as in float32."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def beam_search(
    first: Sequence[tuple[int, float]], expand: Expand, data: Any, draft: DraftLimits
) -> tuple[list[int], list[int], float]:
    """Return the best drafts of one request, their parents, and the least difference of two unequal scores.

    Args:
        first: Tokens and log probabilities of the first level.
        expand: Returns the continuations of a branch.
        data: The data of the first level.
        draft: Steps, branches, verified tokens.
    """
    nodes = [Node(-1, 0.0, 0, None), *(Node(token, score, 0, data) for token, score in first)]
    branches = list(range(1, len(nodes)))
    for level in range(1, draft.num_steps):
        begin = len(nodes)
        for row, at in enumerate(branches):
            chances, below = expand(nodes[at], row, level)
            for token in sorted(range(len(chances)), key=lambda t: -chances[t])[: draft.topk]:
                score = single(nodes[at].score + chances[token])
                nodes.append(Node(token, score, at, below))
        branches = _best(nodes, range(begin, len(nodes)), draft.topk)
    chosen = sorted(_best(nodes, range(1, len(nodes)), draft.num_draft_tokens - 1))
    order = {0: 0} | {at: i for i, at in enumerate(chosen, start=1)}
    return [nodes[at].token for at in chosen], [order[nodes[at].parent] for at in chosen], _gap(nodes)


def _best(nodes: list[Node], among: Sequence[int], count: int) -> list[int]:
    return sorted(among, key=lambda at: -nodes[at].score)[:count]


def _gap(nodes: list[Node]) -> float:
    scores = sorted(node.score for node in nodes[1:])
    return min((b - a for a, b in itertools.pairwise(scores) if b > a), default=1.0)


def drafts_of(outputs: StepOutputs, step: int = 1) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the drafts and parents of every ``step``-th row."""
    tokens, parents = (outputs[name][::step].tolist() for name in ("draft_tokens", "parents"))
    return zip(tokens, parents, strict=True)
