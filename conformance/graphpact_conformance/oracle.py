"""The right results of a batch, from the lists of its requests: `answer`.

The runner's region runs once more, on the live batch, without graph and padding. Its attention is
`OracleBackend`: float64, over the requests' own lists of KV slots. Its model is the suite's, with the
positions and fields that a step has by the contract, not those that the region passes. So the region decides
only which tokens follow.

    positions      cached keys, plus the depth of a token in its draft; one more in each draft step
    fields         the batch's; hidden states of later passes are those of the token that is followed
    keys           the cached ones, and those of the tokens that a token follows

Does not: read a page table or metadata, or positions and lengths of a view.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from graphpact import LayerSpec
from graphpact.attention import (
    AttentionBackend,
    BackendContext,
    Capabilities,
    DraftMetadata,
    GraphSupport,
    HeadLayout,
    Limits,
    kv_tensors,
)
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import GraphSlot
from graphpact.shapes import GraphShape
from graphpact.speculation import HIDDEN_STATES
from graphpact.step import Attend, Forward, Region, StepOutputs
from graphpact_conformance.draws.problems import Problem, ProblemRequest
from graphpact_conformance.model import Model, Passes


@dataclass(frozen=True)
class Answer:
    """The right results of a batch.

    Args:
        rows: The outputs by name, as in `graphpact_conformance.lane.rig.StepRecord`; float64 for attention.
        caches: The KV cache after the step, by name; the scratch page is undefined.
    """

    rows: dict[str, torch.Tensor]
    caches: dict[str, torch.Tensor]


Compose = Callable[[Forward, "OracleBackend", Any], Region]
"""``(forward, oracle, metadata) -> region``: the region of a batch, with attention by the oracle."""


def answer(
    problem: Problem,
    batch: ForwardBatch,
    net: Model,
    context: BackendContext,
    padded_tokens: int | None = None,
    compose: Compose | None = None,
    oracle: "type[OracleBackend] | None" = None,
) -> Answer:
    """Return the right results of a problem.

    Args:
        problem: The problem, with slots of the KV cache of ``context``.
        batch: Its batch.
        net: The suite's model.
        context: The layers, and a KV cache with the state before the problem, which is written.
        padded_tokens: Tokens of the shape that ranks share; None: those of the batch.
        compose: The region of a plugin that composes its own; None for one forward pass.
        oracle: The class that attends; None for `OracleBackend`.
    """
    backend = (oracle or OracleBackend)(replace(context, provider="auto"), problem)  # it has no choice
    right = _RightPasses(problem, batch, backend, net, padded_tokens)
    passes = Passes(right)
    metadata = backend.init_metadata_eager(batch)
    region = (compose or partial(_one_pass, batch))(passes, backend, metadata)
    rows = dict(passes.watching(region)())
    if "rows" in rows and right.last is not None:
        rows["rows"] = right.last["rows"]  # the model's own: a region passes it on
    return Answer(_on_host(rows), _on_host(kv_tensors(context.kv_cache)))


def _one_pass(batch: ForwardBatch, forward: Forward, backend: "OracleBackend", metadata: Any) -> Region:
    return lambda: forward(batch, metadata, backend.forward)


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


# -- the model's inputs by the contract --------------------------------------------------------------


class _RightPasses:
    """The suite's model, with the inputs that the contract defines for each pass.

    Args:
        problem: The problem.
        batch: Its batch.
        backend: Learns of each pass which tokens its branches follow.
        net: The model.
        padded_tokens: See `answer`.
    """

    def __init__(
        self,
        problem: Problem,
        batch: ForwardBatch,
        backend: "OracleBackend",
        net: Model,
        padded_tokens: int | None,
    ) -> None:
        self._problem, self._batch, self._backend = problem, batch, backend
        self._net, self._padded_tokens = net, padded_tokens
        self._number = 0
        self._states: list[torch.Tensor] = []
        """The hidden states of each pass that gave one for each token."""
        self.last: StepOutputs | None = None
        """The outputs of the last pass."""

    def __call__(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Run one pass: of ``batch`` only the token ids count, and hidden states that no pass returned."""
        case, lists = self._problem.case, self._problem
        parents = self._parents(batch)
        extra = dict(batch.extra)
        for name, value in extra.items():
            if not self._number:
                extra[name] = self._batch.extra[name]
            elif name == HIDDEN_STATES and self._states:
                extra[name] = self._followed(value, parents)
        self._backend.follow(parents, metadata)
        ahead = 0
        if case.frozen:
            ahead = self._number
        elif case.mode is ForwardMode.DRAFT_DECODE and not isinstance(metadata, DraftMetadata):
            ahead = metadata
        positions = [len(r.cached) + t.depth + ahead for r in lists.requests for t in r.tokens]
        right = replace(
            self._batch,
            input_ids=batch.input_ids,
            positions=torch.tensor(positions, dtype=torch.int64, device=batch.device),
            num_token_non_padded=None,
            extra=extra,
            global_num_tokens_gpu=None,
            global_num_tokens_for_logprob_gpu=None,
        )
        if right.mrope_positions is not None:
            right.mrope_positions = right.mrope_positions + ahead
        self.last = self._net(right, metadata, attend, padded_tokens=self._padded_tokens)
        self._number += 1
        if "hidden_states" in self.last and self.last.axes["hidden_states"] == "tokens":
            self._states.append(self.last["hidden_states"])
        return self.last

    def _parents(self, batch: ForwardBatch) -> list[int]:
        """Return for each row of a pass the row of the pass before that it follows, of the same request.

        It is a row whose logits have the token among the best, and whose hidden state the region passes. If
        these differ, the token decides. A row without any follows itself.
        """
        rows = list(range(batch.num_tokens))
        if self.last is None or "logits" not in self.last or self.last.axes["logits"] != "tokens":
            return rows
        best = self.last["logits"].topk(self._problem.case.topk).indices.tolist()
        states, given = self.last["hidden_states"], batch.extra.get(HIDDEN_STATES)
        parents, first = [], 0
        for request in self._problem.requests:
            mine = range(first, first + len(request.tokens))
            first = mine.stop
            for row in mine:
                token = int(batch.input_ids[row])
                likely = [p for p in mine if token in best[p]]
                passed = [p for p in mine if given is not None and torch.equal(given[row], states[p])]
                choices = [p for p in passed if p in likely] or likely or passed or [row]
                parents.append(row if row in choices else choices[0])
        return parents

    def _followed(self, given: torch.Tensor, parents: Sequence[int]) -> torch.Tensor:
        """Return hidden states of the parents in the rows that hold one of any pass, or of the batch."""
        known = torch.cat([self._batch.extra[HIDDEN_STATES], *self._states])
        is_known = (given[:, None] == known[None]).flatten(2).all(dim=2).any(dim=1)
        return torch.where(is_known[:, None], self._states[-1][list(parents)], given)


