"""Recurrent states in the memory of a lane: `StateMemory`, its expected contents, and `LinearOracle`.

    before a step   the rows of each live request hold sums over its cached keys and values: the right sum in
                    the column of its last accepted token, sums of fewer or more tokens in other columns.
                    Rows of no request hold `UNOWNED`, because NaN would hide numbers that a kernel adds.
                    Row 0 is scratch and belongs to no request
    right outputs   linear attention in float64 over the cached and new tokens of a request, from the lists
                    of the problem
    after a step    the rows of live requests hold the state after each new token; other rows are unchanged

States are part of the cache, so the suite compares them wherever it compares KV slots.

Does not: read metadata, or advance states; see `graphpact_adapters.recurrent`.
"""

from collections.abc import Mapping, Sequence

import torch

from graphpact.attention import LayerSpec
from graphpact.tensors import same
from graphpact_adapters.backend import NUM_GROUPS
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.problems import Problem, ProblemRequest
from graphpact_conformance.experiments.comparison import excess, tolerance_of
from graphpact_conformance.oracle import OracleBackend
from graphpact_conformance.records.kv_memory import KvMemory

UNOWNED = 1e3
"""The elements of unowned state rows; their value is far from those of any request."""


class StateMemory(KvMemory):
    """A KV cache with recurrent states; backends get the attributes below with ``kv``.

    Args:
        config: The configuration of the lane.
        device: The device of the lane.

    Attributes:
        states: For each layer ``[state_rows, kv_heads, head_dim, v_head_dim]`` float64.
        state_blocks: ``[num_rows, groups, columns]`` int32: the state rows of each request row in each
            KV-cache group; no row occurs twice. The state rows of request row 0 are scratch.
        num_accepted: ``[num_rows]`` int32: accepted tokens of the last step of each request, from 1 to the
            number of columns.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        columns = config.case.tokens_per_request or 1
        owned = (config.num_rows - 1) * NUM_GROUPS * columns
        generator = torch.Generator().manual_seed(1)
        blocks = torch.zeros(config.num_rows, NUM_GROUPS, columns, dtype=torch.int32)
        blocks[1:] = 1 + torch.randperm(owned, generator=generator).view(-1, NUM_GROUPS, columns)
        self.state_blocks = self.kv.state_blocks = blocks.to(device)
        self.num_accepted = self.kv.num_accepted = torch.ones(
            config.num_rows, dtype=torch.int32, device=device
        )
        self.states = self.kv.states = [
            torch.full(
                (1 + owned, layer.num_kv_heads, layer.head_dim, layer.v_head_dim),
                UNOWNED,
                dtype=torch.float64,
                device=device,
            )
            for layer in config.layers
        ]
        self._layers = {state_name(at): at for at in range(len(self.states))}

    def contents(self) -> dict[str, torch.Tensor]:
        """Return copies of the KV cache, and of all states, on the host."""
        states = {name: self.states[at].clone().cpu() for name, at in self._layers.items()}
        return super().contents() | states

    def load(self, problem: Problem) -> None:
        """Fill the cache, and the states of the requests of a problem."""
        super().load(problem)
        generator = torch.Generator().manual_seed(problem.seed + 1)
        for layer, states in enumerate(self.states):
            states.fill_(UNOWNED)
            states[0] = torch.randn(states.shape[1:], generator=generator, dtype=torch.float64)
            keys, values = self.kv.k[layer], self.kv.v[layer]
            for request in problem.requests:
                blocks = self.blocks_of(request, layer)
                last = accepted_of(request, problem, len(blocks)) - 1
                for column, row in enumerate(blocks):
                    seen = request.cached[: max(len(request.cached) + min(column - last, 0), 0)]
                    states[row] = added(keys[seen], values[seen]).sum(0)
                    if column > last:  # rejected drafts
                        states[row] += torch.randn(states.shape[1:], generator=generator, dtype=torch.float64)
        for request in problem.requests:
            self.num_accepted[request.row] = accepted_of(request, problem, self.state_blocks.shape[2])

    def blocks_of(self, request: ProblemRequest, layer: int) -> list[int]:
        """Return the state rows of a request in a layer, by column."""
        blocks: list[int] = self.state_blocks[request.row, layer % NUM_GROUPS].tolist()
        return blocks

    def right_beside_kv(
        self, problem: Problem, caches: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the right states after a step, by name as in `contents`.

        Args:
            problem: The step, with rows of ``caches`` in place of KV slots.
            caches: The KV cache after it.
        """
        found = {}
        for name, layer in self._layers.items():
            right = torch.full(self.states[layer].shape, UNOWNED, dtype=torch.float64)
            keys, values = caches[f"the keys of layer {layer}"], caches[f"the values of layer {layer}"]
            for request in problem.requests:
                before = added(keys[request.cached], values[request.cached]).sum(0)
                new = [token.slots[0] for token in request.tokens]
                after = before + added(keys[new], values[new]).cumsum(0)
                right[self.blocks_of(request, layer)] = after
            found[name] = right
        return found

    def differs(self, name: str, actual: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return a mask of wrong elements outside scratch; in states, differences of rounding are allowed."""
        if name not in self._layers:
            return super().differs(name, actual, right)
        found = ~same(actual, right) & (excess(actual, right, tolerance_of(torch.float64)) > 1)
        found[: self.scratch_rows(name)] = False
        return found

    def scratch_rows(self, name: str) -> int:
        """Return 1 for states, which have one scratch row."""
        return 1 if name in self._layers else super().scratch_rows(name)

    def place(self, name: str, rows: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Return a description of rows, and their KV slots; states have no slots."""
        if name not in self._layers:
            return super().place(name, rows)
        return f"{name} in state rows {[*rows[:8]]}", ()


def state_name(layer: int) -> str:
    """Return the name of a layer's states in `StateMemory.contents`."""
    return f"the states of layer {layer}"


def accepted_of(request: ProblemRequest, problem: Problem, columns: int) -> int:
    """Return the number of accepted tokens of a request's last step, 1 to ``columns``; deterministic."""
    return 1 + (request.accepted + request.row + problem.seed) % columns


def added(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return ``[tokens, heads, head_dim, v_head_dim]`` float64: what each token adds to a state."""
    return torch.einsum("thk,thv->thkv", k.double(), v.double())


class LinearOracle(OracleBackend):
    """Linear attention in float64, computed from the lists of a problem key by key, without states."""

    def weights(self, scores: torch.Tensor, layer: LayerSpec, sees: torch.Tensor) -> torch.Tensor:
        """Return the scaled scores of the keys that each token sees; see `OracleBackend.weights`."""
        del layer
        return scores.where(sees, 0)
