"""`RecurrentReads`: the data that a kernel of a recurrent layer reads from metadata, and its model.

A layer of the Mamba family reads no cached keys. A request has a state after each token of its last step, in
rows of a state memory. A step starts from the state after the last accepted token, and writes the state after
each of its new tokens into the rows of the request. The model of such kernels is linear attention:

    S_t = S_{t-1} + k_t v_t^T            out_t = scaling * q_t^T S_t

so the right output depends only on the keys and values of a request
(`graphpact_adapters.recurrent_states`). The model treats its arguments as the kernels of vLLM 0.33 do: a row
without queries reads nothing, a skipped index is neither read nor written, and everything else has to be in
bounds.

Does not: convolve, decay or gate, because that does not depend on metadata.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphpact.attention import KVBuffers, LayerSpec, new_kv
from graphpact.errors import ConfigError, KernelRefusal, named_options
from graphpact_adapters.kernel_reads import write_slots
from graphpact_kernels import define_kernel


@named_options
@dataclass(frozen=True)
class RecurrentReads:
    """The reads of a recurrent kernel in a decode step, or in a step that verifies drafts.

    Args:
        state_indices: ``[n]`` or ``[n, columns]`` int32: the state rows of each request. Column ``j`` is for
            the state after token ``j`` of a step.
        slot_mapping: ``[T]`` int64: the KV slot that each token writes; -1 for no write.
        num_tokens: The number of tokens that are computed, padding tokens included.
        num_requests: The number of rows of the launch; None to derive it from ``query_start_loc`` or
            ``num_tokens``.
        query_start_loc: ``[n + 1]`` int32: where each request's queries begin; None if every request has
            ``query_len`` queries.
        query_len: Queries of each request, with ``query_start_loc=None``.
        num_accepted_tokens: ``[n]`` int32: tokens of the last step that were accepted, the first one
            included. A step starts from the state in column ``num_accepted_tokens - 1``, or in column 0 with
            None.
        skipped: State indices that the kernel neither reads nor writes. If there are none, padding uses row
            0, which is scratch.
    """

    state_indices: torch.Tensor
    slot_mapping: torch.Tensor
    num_tokens: int
    num_requests: int | None = None
    query_start_loc: torch.Tensor | None = None
    query_len: int = 1
    num_accepted_tokens: torch.Tensor | None = None
    skipped: tuple[int, ...] = (0,)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        cache: KVBuffers,
        page_size: int,
    ) -> torch.Tensor:
        """Write keys and values to ``slot_mapping``, advance the states, and return the output.

        The output is ``[T, heads, v_head_dim]``; rows that belong to no request are zero. Kernels of this
        kind do not read keys in the KV cache; they are written only because the suite compares them.

        Raises:
            ConfigError: The lane has no states, or writes no keys.
            KernelRefusal: The index tensors contradict each other or the state memory.
        """
        del page_size
        states, new = getattr(cache, "states", None), new_kv(k, v, layer)
        if states is None or new is None:
            raise ConfigError(
                f"recurrent reads in a lane with {'no states' if states is None else 'frozen keys'}",
                hint='give the builders their kind: Builders(make, kind="mamba")',
            )
        k_cache, v_cache = cache.k[layer.cache_layer], cache.v[layer.cache_layer]
        write_slots(*new, self.slot_mapping, self.num_tokens, k_cache, v_cache)
        out = q.new_zeros(q.shape[0], layer.num_q_heads, layer.v_head_dim)
        offsets = self.query_start_loc
        requests = self.num_requests
        if requests is None:
            requests = self.num_tokens // self.query_len if offsets is None else len(offsets) - 1
        _step_states(
            *(q, *new, self.state_indices, offsets, self.query_len, self.num_accepted_tokens),
            *(requests, self.num_tokens, list(self.skipped), layer.scaling),
            *(states[layer.cache_layer], out),
        )
        return out


# -- the kernel -------------------------------------------------------------------------------------------


def _step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    query_len: int,
    num_accepted_tokens: torch.Tensor | None,
    num_requests: int,
    num_tokens: int,
    skipped: Sequence[int],
    scaling: float,
    states: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Advance ``states``, ``[rows, kv_heads, head_dim, v_head_dim]`` float64, and write ``out``."""
    table = (state_indices if state_indices.dim() > 1 else state_indices[:, None]).tolist()
    starts = _starts(query_start_loc, query_len, num_requests)
    _check(q, k, table, starts, num_accepted_tokens, num_requests, num_tokens)
    begun = []
    for row in range(num_requests):
        first, last = starts[row], starts[row + 1]
        if first == last:
            continue
        column = 0 if num_accepted_tokens is None else int(num_accepted_tokens[row]) - 1
        if not 0 <= column < len(table[row]):
            raise KernelRefusal(
                f"request {row}: num_accepted_tokens is {column + 1}; state_indices has {len(table[row])}"
                " columns, and the first token of a step is always accepted",
                rule="GP04",
            )
        if table[row][column] not in skipped:
            begun.append((row, first, last, states[_row(table[row][column], row, states)].clone()))
    # All rows are read before any is written: on a GPU nothing orders the requests of a launch.
    for row, first, last, state in begun:
        added = torch.einsum("thk,thv->thkv", k[first:last].double(), v[first:last].double())
        after = state + added.cumsum(0)
        grouped = q[first:last].double().unflatten(1, (k.shape[1], -1))  # the query heads of each key head
        attended = torch.einsum("thgk,thkv->thgv", grouped, after).flatten(1, 2)
        out[first:last] = (scaling * attended).to(out.dtype)
        for at, index in enumerate(table[row][: last - first]):
            if index not in skipped:
                states[_row(index, row, states)] = after[at]


