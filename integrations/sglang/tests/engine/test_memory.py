"""The strict tape knows the memory around SGLang's graphs: what they may write, and what they must reset."""

from typing import Any

import pytest
import torch
from engines import run_in_child
from plants import use

from graphpact_sglang.attention.paged import PagedAttnBackend

DECODE = {"cuda_graph_backend_prefill": "disabled"}


class _Before(PagedAttnBackend):
    """Does work of its own in front of each layer's attention."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.calls = torch.zeros(1)
        self.fixed = model_runner.model.lm_head.weight
        self.table = model_runner.req_to_token_pool.req_to_token

    def work(self, q: torch.Tensor) -> torch.Tensor:
        """Return the queries, after the work."""
        raise NotImplementedError

    def forward_decode(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Work, then attend."""
        return super().forward_decode(self.work(q), *args, **kwargs)


class WritesTheTable(_Before):
    """Its graph writes the table of the scheduler."""

    def work(self, q: torch.Tensor) -> torch.Tensor:
        """Write a row that no request has."""
        self.table[0].mul_(1)
        return q


class WritesWeights(_Before):
    """Its graph writes a weight."""

    def work(self, q: torch.Tensor) -> torch.Tensor:
        """Write the weight as it is."""
        self.fixed[0].mul_(1)
        return q


class Counts(_Before):
    """Counts its calls in a workspace, and reads the count: the host reset it before the capture only."""

    def work(self, q: torch.Tensor) -> torch.Tensor:
        """Scale by the count."""
        self.calls += 1
        return q / self.calls


class CountsFromZero(Counts):
    """Resets its count inside the graph."""

    def work(self, q: torch.Tensor) -> torch.Tensor:
        """Scale by a count that begins with one."""
        self.calls.zero_()
        return super().work(q)


@pytest.mark.parametrize(
    ("backend", "named"),
    [
        (WritesTheTable, r"writes req_to_token, which is not declared as written"),
        (WritesWeights, r"writes (model\.embed_tokens|lm_head)\.weight, which is not declared as written"),
        (Counts, r"a second replay on the same inputs gives another result; .*: Counts\.calls"),
    ],
)
def test_a_strict_tape_refuses_a_graph_that_writes_or_keeps_what_it_must_not(
    backend: type, named: str
) -> None:
    """The start ends with the name of the memory; on the fast tape the engine serves."""
    with pytest.raises(AssertionError, match=named):
        run_in_child("tape:strict", before=use(backend), **DECODE)


def test_a_strict_tape_accepts_a_workspace_that_the_graph_resets() -> None:
    """Memory of a backend may be written in a graph, and the answers are those of the backend without it."""
    right = run_in_child("tape", **DECODE)
    run = run_in_child("tape:strict,guard,contents:1", before=use(CountsFromZero), **DECODE)
    assert run.tokens == right.tokens
    assert run.faults == []
    assert run.replays("DecodeCudaGraphRunner") > 20
