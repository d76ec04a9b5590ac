"""Capture sizes of lanes that gather: every rank of an attention group has an equal share of the tokens."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import ForwardMode, Limits
from graphpact.attention import DraftLimits
from graphpact.errors import ConfigError
from graphpact.parallel import get_parallel
from graphpact.runners import RunnerContext
from graphpact.shapes import default_decode_batch_sizes
from graphpact_flashinfer import FlashInferBackend

EXAMPLES = settings(derandomize=True, max_examples=100)
DEFAULTS = st.integers(1, 64).map(default_decode_batch_sizes)
RANKS = st.integers(1, 6)
WIDTH = st.integers(1, 6)


def _context(
    most: int,
    width: int = 1,
    *,
    batch_sizes: Sequence[int] | None = None,
    token_counts: Sequence[int] | None = None,
    gathers: bool = True,
) -> RunnerContext:
    """Return the context of a verify lane of ``width`` drafts, or of decode, for ``most`` of each."""
    draft = DraftLimits(1, 1, width) if width > 1 else DraftLimits()
    return RunnerContext(
        torch.device("cpu"),
        FlashInferBackend.capabilities,
        Limits(most, most, 64, 1, draft),
        mode=ForwardMode.TARGET_VERIFY if width > 1 else ForwardMode.DECODE,
        batch_sizes=batch_sizes,
        token_counts=token_counts,
        lane="verify",
        require_gathered_buffer=gathers,
    )


@EXAMPLES
@given(default=DEFAULTS, most=st.integers(6, 64), ranks=RANKS, width=WIDTH)
def test_default_sizes_become_multiples(default: list[int], most: int, ranks: int, width: int) -> None:
    """Ranks can divide the tokens of every size; each default size fits one, up to the largest possible."""
    with get_parallel().override(attn_tp_size=ranks):
        sizes = _context(most, width).require_batch_sizes(default)
    divisible = [size for size in range(1, most + 1) if size * width % ranks == 0]
    assert set(sizes) <= set(divisible)
    assert list(sizes) == sorted(set(sizes))
    for size in default:
        assert next((s for s in divisible if s >= size), divisible[-1]) in sizes


@EXAMPLES
@given(default=DEFAULTS, most=st.integers(6, 64), ranks=RANKS)
def test_default_token_counts_become_multiples(default: list[int], most: int, ranks: int) -> None:
    """Ranks can divide every token count; each default count fits one, up to the largest possible."""
    with get_parallel().override(attn_tp_size=ranks):
        counts = _context(most).require_token_counts(default)
    divisible = range(ranks, most + 1, ranks)
    assert set(counts) <= set(divisible)
    for count in default:
        assert next((c for c in divisible if c >= count), divisible[-1]) in counts


@EXAMPLES
@given(default=DEFAULTS, ranks=RANKS)
def test_sizes_of_lanes_that_do_not_gather_are_left_alone(default: list[int], ranks: int) -> None:
    """Without a gathered buffer, nobody divides the tokens, and default sizes stay as they are."""
    with get_parallel().override(attn_tp_size=ranks):
        assert list(_context(64, gathers=False).require_batch_sizes(default)) == default
        assert list(_context(64, gathers=False).require_token_counts(default)) == default


@EXAMPLES
@given(sizes=st.lists(st.integers(1, 24), min_size=1, max_size=6), ranks=RANKS, width=WIDTH)
def test_configured_sizes_are_taken_or_refused_but_never_changed(
    sizes: list[int], ranks: int, width: int
) -> None:
    """Configured sizes are used as given if ranks can divide the tokens of each; otherwise one is named."""
    context = _context(24, width, batch_sizes=sizes, token_counts=sizes)
    with get_parallel().override(attn_tp_size=ranks):
        for key, take, tokens in (
            ("batch_sizes", context.require_batch_sizes, width),
            ("token_counts", context.require_token_counts, 1),
        ):
            odd = [size for size in sizes if size * tokens % ranks]
            if not odd:
                assert take([1]) == sizes
                continue
            with pytest.raises(ConfigError, match=rf"verify\.{key} has {odd[0]}, but {ranks} ranks divide"):
                take([1])


@pytest.mark.parametrize(("width", "multiple"), [(1, 4), (2, 2), (3, 4), (4, 1), (6, 2)])
def test_the_error_gives_the_multiple_of_requests(width: int, multiple: int) -> None:
    """A verify lane counts its drafts: four ranks can divide the tokens of two requests with two each."""
    context = _context(24, width, batch_sizes=[1])
    with get_parallel().override(attn_tp_size=4):
        if multiple == 1:
            assert context.require_batch_sizes([]) == [1]
            return
        with pytest.raises(ConfigError) as error:
            context.require_batch_sizes([])
    assert f"give multiples of {multiple}," in str(error.value)


def test_a_limit_below_one_share_is_refused() -> None:
    """If no allowed size can be divided, the error names the limit and the smallest one that would do."""
    with get_parallel().override(attn_tp_size=4):
        with pytest.raises(ConfigError, match=r"at least 4 requests; engine\.max_num_seqs is 3"):
            _context(3).require_batch_sizes([1, 2])
        with pytest.raises(ConfigError, match=r"at least 4 tokens; engine\.max_num_batched_tokens is 3"):
            _context(3).require_token_counts([1, 2])
        assert list(_context(3, 4).require_batch_sizes([1, 2])) == [1, 2]


def test_a_configured_size_above_the_limit_is_refused() -> None:
    """A multiple that exceeds the limit is refused as in a lane of one rank."""
    with get_parallel().override(attn_tp_size=2), pytest.raises(ConfigError, match="has 10, but a step"):
        _context(8, batch_sizes=[2, 10]).require_batch_sizes([2])