# -- attention ---------------------------------------------------------------------------------------


class OracleBackend(AttentionBackend):
    """Attention in float64 from the lists of a problem. Its metadata is the number of the draft step.

    Args:
        context: As for any backend; the KV cache is written.
        problem: The problem.
    """

    capabilities = Capabilities(
        modes=frozenset(ForwardMode),
        graph_support=GraphSupport.NEVER,
        dtypes=frozenset(),
        devices=frozenset(),
        head_layouts=frozenset(HeadLayout),
        seq_len_fill_value=1,
        trees=True,
    )

    def __init__(self, context: BackendContext, problem: Problem) -> None:
        super().__init__(context)
        self._problem = problem
        self._written: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of the new tokens, by layer and step."""
        self._paths = [[row] for row in range(len(problem.tokens))]
        """For each branch the rows that it follows, one of each draft step."""
        self._groups = _groups_of(problem)
        self._sees: dict[tuple[int, int], torch.Tensor] = {}
        """The results of `_seen` in this pass, by group and step; layers have the same."""

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return none."""
        del limits
        return ()

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Any) -> int:
        """Return the number of the draft step, 0 in other batches."""
        del shape, buffers
        return view.draft_step or 0

    def fill_metadata(self, view: ForwardBatch, metadata: int) -> None:
        """Do nothing."""

    def follow(self, parents: Sequence[int], metadata: Any) -> None:
        """Note which rows the branches of the next pass follow; a pass over all steps stays in its rows."""
        self._sees.clear()
        if isinstance(metadata, DraftMetadata):
            self._paths = [[row] * len(metadata.steps) for row in range(len(parents))]
        else:
            before = self._paths
            self._paths = [[*before[parent][:metadata], row] for row, parent in enumerate(parents)]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: int,
    ) -> torch.Tensor:
        """Write keys and values to the slots of the new tokens, and return ``[T, heads, width]`` float64."""
        at, tokens = layer.cache_layer, self._problem.tokens
        k_cache, v_cache = self.context.kv_cache.k[at], self.context.kv_cache.v[at]
        if k is not None and v is not None:
            k, v = k[: len(tokens)], v[: len(tokens)]
            self._written[at, metadata] = k.cpu().double(), v.cpu().double()
            slots = [token.slots[metadata] for token in tokens]
            k_cache[slots], v_cache[slots] = k, v
        q, k_cache, v_cache = q.cpu().double(), k_cache.cpu(), v_cache.cpu()
        out = torch.empty(len(tokens), layer.num_q_heads, layer.v_head_dim, dtype=torch.float64)
        new = [self._written[at, step] for step in self._steps_of_keys(metadata)]
        for number, group in enumerate(self._groups):
            if (number, metadata) not in self._sees:
                self._sees[number, metadata] = self._seen(group, metadata)
            sees = self._sees[number, metadata]
            if layer.sliding_window is not None:
                from_here_on = sees.flip(2).cumsum(2).flip(2)
                sees = sees & (from_here_on <= layer.sliding_window)
            keys = group.attended(k_cache, [keys for keys, _ in new])
            values = group.attended(v_cache, [values for _, values in new])
            grouped = q[group.rows].unflatten(2, (layer.num_kv_heads, -1))  # the query heads of each KV head
            scores = torch.einsum("rthgw,rkhw->rthgk", grouped, keys) * layer.scaling
            weights = self.weights(scores.flatten(0, 1), layer, sees.flatten(0, 1)[:, None, None])
            out[group.rows] = torch.einsum("rthgk,rkhw->rthgw", weights.view_as(scores), values).flatten(2, 3)
        return out.to(self.context.device)

    def weights(self, scores: torch.Tensor, layer: LayerSpec, sees: torch.Tensor) -> torch.Tensor:
        """Return the weights of the values of all keys, ``[n, kv_heads, group, keys]`` in float64.

        A subclass may compute another kind of attention.

        Args:
            scores: The scaled products of the queries of ``n`` tokens with all keys, of the same shape.
            layer: The layer.
            sees: ``[n, 1, 1, keys]`` bool: the keys that each token sees.
        """
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        weights = scores.exp().where(sees, 0)
        total = weights.sum(dim=3, keepdim=True)
        if layer.sinks is not None:
            total = total + layer.sinks.cpu().double().exp().view(layer.num_kv_heads, -1, 1)
        return weights / total

    def _steps_of_keys(self, step: int) -> Sequence[int]:
        """Return the draft steps whose new keys a pass attends to; a pass on a frozen cache has none."""
        if self._problem.case.frozen:
            return ()
        return range(step + 1) if self._problem.case.mode is ForwardMode.DRAFT_DECODE else (0,)

    def _seen(self, group: "_Group", step: int) -> torch.Tensor:
        """Return ``[requests, tokens, keys]`` bool: the keys of `_Group.attended` that each token sees."""
        count, steps = group.rows.shape[1], len(self._steps_of_keys(step))
        new = torch.zeros(len(group.requests), count, steps, count, dtype=torch.bool)
        for at, request in enumerate(group.requests if steps else ()):
            first = int(group.rows[at, 0])
            for token in range(count):
                if self._problem.case.mode is ForwardMode.DRAFT_DECODE:
                    path = self._paths[first + token][:steps]
                    new[at, token, range(steps), [row - first for row in path]] = True
                else:
                    new[at, token, 0, request.path(token)] = True
        cached = group.is_cached[:, None].expand(-1, count, -1)
        return torch.cat([cached, new.flatten(2)], dim=2)


