"""`agreed`: what follows from the exchanged numbers is the same on all ranks."""

from dataclasses import fields

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import ForwardBatch, ForwardMode
from graphpact.ranks import RankLayout, RankStep, agreed

EXAMPLES = settings(derandomize=True, max_examples=100)
SHARED = ("can_run_graph", "global_num_tokens_cpu", "global_batch_sizes_cpu")
"""The fields of a batch that all ranks of a replica decide together."""
LOCAL = "num_token_non_padded_cpu"


def _batch(requests: int, width: int) -> ForwardBatch:
    tokens, rows = torch.zeros(requests * width).long(), torch.ones(requests).long()
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY if requests else ForwardMode.IDLE,
        batch_size=requests,
        input_ids=tokens,
        positions=tokens,
        out_cache_loc=tokens,
        req_pool_indices=rows,
        seq_lens=rows,
        seq_lens_cpu=rows,
    )


class _Replica:
    """The ranks of a replica: their layouts, batches, and exchanged numbers."""

    def __init__(self, requests: list[int], attention: int, width: int, wants: list[bool]) -> None:
        self.requests, self.width = requests, width
        tensor = len(requests) * attention
        self.layouts = [RankLayout(rank, tensor, 1, len(requests)) for rank in range(tensor)]
        self.batches = [_batch(requests[layout.attention_group], width) for layout in self.layouts]
        self.wants = (wants * tensor)[:tensor]
        self.steps = [
            RankStep(batch.num_tokens, batch.batch_size, 0, int(wants_graph), 0, 0, 0)
            for batch, wants_graph in zip(self.batches, self.wants, strict=True)
        ]

    def agreed(self, *, gathers: bool) -> list[ForwardBatch]:
        """Return the batch of every rank."""
        return [
            agreed(batch, self.steps, layout, gathers=gathers)
            for batch, layout in zip(self.batches, self.layouts, strict=True)
        ]


REPLICAS = st.builds(
    _Replica,
    requests=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    attention=st.integers(1, 3),
    width=st.integers(1, 3),
    wants=st.lists(st.booleans(), min_size=1, max_size=12) | st.just([True]),
)


@EXAMPLES
@given(replica=REPLICAS, gathers=st.booleans())
def test_a_graph_only_if_every_rank_wants_one(replica: _Replica, *, gathers: bool) -> None:
    """All ranks may replay a graph if all want one; otherwise none may."""
    batches = replica.agreed(gathers=gathers)
    assert {batch.can_run_graph for batch in batches} == {all(replica.wants)}


@EXAMPLES
@given(replica=REPLICAS)
def test_counts_are_those_of_each_attention_group(replica: _Replica) -> None:
    """A gathering step has the tokens and requests of each group once, however many ranks share them."""
    for batch in replica.agreed(gathers=True):
        assert batch.global_batch_sizes_cpu == tuple(replica.requests)
        assert batch.global_num_tokens_cpu == tuple(n * replica.width for n in replica.requests)
        assert getattr(batch, LOCAL) == batch.num_tokens


@EXAMPLES
@given(replica=REPLICAS, gathers=st.booleans())
def test_all_ranks_decide_the_same(replica: _Replica, *, gathers: bool) -> None:
    """The shared fields are equal on all ranks; no field but these and the rank's own count changes."""
    batches = replica.agreed(gathers=gathers)
    for name in SHARED:
        assert len({getattr(batch, name) for batch in batches}) == 1
    for before, after in zip(replica.batches, batches, strict=True):
        changed = {f.name for f in fields(before) if getattr(after, f.name) is not getattr(before, f.name)}
        assert changed <= {*SHARED, LOCAL}


@EXAMPLES
@given(replica=REPLICAS)
def test_without_gathering_only_the_choice_of_a_graph_is_shared(replica: _Replica) -> None:
    """If layers do not gather, counts of other ranks must not enlarge the shape: they are left out."""
    for before, after in zip(replica.batches, replica.agreed(gathers=False), strict=True):
        assert after.can_run_graph == all(replica.wants)
        changed = {f.name for f in fields(before) if getattr(after, f.name) is not getattr(before, f.name)}
        assert changed <= {"can_run_graph"}
