"""Bucket ladders: the smallest shape that fits, or the reason why none does."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError
from graphpact.shapes import BucketLadder, EagerReason, GraphShape, default_decode_batch_sizes

EXAMPLES = settings(derandomize=True, deadline=None, max_examples=100)
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def _batch(
    size: int,
    mode: ForwardMode = ForwardMode.DECODE,
    width: int = 1,
    together: tuple[int, ...] | None = None,
) -> Any:
    return SimpleNamespace(
        batch_size=size,
        forward_mode=mode,
        num_tokens=size * width,
        global_num_tokens_cpu=together,
    )


@EXAMPLES
@given(
    sizes=SIZES, ranks=st.lists(st.integers(0, 45), min_size=1, max_size=4), width=st.integers(1, 3)
)
def test_ranks_that_gather_take_the_bucket_of_the_largest(
    sizes: list[int], ranks: list[int], width: int
) -> None:
    """Whatever a rank has itself, idle ones too, it takes what the rank with most requests takes."""
    ladder = BucketLadder(ForwardMode.DECODE, sizes, width)
    together = tuple(size * width for size in ranks)
    largest = ladder.fit(_batch(max(ranks), width=width))
    for size in ranks:
        mode = ForwardMode.DECODE if size else ForwardMode.IDLE
        assert ladder.fit(_batch(size, mode, width, together)) == largest


@EXAMPLES
@given(sizes=SIZES, size=st.integers(0, 45), width=st.integers(1, 3))
def test_the_smallest_shape_that_fits(sizes: list[int], size: int, width: int) -> None:
    """A batch takes the smallest bucket of at least its size, as a search of all buckets finds it."""
    ladder = BucketLadder(ForwardMode.DECODE, sizes, width)
    fitting = [s for s in sizes if s >= size]
    expected: GraphShape | EagerReason = EagerReason.OVER_LARGEST
    if fitting:
        expected = GraphShape(ForwardMode.DECODE, min(fitting), min(fitting) * width)
    assert ladder.fit(_batch(size, width=width)) == expected
    if size:
        assert ladder.fit(_batch(size, width=width + 1)) is EagerReason.OTHER_WIDTH


@EXAMPLES
@given(sizes=SIZES)
def test_shapes_ascend_without_repeats(sizes: list[int]) -> None:
    """A ladder lists every size once, smallest first, whatever order it was given in."""
    ladder = BucketLadder(ForwardMode.DECODE, sizes)
    assert [s.batch_size for s in ladder.shapes] == sorted(set(sizes))
    assert ladder.largest.batch_size == max(sizes)
    assert all(ladder.fit(_batch(s.batch_size)) == s for s in ladder.shapes)


def test_another_mode_is_another_reason() -> None:
    """A batch of a mode that the ladder does not hold is told so, however small it is."""
    ladder = BucketLadder(ForwardMode.DECODE, [1, 2])
    assert ladder.fit(_batch(1, ForwardMode.EXTEND)) is EagerReason.WRONG_MODE
    assert ladder.fit(_batch(9, ForwardMode.EXTEND)) is EagerReason.WRONG_MODE
    assert ladder.fit(_batch(3)) is EagerReason.OVER_LARGEST


@pytest.mark.parametrize("sizes", [[], [0], [-1, 4], [4, 0]])
def test_impossible_sizes_are_refused(sizes: list[int]) -> None:
    """A ladder without a size, or with one below 1, is an error that shows the sizes."""
    with pytest.raises(ConfigError) as error:
        BucketLadder(ForwardMode.DECODE, sizes)
    assert str(sizes) in str(error.value)


@EXAMPLES
@given(most=st.integers(1, 1500), data=st.data())
def test_the_default_ladder_covers_every_size(most: int, data: st.DataObject) -> None:
    """No admissible batch is larger than the largest default bucket, and none is wasted on it."""
    sizes = default_decode_batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    size = data.draw(st.integers(1, most))
    fit = BucketLadder(ForwardMode.DECODE, sizes).fit(_batch(size))
    assert isinstance(fit, GraphShape)
    assert size <= fit.batch_size <= most
    assert fit.batch_size - size < max(8, 32 * (size > 512), 16 * (size > 256))


def test_a_shape_is_a_key_that_reads_well() -> None:
    """Equal shapes are one dictionary key, a variant makes another, and each prints as what it is."""
    a = GraphShape(ForwardMode.DECODE, 4, 4)
    assert {a: 1}[GraphShape(ForwardMode.DECODE, 4, 4)] == 1
    assert a != GraphShape(ForwardMode.DECODE, 4, 4, "lora")
    assert str(a) == "decode[bs=4, tokens=4]"
    assert str(GraphShape(ForwardMode.EXTEND, 2, 8, "lora")) == "extend[bs=2, tokens=8, lora]"


def test_every_reason_is_a_sentence() -> None:
    """Statistics print a reason's value: each is different and says something."""
    values = [reason.value for reason in EagerReason]
    assert len(set(values)) == len(values)
    assert all(" " in value for value in values)


def test_modes() -> None:
    """Decode is the mode of exactly one token a request."""
    assert ForwardMode.DECODE.is_decode
    assert not ForwardMode.EXTEND.is_decode
