"""`RankLayout`: which ranks share what, for all sizes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.errors import ConfigError
from graphpact.ranks import RankLayout

EXAMPLES = settings(derandomize=True, max_examples=100)


@st.composite
def layouts(draw: st.DrawFn) -> list[RankLayout]:
    """Return the layouts of all ranks, for some sizes."""
    attention_data = draw(st.integers(1, 4))
    tensor, data = attention_data * draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return [RankLayout(rank, tensor, data, attention_data) for rank in range(data * tensor)]


@EXAMPLES
@given(ranks=layouts())
def test_every_rank_is_in_one_replica_and_one_attention_group(ranks: list[RankLayout]) -> None:
    """The groups of each kind have every rank once, in order, and all groups of a kind have one size."""
    first = ranks[0]
    for groups, size in (
        (first.replicas, first.tensor),
        (first.attention_groups, first.attention_tensor),
    ):
        assert [rank for group in groups for rank in group] == list(range(first.world))
        assert {len(group) for group in groups} == {size}


@EXAMPLES
@given(ranks=layouts())
def test_a_rank_knows_its_place_in_its_groups(ranks: list[RankLayout]) -> None:
    """A rank is at its own index of the groups that contain it, and all ranks list the same groups."""
    for layout in ranks:
        assert layout.replicas[layout.replica][layout.tensor_rank] == layout.rank
        assert layout.attention_groups[layout.request_group][layout.attention_rank] == layout.rank
        assert layout.replicas == ranks[0].replicas
        assert layout.attention_groups == ranks[0].attention_groups


@EXAMPLES
@given(ranks=layouts())
def test_an_attention_group_is_inside_a_replica(ranks: list[RankLayout]) -> None:
    """A replica consists of ``attention_data`` whole attention groups, numbered in its order."""
    for layout in ranks:
        inside = [layout.attention_groups[g] for g in _groups_of(layout)]
        assert [rank for group in inside for rank in group] == layout.replicas[layout.replica]


def _groups_of(layout: RankLayout) -> range:
    first = layout.replica * layout.attention_data
    return range(first, first + layout.attention_data)


@EXAMPLES
@given(ranks=layouts())
def test_requests_are_divided_among_all_groups(ranks: list[RankLayout]) -> None:
    """Each of ``request_groups`` has the same number of ranks, which are those of an attention group."""
    first = ranks[0]
    members = Counter(layout.request_group for layout in ranks)
    assert members == dict.fromkeys(range(first.request_groups), first.attention_tensor)
    assert first.request_groups == first.data * first.attention_data


def test_the_example_of_the_module() -> None:
    """With ``tensor=4, attention_data=2``, ranks 0 and 1 share requests and attention, as do 2 and 3."""
    layout = RankLayout(2, tensor=4, attention_data=2)
    assert layout.attention_groups == [[0, 1], [2, 3]]
    assert layout.replicas == [[0, 1, 2, 3]]
    assert (layout.request_group, layout.attention_rank, layout.tensor_rank) == (1, 0, 2)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tensor": 0}, "sizes of ranks: tensor 0, data 1, attention_data 1"),
        ({"data": -1}, "sizes of ranks: tensor 1, data -1, attention_data 1"),
        ({"attention_data": 0}, "sizes of ranks: tensor 1, data 1, attention_data 0"),
        ({"tensor": 4, "attention_data": 3}, "attention_data 3 does not divide tensor 4"),
        ({"tensor": 2, "attention_data": 4}, "attention_data 4 does not divide tensor 2"),
        ({"rank": 1}, r"rank 1 of 1 ranks \(data 1 x tensor 1\)"),
        ({"rank": 6, "tensor": 2, "data": 3}, r"rank 6 of 6 ranks \(data 3 x tensor 2\)"),
        ({"rank": -1, "tensor": 2}, r"rank -1 of 2 ranks"),
    ],
)
def test_impossible_layouts_are_refused(sizes: dict[str, int], says: str) -> None:
    """A size below 1, a part that does not divide, or a rank that does not exist is refused by number."""
    with pytest.raises(ConfigError, match=says):
        RankLayout(**sizes)
