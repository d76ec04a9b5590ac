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
    pipeline = draw(st.integers(1, 3))
    world = data * pipeline * tensor
    return [RankLayout(rank, tensor, data, attention_data, pipeline) for rank in range(world)]


@EXAMPLES
@given(ranks=layouts())
def test_every_rank_is_in_one_group_of_each_kind(ranks: list[RankLayout]) -> None:
    """The groups of each kind have every rank once, and all groups of a kind have one size.

    Replicas, stages and attention groups have consecutive ranks.
    """
    first = ranks[0]
    for groups, size, is_consecutive in (
        (first.replicas, first.pipeline * first.tensor, True),
        (first.stages, first.tensor, True),
        (first.pipelines, first.pipeline, False),
        (first.attention_groups, first.attention_tensor, True),
    ):
        listed = [rank for group in groups for rank in group]
        assert (listed if is_consecutive else sorted(listed)) == list(range(first.world))
        assert {len(group) for group in groups} == {size}


@EXAMPLES
@given(ranks=layouts())
def test_a_rank_knows_its_place_in_its_groups(ranks: list[RankLayout]) -> None:
    """A rank is at its own index of the groups that contain it, and all ranks list the same groups."""
    for layout in ranks:
        number = layout.replica * layout.pipeline + layout.stage
        assert layout.stages[number][layout.tensor_rank] == layout.rank
        group = layout.attention_groups[number * layout.attention_data + layout.attention_group]
        assert group[layout.attention_rank] == layout.rank
        pipeline = layout.pipelines[layout.replica * layout.tensor + layout.tensor_rank]
        assert pipeline[layout.stage] == layout.rank
        for kind in ("replicas", "stages", "pipelines", "attention_groups", "sharing"):
            assert getattr(layout, kind) == getattr(ranks[0], kind)


@EXAMPLES
@given(ranks=layouts())
def test_groups_are_nested(ranks: list[RankLayout]) -> None:
    """A replica consists of whole stages, and a stage of whole attention groups, each in its order."""
    first = ranks[0]
    for outer, inner in ((first.replicas, first.stages), (first.stages, first.attention_groups)):
        count = len(inner) // len(outer)
        for number, group in enumerate(outer):
            inside = inner[number * count : (number + 1) * count]
            assert [rank for each in inside for rank in each] == group


@EXAMPLES
@given(ranks=layouts())
def test_requests_are_divided_among_all_groups(ranks: list[RankLayout]) -> None:
    """Each of ``request_groups`` has the ranks of `sharing`: an attention group of every stage."""
    first = ranks[0]
    members = Counter(layout.request_group for layout in ranks)
    assert members == dict.fromkeys(range(first.request_groups), first.attention_tensor * first.pipeline)
    assert first.request_groups == first.data * first.attention_data
    replica = ranks[: first.pipeline * first.tensor]
    shared = [
        [place for place, layout in enumerate(replica) if layout.request_group == group]
        for group in range(first.attention_data)
    ]
    assert first.sharing == shared


def test_the_stages_of_a_replica_have_consecutive_ranks() -> None:
    """With two stages of two ranks, rank 0 sends to rank 2, and all four share requests."""
    layout = RankLayout(2, tensor=2, pipeline=2)
    assert layout.stages == [[0, 1], [2, 3]]
    assert layout.pipelines == [[0, 2], [1, 3]]
    assert layout.sharing == [[0, 1, 2, 3]]
    assert (layout.stage, layout.tensor_rank, layout.request_group) == (1, 0, 0)


def test_the_example_of_the_module() -> None:
    """With ``tensor=4, attention_data=2``, ranks 0 and 1 share requests and attention, as do 2 and 3."""
    layout = RankLayout(2, tensor=4, attention_data=2)
    assert layout.attention_groups == [[0, 1], [2, 3]]
    assert layout.replicas == [[0, 1, 2, 3]]
    assert (layout.request_group, layout.attention_rank, layout.tensor_rank) == (1, 0, 2)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tensor": 0}, "sizes of ranks: tensor 0, data 1, attention_data 1, pipeline 1"),
        ({"pipeline": 0}, "sizes of ranks: tensor 1, data 1, attention_data 1, pipeline 0"),
        ({"data": -1}, "sizes of ranks: tensor 1, data -1, attention_data 1"),
        ({"attention_data": 0}, "sizes of ranks: tensor 1, data 1, attention_data 0"),
        ({"tensor": 4, "attention_data": 3}, "attention_data 3 does not divide tensor 4"),
        ({"tensor": 2, "attention_data": 4}, "attention_data 4 does not divide tensor 2"),
        ({"rank": 1}, r"rank 1 of 1 ranks \(data 1 x pipeline 1 x tensor 1\)"),
        ({"rank": 6, "tensor": 2, "data": 3}, r"rank 6 of 6 ranks \(data 3 x pipeline 1 x tensor 2\)"),
        ({"rank": -1, "tensor": 2}, r"rank -1 of 2 ranks"),
    ],
)
def test_impossible_layouts_are_refused(sizes: dict[str, int], says: str) -> None:
    """A size below 1, a part that does not divide, or a rank that does not exist is refused by number."""
    with pytest.raises(ConfigError, match=says):
        RankLayout(**sizes)