class _Group(NamedTuple):
    """Requests of a batch with equally many new tokens.

    Args:
        requests: The requests.
        rows: ``[requests, tokens]`` int64: the rows of their tokens.
        cached: ``[requests, keys]`` int64: the KV slots of their cached keys, filled up with 0.
        is_cached: ``[requests, keys]`` bool: where these are.
    """

    requests: Sequence[ProblemRequest]
    rows: torch.Tensor
    cached: torch.Tensor
    is_cached: torch.Tensor

    def attended(self, cache: torch.Tensor, new: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return ``[requests, keys, KV heads, width]`` float64: the cached keys, then the new ones.

        Args:
            cache: Keys or values by KV slot. What only fills up a row is 0 in the result.
            new: The keys or values of all new tokens, for each draft step.
        """
        cached = cache[self.cached].double().where(self.is_cached[:, :, None, None], 0)
        return torch.cat([cached, *(each[self.rows] for each in new)], dim=1)


def _groups_of(problem: Problem) -> list[_Group]:
    """Return the requests of a batch in groups."""
    by_count: dict[int, list[tuple[ProblemRequest, range]]] = {}
    first = 0
    for request in problem.requests:
        rows = range(first, first + len(request.tokens))
        first = rows.stop
        if rows:
            by_count.setdefault(len(rows), []).append((request, rows))
    found = []
    for each in by_count.values():
        requests = [request for request, _ in each]
        longest = max(len(request.cached) for request in requests)
        cached = [[*r.cached, *[0] * (longest - len(r.cached))] for r in requests]
        ends = torch.tensor([len(request.cached) for request in requests])
        found.append(
            _Group(
                requests,
                torch.tensor([[*rows] for _, rows in each]),
                torch.tensor(cached, dtype=torch.int64).view(len(requests), longest),
                torch.arange(longest) < ends[:, None],
            )
        )
    return found