def _starts(query_start_loc: torch.Tensor | None, query_len: int, num_requests: int) -> list[int]:
    if query_start_loc is None:
        return [row * query_len for row in range(num_requests + 1)]
    starts: list[int] = query_start_loc[: num_requests + 1].tolist()
    return starts


def _row(index: int, row: int, states: torch.Tensor) -> int:
    if not 0 <= index < len(states):
        raise KernelRefusal(
            f"request {row}: state index {index}; the state memory has {len(states)} rows", rule="GP04"
        )
    return index


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    table: Sequence[Sequence[int]],
    starts: Sequence[int],
    num_accepted_tokens: torch.Tensor | None,
    num_requests: int,
    num_tokens: int,
) -> None:
    """Check the index tensors against each other and the tokens."""
    accepted = num_requests if num_accepted_tokens is None else len(num_accepted_tokens)
    if min(len(table), len(starts) - 1, accepted) < num_requests:
        raise KernelRefusal(
            f"{num_requests} requests: state_indices has {len(table)} rows, query_start_loc {len(starts)} and"
            f" num_accepted_tokens {accepted} entries; each needs one per request, offsets one more",
            rule="GP05",
        )
    if (
        starts[0] != 0
        or [*starts] != sorted(starts)
        or starts[-1] > num_tokens
        or num_tokens > min(len(q), len(k))
    ):
        raise KernelRefusal(
            f"query_start_loc is {[*starts]} for {num_tokens} of {len(q)} tokens: offsets must begin at 0,"
            " must not decrease, and must end within the tokens",
            rule="GP05",
        )
    for row in range(num_requests):
        queries = starts[row + 1] - starts[row]
        if queries > len(table[row]):
            raise KernelRefusal(
                f"request {row}: {queries} queries; state_indices has {len(table[row])} columns",
                rule="GP05",
            )


_step_states = define_kernel(
    "step_states(Tensor q, Tensor k, Tensor v, Tensor state_indices, Tensor? query_start_loc, int query_len,"
    " Tensor? num_accepted_tokens, int num_requests, int num_tokens, int[] skipped, float scaling,"
    " Tensor(a!) states, Tensor(b!) out) -> ()",
    _step,
    namespace="graphpact_adapters",
)

__all__ = ["RecurrentReads"]
