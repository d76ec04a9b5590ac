"""Capture sizes: the smallest shape that holds a batch, or the reason why none does."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError
from graphpact.shapes import CaptureSizes, EagerReason, GraphShape, default_decode_batch_sizes

EXAMPLES = settings(derandomize=True, max_examples=100)
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)
UNIFORM = [mode for mode in ForwardMode if not mode.is_ragged and mode is not ForwardMode.IDLE]
RAGGED = [mode for mode in ForwardMode if mode.is_ragged]
VARIANTS = ("", "lora", "long")


def _batch(
    size: int,
    mode: ForwardMode = ForwardMode.DECODE,
    width: int = 1,
    together: tuple[int, ...] | None = None,
    tokens: int | None = None,
    requests: tuple[int, ...] | None = None,
) -> Any:
    """Return a batch; ``together`` and ``requests`` are the tokens and requests of all ranks."""
    return SimpleNamespace(
        batch_size=size,
        forward_mode=mode,
        num_tokens=size * width if tokens is None else tokens,
        global_num_tokens_cpu=together,
        global_batch_sizes_cpu=requests,
    )


@EXAMPLES
@given(sizes=SIZES, ranks=st.lists(st.integers(0, 45), min_size=1, max_size=4), width=st.integers(1, 3))
def test_ranks_that_gather_take_the_shape_of_the_largest(
    sizes: list[int], ranks: list[int], width: int
) -> None:
    """Every rank, even an idle one, takes the shape of the rank with the most requests."""
    captured = CaptureSizes.uniform(ForwardMode.DECODE, sizes, width)
    together = tuple(size * width for size in ranks)
    largest = captured.fit(_batch(max(ranks), width=width))
    for size in ranks:
        mode = ForwardMode.DECODE if size else ForwardMode.IDLE
        assert captured.fit(_batch(size, mode, width, together)) == largest


@EXAMPLES
@given(counts=SIZES, ranks=st.lists(st.integers(0, 45), min_size=1, max_size=4))
@pytest.mark.parametrize("mode", RAGGED)
def test_ranks_of_ragged_batches_take_the_shape_of_the_most_tokens(
    mode: ForwardMode, counts: list[int], ranks: list[int]
) -> None:
    """If all shapes hold equally many requests, ranks take the shape of the rank with the most tokens."""
    captured = CaptureSizes.by_tokens(mode, counts, batch_size=4)
    largest = captured.fit(_batch(1, mode, tokens=max(ranks)))
    for tokens in ranks:
        batch = _batch(min(tokens, 4), mode, tokens=tokens, together=tuple(ranks))
        assert captured.fit(batch) == largest


@EXAMPLES
@given(
    pairs=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 30)), min_size=1, max_size=8),
    ranks=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 32)), min_size=1, max_size=4),
)
@pytest.mark.parametrize("mode", RAGGED)
def test_one_rank_has_more_requests_and_another_more_tokens(
    mode: ForwardMode, pairs: list[tuple[int, int]], ranks: list[tuple[int, int]]
) -> None:
    """All ranks take the smallest shape with room for the most requests and for the most tokens."""
    captured = CaptureSizes.by_pairs(mode, pairs)
    requests, tokens = (tuple(counts) for counts in zip(*ranks, strict=True))
    expected = captured.fit(_batch(max(requests), mode, tokens=max(tokens)))
    found = {captured.fit(_batch(n, mode, tokens=t, together=tokens, requests=requests)) for n, t in ranks}
    assert found == {expected}


@EXAMPLES
@given(sizes=SIZES, ranks=st.lists(st.integers(1, 45), min_size=2, max_size=4), width=st.integers(2, 4))
@pytest.mark.parametrize("mode", UNIFORM)
def test_the_requests_of_other_ranks_do_not_change_the_width_of_a_batch(
    mode: ForwardMode, sizes: list[int], ranks: list[int], width: int
) -> None:
    """A batch with the captured tokens per request takes the joint shape; another one has another width."""
    captured = CaptureSizes.uniform(mode, sizes, width)
    together = tuple(size * width for size in ranks)
    largest = captured.fit(_batch(max(ranks), mode, width))
    for size in ranks:
        batch = _batch(size, mode, width, together, requests=tuple(ranks))
        assert captured.fit(batch) == largest
        batch.num_tokens = size * (width - 1)
        assert captured.fit(batch) is EagerReason.OTHER_WIDTH


@EXAMPLES
@given(sizes=SIZES, size=st.integers(0, 45), width=st.integers(1, 3))
@pytest.mark.parametrize("mode", UNIFORM)
def test_the_smallest_shape_that_holds_the_requests(
    mode: ForwardMode, sizes: list[int], size: int, width: int
) -> None:
    """A uniform batch takes the smallest size that holds it; a batch of another width runs eagerly."""
    captured = CaptureSizes.uniform(mode, sizes, width)
    fitting = [s for s in sizes if s >= size]
    expected: GraphShape | EagerReason = EagerReason.OVER_LARGEST
    if fitting:
        expected = GraphShape(mode, min(fitting), min(fitting) * width)
    assert captured.fit(_batch(size, mode, width)) == expected
    if size:
        assert captured.fit(_batch(size, mode, width + 1)) is EagerReason.OTHER_WIDTH


@EXAMPLES
@given(
    pairs=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 30), st.sampled_from(VARIANTS)),
        min_size=1,
        max_size=10,
    ),
    requests=st.integers(1, 7),
    tokens=st.integers(0, 35),
    variant=st.sampled_from(VARIANTS),
)
@pytest.mark.parametrize("mode", RAGGED)
def test_the_smallest_shape_that_holds_a_ragged_batch(
    mode: ForwardMode, pairs: list[tuple[int, int, str]], requests: int, tokens: int, variant: str
) -> None:
    """A ragged batch takes the fitting shape of its variant with the fewest tokens."""
    shapes = [GraphShape(mode, size, count, of) for size, count, of in pairs]
    fitting = [
        s for s in shapes if s.batch_size >= requests and s.num_tokens >= tokens and s.variant == variant
    ]
    found = CaptureSizes(tuple(shapes)).fit(_batch(requests, mode, tokens=tokens), variant)
    if not fitting:
        assert found is EagerReason.OVER_LARGEST
    else:
        assert found == min(fitting, key=lambda s: (s.num_tokens, s.batch_size))


@EXAMPLES
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.sampled_from(VARIANTS)), min_size=1),
    size=st.integers(1, 22),
    variant=st.sampled_from(VARIANTS),
)
def test_a_variant_takes_no_shape_of_another(sizes: list[tuple[int, str]], size: int, variant: str) -> None:
    """A uniform batch takes the smallest fitting size of its variant, and never one of another variant."""
    shapes = tuple(GraphShape(ForwardMode.DECODE, n, n, of) for n, of in sizes)
    fitting = [n for n, of in sizes if of == variant and n >= size]
    found = CaptureSizes(shapes).fit(_batch(size), variant)
    if fitting:
        assert found == GraphShape(ForwardMode.DECODE, min(fitting), min(fitting), variant)
    else:
        assert found is EagerReason.OVER_LARGEST


@EXAMPLES
@given(sizes=SIZES)
def test_shapes_ascend_without_repeats(sizes: list[int]) -> None:
    """Every size is listed once, smallest first, whatever order the sizes were given in."""
    captured = CaptureSizes.uniform(ForwardMode.DECODE, sizes, 2)
    assert [s.batch_size for s in captured.shapes] == sorted(set(sizes))
    assert {s.mode for s in captured.shapes} == {ForwardMode.DECODE}
    assert all(captured.fit(_batch(s.batch_size, width=2)) == s for s in captured.shapes)


def test_an_idle_batch_takes_the_smallest_shape() -> None:
    """A batch without requests fits the smallest shape of a uniform mode and of a ragged one."""
    idle = _batch(0, ForwardMode.IDLE)
    uniform = CaptureSizes.uniform(ForwardMode.TARGET_VERIFY, [4, 2], 3)
    assert uniform.fit(idle) == GraphShape(ForwardMode.TARGET_VERIFY, 2, 6)
    ragged = CaptureSizes.by_tokens(ForwardMode.EXTEND, [32, 16], 4)
    assert ragged.fit(idle) == GraphShape(ForwardMode.EXTEND, 4, 16)


def test_another_mode_is_another_reason() -> None:
    """A batch of a mode that is not captured has the reason WRONG_MODE, whatever its size."""
    captured = CaptureSizes.uniform(ForwardMode.DECODE, [1, 2])
    assert captured.fit(_batch(1, ForwardMode.EXTEND)) is EagerReason.WRONG_MODE
    assert captured.fit(_batch(9, ForwardMode.EXTEND)) is EagerReason.WRONG_MODE
    assert captured.fit(_batch(3)) is EagerReason.OVER_LARGEST


@pytest.mark.parametrize("sizes", [[], [0], [-1, 4], [4, 0]])
def test_impossible_sizes_are_refused(sizes: list[int]) -> None:
    """An empty list of sizes, or a size below 1, is an error that shows the sizes."""
    with pytest.raises(ConfigError) as error:
        CaptureSizes.uniform(ForwardMode.DECODE, sizes)
    assert str(sorted(sizes)) in str(error.value)


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ([GraphShape(ForwardMode.EXTEND, 2, 0)], "whole numbers from 1 up"),
        (
            [GraphShape(ForwardMode.DECODE, 1, 1), GraphShape(ForwardMode.EXTEND, 1, 4)],
            r"of several modes: decode\[bs=1, tokens=1\], extend\[bs=1, tokens=4\]",
        ),
        (
            [
                GraphShape(ForwardMode.TARGET_VERIFY, 2, 6),
                GraphShape(ForwardMode.TARGET_VERIFY, 4, 8),
            ],
            r"target_verify\[bs=4, tokens=8\] has another number of tokens per request",
        ),
        ([GraphShape(ForwardMode.DRAFT_EXTEND, 2, 5)], "another number of tokens per request"),
    ],
)
def test_shapes_that_no_lane_captures_together_are_refused(shapes: list[GraphShape], says: str) -> None:
    """Shapes without tokens, of two modes, or of two widths in a uniform mode are refused by name."""
    with pytest.raises(ConfigError, match=says):
        CaptureSizes(tuple(shapes))


@EXAMPLES
@given(most=st.integers(1, 1500), data=st.data())
def test_the_default_sizes_cover_every_batch(most: int, data: st.DataObject) -> None:
    """Every admissible batch fits a default size, which is little larger than the batch."""
    sizes = default_decode_batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    size = data.draw(st.integers(1, most))
    fit = CaptureSizes.uniform(ForwardMode.DECODE, sizes).fit(_batch(size))
    assert isinstance(fit, GraphShape)
    assert size <= fit.batch_size <= most
    assert fit.batch_size - size < max(8, 32 * (size > 512), 16 * (size > 256))


def test_a_shape_is_a_key_that_reads_well() -> None:
    """Equal shapes are one dictionary key, another variant is another key, and a shape prints its fields."""
    a = GraphShape(ForwardMode.DECODE, 4, 4)
    assert {a: 1}[GraphShape(ForwardMode.DECODE, 4, 4)] == 1
    assert a != GraphShape(ForwardMode.DECODE, 4, 4, "lora")
    assert str(a) == "decode[bs=4, tokens=4]"
    assert str(GraphShape(ForwardMode.EXTEND, 2, 8, "lora")) == "extend[bs=2, tokens=8, lora]"


def test_every_reason_is_a_name_and_a_sentence() -> None:
    """Each eager reason has a distinct name without spaces, for statistics, and a text of several words."""
    reasons = [value for value in vars(EagerReason).values() if isinstance(value, EagerReason)]
    assert len(reasons) == 6
    assert len({reason.name for reason in reasons}) == len(reasons)
    assert all(" " in str(reason) and " " not in reason.name for reason in reasons)


def test_a_plugin_adds_a_reason_of_its_own() -> None:
    """Reasons with equal names are equal and one dictionary key, whatever their texts."""
    reason = EagerReason("acme_too_long", "longer than its kernel takes")
    assert reason == EagerReason("acme_too_long", "in other words")
    assert {reason: 1}[EagerReason("acme_too_long", "in other words")] == 1
    assert reason != EagerReason.OVER_LARGEST


def test_modes() -> None:
    """`is_decode` is true for decode only, and `is_ragged` for extend and mixed only."""
    assert [mode for mode in ForwardMode if mode.is_decode] == [ForwardMode.DECODE]
    assert [mode for mode in ForwardMode if mode.is_ragged] == [
        ForwardMode.EXTEND,
        ForwardMode.MIXED,
    ]
